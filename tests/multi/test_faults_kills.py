"""Runs that are killed between two checkpoints, of methods whose credit reads scores of the trainer or changes rewards.
Their stored iterations are those that the recipe gave before scores and credit, so that a resumed run is the run that
nobody killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cut_runs
import pytest
from durable_runs import KilledRun, agents, single, tango

from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.multi, pytest.mark.slow]
GAE = {"target": "gae", "args": {"kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 16}}


def with_critics(settings: dict[str, Any]) -> dict[str, Any]:
    settings["recipe"]["args"] |= {"estimator": GAE}
    for name, part in list(settings["roles"].items()):
        settings["roles"][f"{name}_critic"] = {**part, "head": "value", "loss": {}}
    return settings


def hacpo(base: Path, name: str) -> dict[str, Any]:
    found = single(base, name)
    loss = {"objective": "megatron_rl.contrib.hacpo:hacpo"}
    roles = zip(("first", "second"), cut_runs.PLAYERS, strict=False)
    found["roles"] = {name: cut_runs.role(base, model=model, lr=0.002, loss=loss) for name, model in roles}
    found["recipe"]["target"] = "megatron_rl.contrib.hacpo:Hacpo"
    return found


METHODS = {
    "ppo": cut_runs.ppo,
    "tango": lambda base, name: with_critics(tango(base, name)),
    "agents": lambda base, name: with_critics(agents(base, name)),
    "hacpo": hacpo,
}
CASES = [("ppo", [1]), *(pytest.param(method, [0, 1, 1], marks=pytest.mark.matrix) for method in METHODS)]


@pytest.mark.parametrize(("method", "kills"), CASES)
def test_faults_a_run_that_is_killed_between_checkpoints_is_the_undisturbed_run(tmp_path, method, kills):
    """`kills`: index of the last iteration that is trained on before each kill."""
    cut_runs.write_data(tmp_path, [{"criterion": "Is there a beginning?"}])
    cut_runs.write_players(tmp_path)
    runs = []
    for name in ("whole", "killed"):
        settings = METHODS[method](tmp_path, name)
        settings["run"] |= {"save_every": 3, "save_rollouts_every": 1}
        runs.append(KilledRun(tmp_path, settings))
    whole, killed = runs
    whole.finish(disturbed=False)
    for iteration in kills:
        killed.kill_between(iteration)
        assert not [*(killed.directory / "checkpoints").glob("iteration_*")]
    killed.finish(disturbed=False)
    cut_runs.assert_same(whole.directory, killed.directory)
    trained = [row for row in read_metrics(whole.directory) if row.metrics.get("skipped") == 0]
    assert {row.iteration for row in trained} > set(kills), "the killed iterations have a signal"
