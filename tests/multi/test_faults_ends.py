"""The end of a run says what it was: a run that failed, and one of which a role never learned."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from api_starts import forked_start
from rich.console import Console

from megatron_rl import RunFailed, Trainer
from megatron_rl.api import process
from megatron_rl.api.result import read_result
from megatron_rl.data.tiny import tiny_problems, write_tiny_model
from megatron_rl.jobs import status
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.report.pages import write_report
from megatron_rl.report.reading import read_run
from megatron_rl.report.run_comparison import arms, runs_table
from megatron_rl.training.iteration import RecipeRole

ROWS = [{"prompt": row["question"], "answer": row["answer"]} for row in tiny_problems(8)]
SETTINGS = {"updates": 2, "group_size": 4, "prompts_per_iteration": 4, "max_tokens": 8, "lr": 3e-3}


@dataclass(frozen=True, kw_only=True)
class WithIdle(Grpo):
    """Grpo with a second role, which has iterations, and no rollout in any of them."""

    def roles(self):
        return super().roles() | {"idle": RecipeRole()}

    def schedule(self):
        return [[("generator",)], [("idle",)]] * self.updates

    def rollout(self, iteration, source, context):
        return super().rollout(iteration, source, context) if iteration.role == "generator" else {"idle": []}


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "start", forked_start(tmp_path / "started"))
    model = write_tiny_model(tmp_path / "model")

    def made(reward, **settings):
        return Trainer(model, reward, ROWS, **{"dir": tmp_path, "name": "run", **SETTINGS, **settings})

    return made


def shown(run: Path) -> str:
    """What `megatron-rl status` prints."""
    console = Console(width=300, record=True)
    status.show(status.read(run, look_s=0, jobs=[]), console)
    return console.export_text()


def differ(completions, **columns):
    """Rewards that differ from text to text."""
    return [zlib.crc32(text.encode()) % 101 / 100 for text in completions]


def test_faults_a_run_that_failed_is_called_so_by_status_report_and_result(make, tmp_path):
    """It was `no job of it waits or runs`, `0 iterations so far` and `finished = False`."""
    place = tmp_path / "broken"
    place.touch()

    def sometimes(completions, **columns):
        if place.exists():
            raise LookupError("no such thing")
        return differ(completions)

    trainer, run = make(sometimes), tmp_path / "run"
    with pytest.raises(RunFailed):
        trainer.train()
    found = read_result(trainer.config.resolve().directory)
    assert found.failed is not None and found.failed.startswith("RewardFailure: ") and not found.finished
    assert "no such thing" in found.failed
    assert f"{run}: failed; 0 of 2 iterations" in (said := " ".join(shown(run).split()))
    assert f"its last start failed: {' '.join(found.failed.split())}" in said
    assert f"The run failed: {found.failed[:40]}" in write_report(run).read_text()
    assert "failed after 0 iterations" in str(runs_table([read_run(run)], arms([read_run(run)])))
    place.unlink()
    mended = trainer.train()
    assert mended.finished and mended.failed is None and "start failed" not in shown(run)


def test_faults_a_role_that_never_learned_is_said_at_the_end(make, tmp_path, capsys):
    """41 iterations of a verifier without an update ended with `done` and status 0, and nothing said so."""
    trainer = make(differ, recipe=f"{__name__}:WithIdle")
    result = trainer.train()
    assert result.finished and result.metrics["updates"] == {"generator": 2}
    said = "idle never learned: 2 iterations and no update"
    log = (tmp_path / "run/logs/driver.log").read_text()
    assert f"WARNING: {said}, as every group of its samples had equal rewards, or was left out" in log
    assert said in shown(tmp_path / "run") and "generator never learned" not in log
    page = write_report(tmp_path / "run").read_text()
    [signs] = page.split('<ul class="signs">')[1:]
    assert signs.startswith(f"<li>{said}.</li>"), "it is the first sentence of the report"
    assert "2 idle iterations, 0 updates" in page and "2 generator iterations, 2 updates" in page
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["metrics"]["update"] for row in rows if row["scope"] == "idle"] == [0, 0]
