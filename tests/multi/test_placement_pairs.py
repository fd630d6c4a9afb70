"""Roles on ranks of their own, paired with what they can meet: critics, frozen reward models, teachers and juniors,
three roles that learn at once, adapters, episodes, rollouts ahead, and an exit with a resume. Each run on sets of two
ranks equals the run whose roles share two ranks, bit for bit: metrics, iterations, recipe's state and models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cut_runs
import golden_runs
import placement_runs
import pytest
import test_critics_run
import test_lora_run

pytestmark = [pytest.mark.multi, pytest.mark.slow]
RANKS = 6
QUICK = ("three_ahead",)  # the others: make test-more
Make = Callable[[Path, str], dict[str, Any]]


def named(make: Callable[[Path], dict[str, Any]]) -> Make:
    def settings(base: Path, name: str) -> dict[str, Any]:
        own = make(base)
        return own | {"run": own["run"] | {"name": name, "save_every": 1}}

    return settings


def episodes(base: Path, name: str) -> dict[str, Any]:
    """Requests of episodes come when the environment asks. Which of them meet in a batch depends on time, and with it
    the last digits of their log-probs: so the engine has one at a time."""
    return cut_runs.tango_agents(base, name) | {"engine": {"kind": "embedded", "max_batch": 1}}


def golden(run: str) -> Make:
    """Returns a function that makes the config of one of the runs of `make golden`."""

    def settings(base: Path, name: str) -> dict[str, Any]:
        if not (base / "golden").exists():
            (base / "golden").mkdir()
            golden_runs.write_inputs(base / "golden")
        own = golden_runs.configs(base / "golden", [])[run]
        own["reward"]["target"] = "open_centre_rewards:begins_well"
        return own | {"run": own["run"] | {"dir": f"{base}/runs", "name": name, "save_every": 1}}

    return settings


# {name: (config, {role: its ranks of 6}, max_staleness, iterations after which the run on sets exits and is resumed)}
PAIRS: dict[str, tuple[Make, dict[str, str | int], int, int | None]] = {
    "critic": (cut_runs.ppo, {"generator": "1-2", "critic": "4-5"}, 0, 2),
    "critic_ahead": (cut_runs.ppo, {"generator": "1-2", "critic": "4-5"}, 2, 2),
    "critic_same": (cut_runs.ppo, {"generator": "4-5", "critic": "4-5"}, 1, None),
    "critic_shared": (cut_runs.ppo_shared, {"generator": 2}, 2, 2),
    "reward_model": (named(test_critics_run.stepped), {"generator": 2, "critic": 2, "reward": 2}, 0, 1),
    "critics": (
        named(test_critics_run.tango),
        {"generator": "0-1", "generator_critic": "4-5", "verifier": "2-3", "verifier_critic": "2-3"}, 1, 2,
    ),
    "three": (cut_runs.three, {"proposer": 2, "solver": 2, "judge": 2}, 0, 2),
    "three_ahead": (cut_runs.three, {"proposer": "2-3", "solver": "4-5", "judge": "0-1"}, 1, 1),
    "judge": (cut_runs.pairwise, {"generator": "4-5", "judge": "1-2"}, 2, 3),
    "adapters": (test_lora_run.settings, {"proposer": "2-3", "solver": "4-5"}, 1, 1),
    "teacher": (golden("distil"), {"student": "4-5", "teacher": "1-2"}, 0, None),
    "junior": (golden("tandem"), {"generator": "4-5"}, 0, None),
    "episodes": (episodes, {"agent": "4-5", "verifier": "2-3"}, 2, 3),
}  # fmt: skip


def placed(settings: dict[str, Any], sets: dict[str, str | int], staleness: int, ranks: int) -> dict[str, Any]:
    roles = {name: part | ({"ranks": sets[name]} if name in sets else {}) for name, part in settings["roles"].items()}
    run = settings["run"] | {"save_every": 2 if staleness else 1}  # iterations overlap between two checkpoints
    more = {"run": run, "rollouts": {"max_staleness": staleness}, "launch": {"nproc": ranks}}
    return settings | {"roles": roles, **more}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with the models and data of the runs."""
    folder = tmp_path_factory.mktemp("placement")
    cut_runs.write_data(folder, test_lora_run.RUBRIC)
    cut_runs.write_players(folder)
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.matrix] * (n not in QUICK)) for n in PAIRS])
def test_placement_of_pairs_gives_the_bits_of_shared_ranks(base, name):
    make, sets, staleness, leave_after = PAIRS[name]
    shared, apart = f"{name}_on_shared", f"{name}_apart"
    cut_runs.run_all(base, [(placed(make(base, shared), {}, staleness, 2), None)])
    own = placed(make(base, apart), sets, staleness, RANKS)
    cut_runs.run_all(base, [(own, leave_after), (own, None)] if leave_after else [(own, None)], RANKS)
    cut_runs.assert_same(base / "runs" / shared, base / "runs" / apart)
    if name == "three_ahead":  # all three are updated in each iteration
        found = placement_runs.overlaps(base / "runs" / apart, "solver", "judge")
        assert any(first == second for first, second in found), "the roles' updates run at the same time"
