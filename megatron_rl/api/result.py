"""The result of a training run as a Python object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.run.metrics import read_metrics
from megatron_rl.run.run_directory import FAILED, RunDirectory

MODELS = "models"  # subdirectory of the run with one Hugging Face directory for each trained policy


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The files and metrics of a run, which may have finished, been stopped or failed."""

    run: Path  # the run's directory
    finished: bool  # whether all iterations are done; if not, `train()` continues the run
    failed: str | None  # reason why the last start of the run failed, in one line; None if it did not fail
    # Summary of the run: number of iterations, number of updates of each policy, wall-clock seconds, and evaluations.
    # ROLE_METRIC_start is a metric of the first evaluation, ROLE_METRIC_end of the last evaluation.
    metrics: Mapping[str, Any]
    # Lines of metrics.jsonl as flat dicts for pandas.DataFrame(result.history).
    # A line has iteration, cycle, scope (a role, eval or preflight), and the metrics. The indices start at 0.
    # A line of an evaluation has the indices of the last iteration and cycle before it, which are -1 at the start.
    history: list[dict[str, Any]]
    models: Mapping[str, Path]  # {policy: Hugging Face directory of the trained model}

    @property
    def paths(self) -> dict[str, Path]:
        """Returns {name: path} of the run's files: run, config, metrics, summary, log, and model/POLICY for each
        policy."""
        directory = RunDirectory(self.run)
        places = {"run": self.run, "config": directory.config, "metrics": directory.metrics}
        places |= {"summary": directory.summary, "log": directory.logs / "driver.log"}
        return places | {f"model/{name}": path for name, path in self.models.items()}

    def column(self, metric: str, scope: str | None = None) -> list[float]:
        """Returns the values of a metric, such as `reward/trained`, in order. `scope`: only lines of this scope; None:
        lines of all scopes. `column("generator/reward/trained")` is the same as `column("reward/trained",
        "generator")`. Lines without the metric are skipped."""
        rows = [row for row in self.history if scope in (None, row["scope"])]
        return [row[name] for row in rows if (name := metric.removeprefix(f"{row['scope']}/")) in row]


def read_result(run: Path) -> TrainResult:
    """Returns the result of a run from the files in its directory. Missing files are treated as empty."""
    directory = RunDirectory(run)
    summary = directory.read_summary()
    history = [
        {"iteration": row.place[0], "cycle": row.place[1], "scope": row.scope, **row.metrics}
        for row in read_metrics(directory.path)
    ]
    config_files = sorted((directory.path / MODELS).glob("*/config.json"))
    return TrainResult(
        run=directory.path, finished=bool(summary.get("finished")), failed=summary.get(FAILED), metrics=summary,
        history=history, models={file.parent.name: file.parent for file in config_files},
    )  # fmt: skip
