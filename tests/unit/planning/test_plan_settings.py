"""The settings that `megatron-rl plan` gives for engines and layouts make the run that it planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import specs as checks
from plan_cases import spec_of

from megatron_rl.commands.settings import load
from megatron_rl.config.schema import TrainConfig
from megatron_rl.main import main
from megatron_rl.planning.case import own_cluster, server_gpus, trainer_gpus
from megatron_rl.planning.hardware import parse_cluster

EXAMPLES = Path(__file__).parents[3] / "examples"
EMBEDDED = "engine={kind: embedded}"
SPLIT = ["launch.nproc=6", "engine.gpus=[6,7]"]


def planned(capsys, *arguments: str) -> dict:
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "settings", "cluster"),
    [
        ("published/tandem_qwen3_4b.yaml", [], ""),
        ("published/distil_qwen3_1.7b.yaml", ["rollouts.max_staleness=1"], ""),
        ("published/distil_qwen3_1.7b.yaml", [], "1x8xA100-80"),  # engines and trainer share a node
        ("published/distil_qwen3_1.7b.yaml", SPLIT, ""),
        pytest.param("published/evolve_qwen2.5_3b.yaml", [], "", marks=pytest.mark.matrix),
        pytest.param("published/grpo_qwen2.5_7b.yaml", [EMBEDDED], "4x8xA100-80", marks=pytest.mark.matrix),
        pytest.param(
            "published/grpo_qwen2.5_7b.yaml",
            ["engine.colocate=false", "engine.gpus=[0,1,2,3,4,5,6,7]", "engine.tp=1"],
            "",
            marks=pytest.mark.matrix,
        ),
        ("published/tango_qwen2.5_7b.yaml", [], "4x8xA100-80"),
    ],
)
def test_settings_ask_for_the_cluster_that_was_planned_and_pass_the_check(name, settings, cluster, capsys):
    """They left job.nodes out: a run on two nodes was refused on one, and one on four got two more."""
    given, search = [str(EXAMPLES / name), *settings], [] if "/tango" in name else ["--search"]
    found = planned(capsys, *given, *(["--cluster", cluster] if cluster else []), *search)
    rows = [*found["engines"][1:], *found["search"]]
    assert len(rows) > 3
    for row in rows:
        _, config = load([*given, *row["overrides"]])
        assert isinstance(config, TrainConfig)
        spec = spec_of(config)
        own = own_cluster(spec.engine, spec.cluster)
        assert own == found["cluster"], row["overrides"]
        ranks = trainer_gpus(spec.engine, parse_cluster(own))
        assert ranks == row["trainer_gpus"]
        assert server_gpus(spec.engine) == row.get("engine_gpus", server_gpus(spec.engine))
        alone = config.launch.nproc > 1  # else whole nodes are the trainer's
        assert ranks == (config.launch.nproc if alone else 8 * config.job.nodes)
        checks.check(config, ranks, to_come=True)
    for row in found["engines"][1:]:
        again = planned(capsys, *given, *row["overrides"])
        assert bool(again["problems"]) == bool(row["problem"]) and again["cycle_s"] == pytest.approx(
            row["cycle_s"], rel=1e-6
        )


def test_the_embedded_engine_is_planned_without_iterations_beside_training(capsys):
    file = str(EXAMPLES / "published/distil_qwen3_1.7b.yaml")
    found = planned(capsys, file, "rollouts.max_staleness=1")["engines"]
    own = next(row for row in found if row["engine"].startswith("embedded"))
    assert own["overrides"] == [EMBEDDED, "rollouts.max_staleness=0", "job.nodes=2"]
    plain = next(row for row in planned(capsys, file)["engines"] if row["engine"].startswith("embedded"))
    assert own["cycle_s"] == pytest.approx(plain["cycle_s"])


def test_no_engine_is_listed_that_only_the_check_refuses(capsys):
    """Servers in the trainer's GPUs are the fastest, and take no differences of weights."""
    own = [
        str(EXAMPLES / "published/grpo_qwen2.5_7b.yaml"),
        "engine.colocate=false",
        "engine.replicas=2",
        "engine.tp=4",
    ]
    found = planned(capsys, *own)["engines"]
    assert any("engine.colocate=true" in row["overrides"] for row in found)
    found = planned(capsys, *own, "refit.delta=true")["engines"]
    assert len(found) > 2 and not any("engine.colocate=true" in row["overrides"] for row in found)


def test_advice_names_the_nodes_that_more_replicas_leave_to_the_trainer(capsys):
    more = ["engine.colocate=false", "engine.replicas=2", "engine.tp=4"]
    said = planned(capsys, str(EXAMPLES / "published/grpo_qwen2.5_7b.yaml"), *more)["advice"]
    assert any("engine.replicas=4 job.nodes=3:" in line for line in said)
    said = planned(capsys, str(EXAMPLES / "published/tango_qwen2.5_7b.yaml"), EMBEDDED, "--cluster", "4x8xA100-80")[
        "advice"
    ]
    assert any("engine.replicas=8 job.nodes=2:" in line for line in said)
