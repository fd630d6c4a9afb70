"""Every training example for GPUs fits the cluster that it asks for, by `megatron-rl plan`, and waits long enough."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_rl.commands.settings import load
from megatron_rl.config.schema import TrainConfig
from megatron_rl.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def billions(file: Path) -> float:
    """Returns how many billions of parameters the largest model of a training example has by its name, else 0."""
    _, config = load([str(file)])
    if not isinstance(config, TrainConfig):
        return 0.0
    names = " ".join(role.model.path.replace("_", " ") for role in config.roles.values())
    return max(map(float, re.findall(r"(\d+(?:\.\d+)?)b\b", names.lower())), default=0.0)


FOR_GPUS = [str(file.relative_to(EXAMPLES)) for file in sorted(EXAMPLES.rglob("*.yaml")) if billions(file) >= 1]


def test_examples_for_gpus_are_found():
    assert {"dapo_qwen2.5_32b.yaml", "retool_qwen2.5_32b.yaml", "methods/gspo.yaml"} < set(FOR_GPUS)


@pytest.mark.parametrize("name", FOR_GPUS)
def test_an_example_fits_the_cluster_that_it_asks_for(name, capsys):
    """Servers of five examples had no room for one sequence, and ScaleRL's requests ended before its answers."""
    if name.startswith("search_"):
        pytest.importorskip("bm25s")
    status = main(["plan", str(EXAMPLES / name), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == 0, found["problems"]
    assert not [line for line in found["advice"] if "request_timeout_s" in line]


@pytest.mark.parametrize("name", ["tango_qwen2.5_7b.yaml", "tandem_qwen3_4b.yaml", "distil_qwen3_1.7b.yaml"])
@pytest.mark.parametrize("settings", [[], ["rollouts.max_staleness=1"]])
def test_the_settings_of_an_engine_make_the_run_that_was_planned(name, settings, capsys):
    """They left the trainer's nodes out, and offered the embedded engine with turns generated beside training."""
    given = [str(EXAMPLES / name), *settings]
    if settings and name.startswith("tango"):
        given += ["engine.colocate=false", "engine.replicas=2"]
    main(["plan", *given, "--json"])
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert len(engines) > 3
    for engine in engines[1:]:
        main(["plan", *given, *engine["overrides"], "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["trainer_gpus"] == engine["trainer_gpus"] and not found["problems"]
        assert found["step_s"] == pytest.approx(engine["step_s"], rel=0.01)
        ranks = str(engine["trainer_gpus"])
        assert main(["check", *given, *engine["overrides"], "--ranks", ranks, "--elsewhere"]) == 0
        capsys.readouterr()
