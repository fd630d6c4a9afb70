"""What a training run leaves, as a Python value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.run.metrics import read_metrics
from megatron_rl.run.run_directory import FAILED, RunDirectory

MODELS = "models"  # in a run's directory: one Hugging Face directory for each trained policy


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The files and metrics of a run, also of one that was stopped."""

    run: Path  # the run's directory
    finished: bool  # all iterations are done; else `train()` goes on
    failed: str | None  # why the last start failed, in a line; None where it did not
    # Metrics of the whole run: ROLE_FIGURE_start and ROLE_FIGURE_end of the first and last evaluation, iterations,
    # updates by policy, seconds.
    metrics: Mapping[str, Any]
    # Lines of metrics.jsonl, flat: iteration, cycle, scope (a role, eval or preflight), and each metric by its name.
    # Iterations and cycles count from 0; an evaluation has those of the last iteration before it, and -1 before the
    # first. Made for pandas.DataFrame(result.history).
    history: list[dict[str, Any]]
    models: Mapping[str, Path]  # Hugging Face directories of the trained models, by policy

    @property
    def paths(self) -> dict[str, Path]:
        """Returns the run's files by what they are: run, config, metrics, summary, log, and a model for each policy."""
        directory = RunDirectory(self.run)
        places = {"run": self.run, "config": directory.config, "metrics": directory.metrics}
        places |= {"summary": directory.summary, "log": directory.logs / "driver.log"}
        return places | {f"model/{name}": path for name, path in self.models.items()}

    def column(self, metric: str, scope: str | None = None) -> list[float]:
        """Returns a metric, such as `reward/trained`, of every line of a scope (None: of any) that has it, in order."""
        return [row[metric] for row in self.history if metric in row and scope in (None, row["scope"])]


def read_result(run: Path) -> TrainResult:
    """Reads the files in a run's directory, as far as there are any."""
    directory = RunDirectory(run)
    summary = directory.read_summary()
    history = [
        {"iteration": row.place[0], "cycle": row.place[1], "scope": row.scope, **row.metrics}
        for row in read_metrics(directory.path)
    ]
    found = sorted((directory.path / MODELS).glob("*/config.json"))
    return TrainResult(
        run=directory.path, finished=bool(summary.get("finished")), failed=summary.get(FAILED), metrics=summary,
        history=history, models={file.parent.name: file.parent for file in found},
    )  # fmt: skip
