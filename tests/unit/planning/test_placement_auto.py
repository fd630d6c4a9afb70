"""The ranks that `roles.NAME.ranks = auto` takes, and how a resumed run keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import case_of

from megatron_rl.config import files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig
from megatron_rl.main import main
from megatron_rl.planning import plan as plans
from megatron_rl.planning.schedule import simulated
from megatron_rl.run.run_directory import check_start
from megatron_rl.spec.automatic import chosen

THREE = Path(__file__).parents[3] / "examples/published/evolve_7b_3b_1.5b.yaml"
ROLES = ("proposer", "solver", "judge")
RANKS = 32  # of 4 nodes of the trainer
SMALL_STEPS = [
    "job.nodes=4",
    *(
        f"roles.{name}.{setting}"
        for name in ROLES
        for setting in ("samples_per_optimizer_step=8", "mean_tokens={prompt: 500, answer: 300}")
    ),
]


def config_of(directory: Path, *settings: str) -> TrainConfig:
    """Returns the config of a run whose ranks are all auto. `settings`: further overrides."""
    automatic = [f"roles.{name}.ranks=auto" for name in ROLES]
    return files.load(TrainConfig, [THREE], [f"run.dir={directory}", *SMALL_STEPS, *automatic, *settings])


def choice(config: TrainConfig, ranks: int = RANKS) -> tuple[dict[str, int | str], str]:
    said = list[str]()
    found = chosen(config, ranks, say=said.append)
    assert isinstance(found, TrainConfig)
    return {name: role.ranks for name, role in found.roles.items()}, " ".join(said)


def seconds(config: TrainConfig, ranks: dict[str, int | str]) -> float:
    settings = [f"roles.{name}.ranks={own}" for name, own in ranks.items()]
    placed = files.load(TrainConfig, [THREE], [f"run.dir={config.run.dir}", *SMALL_STEPS, *settings])
    case = case_of(placed, "7x8xA100-80")
    assert case.ranks == RANKS
    return simulated(case, plans.make(case)).cycle_s


def test_placement_auto_takes_the_ranks_with_the_shortest_cycle(tmp_path):
    config = config_of(tmp_path)
    best, said = choice(config)
    assert best.keys() == {*ROLES} and "auto" not in best.values() and "s with all roles on all ranks" in said
    others = [
        dict.fromkeys(ROLES, "all"),
        {"proposer": "0-7", "solver": "8-23", "judge": "24-31"},
        {"proposer": "0-15", "solver": "16-31", "judge": "0-15"},
    ]
    assert len({*best.values()}) > 1
    assert all(seconds(config, best) <= seconds(config, other) + 1e-6 for other in others)


def test_placement_auto_keeps_the_ranks_of_the_first_start(tmp_path):
    wanted = config_of(tmp_path)
    first = {"proposer": "0-7", "solver": "8-23", "judge": "24-31"}
    started = replace(wanted, roles={name: replace(wanted.roles[name], ranks=own) for name, own in first.items()})
    wanted.directory.mkdir(parents=True)
    (wanted.directory / "config.yaml").write_text(files.dump(started))
    again, said = choice(wanted)
    assert again == first and "because the run was started with these values" in said
    assert not check_start(wanted.run, files.dump(wanted))
    with pytest.raises(ConfigError, match="leave 32 ranks to the trainer, and it has 24"):
        choice(wanted, 24)  # the ranks of the first start do not exist there


def test_placement_auto_is_for_all_roles(tmp_path):
    with pytest.raises(ConfigError, match=r"ranks of judge that are not auto: give each role auto, or none"):
        choice(config_of(tmp_path, "roles.judge.ranks=0-7"))


def test_placement_auto_without_sizes_of_models_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"ranks = auto: the times cannot be predicted, set ranks instead"):
        choice(config_of(tmp_path, "roles.judge.model.path=no/such/model"))


def test_placement_auto_in_a_plan(capsys):
    """Adapters of one base stay together."""
    words = ["plan", str(THREE.parent / "tango_lora_qwen2.5_7b.yaml"), "--cluster", "2x8xA100-80", "--json"]
    assert main([*words, *(f"roles.{name}.ranks=auto" for name in ("generator", "verifier"))]) == 0
    [shared] = json.loads(capsys.readouterr().out)["sets"]
    assert shared["roles"] == ["generator", "verifier"]
