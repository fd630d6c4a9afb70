"""Reports an evaluation: tables in the terminal, NAME.json with the metrics, and NAME.html."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_rl.evaluation.console_table import console_table
from megatron_rl.evaluation.handoff import HANDOFF
from megatron_rl.evaluation.judge import JUDGE
from megatron_rl.evaluation.samples import Sample, Samples
from megatron_rl.evaluation.set_metrics import MACRO, SetMetrics
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.evaluation.statistics import Interval
from megatron_rl.lib.leaf_modules import leaf
from megatron_rl.run.atomic_files import write_text

SHOWN = 3  # maximum number of correct samples, and of wrong samples, that the page shows for each problem set
BAR_HEIGHT = 24  # height of a problem set's bar in the bar chart of all problem sets
# Pattern of the names of metrics that are fractions between 0 and 1.
SHARES = re.compile(r"accuracy|pass@|maj@|best_of_|vote_of_|f1|finished|aligned|located|first_share")
FORMAT = 1  # version of NAME.json


def write_metrics(
    path: Path, sets: Sequence[SetMetrics], means: Mapping[str, Mapping[str, Interval]], about: Mapping[str, Any]
) -> None:
    """Writes NAME.json atomically: `metrics` and `intervals` over all problem sets, and `sets` with the metrics of each
    problem set. The existence of the file means that the evaluation is finished.

    The name of a metric has the name of its measure as a prefix, except for the measures solve and judge. `means`:
    {measure: {metric: mean over the sets}}. `about`: further keys and values of the file.
    """
    flat = {
        name if measure in (SOLVE, JUDGE) else f"{measure}/{name}": interval
        for measure, metrics in means.items()
        for name, interval in metrics.items()
    }
    set_values: dict[str, Any] = {}
    for s in sets:
        set_values.setdefault(s.name, {"title": s.title})[s.measure] = {
            "problems": s.problems,
            "samples": s.samples,
            "metrics": _values(s.metrics),
            "intervals": _intervals(s.metrics),
            "counts": dict(s.counts),
            "calibration": None if s.calibration is None else asdict(s.calibration),
        }
    values = {"format": FORMAT, **about, "metrics": _values(flat), "intervals": _intervals(flat), "sets": set_values}
    write_text(path, json.dumps(values, indent=1) + "\n")


def console_tables(sets: Sequence[SetMetrics], means: Mapping[str, Mapping[str, Interval]]) -> list[Table]:
    """Returns one table for each measure (such as solve), with a row for each metric and a column for each problem
    set."""
    tables = []
    for measure, names, rows in _rows(sets, means):
        cells = [[name, *(_cell(metrics.get(name), name) for *_, metrics in rows)] for name in names]
        cells.append(["problems", *(str(problems) for _, problems, _ in rows)])
        title = f"{measure}: mean over problems [95 % bootstrap interval]"
        tables.append(console_table(title, ["metric", *(set_title for set_title, *_ in rows)], cells))
    return tables


def write_evaluation_page(
    path: Path, sets: Sequence[SetMetrics], means: Mapping[str, Mapping[str, Interval]], samples: Samples, config: str
) -> None:
    """Writes NAME.html, a self-contained page. All texts of models are escaped."""
    samples_shown: list[tuple[str, Sample, bool]] = []  # per set: up to SHOWN correct samples, then wrong samples
    for set_metrics in sets:
        if set_metrics.measure in (SOLVE, HANDOFF, JUDGE):
            rows = [row for group in samples.rows(set_metrics.name, set_metrics.measure) for row in group]
            graded = [(set_metrics.title, r, r["predicted"] == r["label"] if "predicted" in r else bool(r["correct"]))
                    for r in rows]  # fmt: skip
            samples_shown += [*[t for t in graded if t[2]][:SHOWN], *[t for t in graded if not t[2]][:SHOWN]]
    count = {"sets": len({s.name for s in sets}), "problems": sum(s.problems for s in sets)}
    leaf("report.html_page", "the page of an evaluation").write_page(path, "evaluation.html", {
        "title": f"Evaluation {path.stem}",
        "subtitle": f"{count['sets']} sets · {count['problems']} problems · {sum(s.samples for s in sets)} samples · "
        "95 % bootstrap intervals",
        "tables": _rows(sets, means),
        "bars": [(f"{s.title} {'' if s.measure == SOLVE else s.measure}".strip(), interval) for s in sets
                 if (interval := s.metrics.get("processbench_f1" if s.measure == JUDGE else "accuracy"))],
        "bar_height": BAR_HEIGHT,
        "sets": sets,
        "samples": samples_shown,
        "config": config,
    })  # fmt: skip


def _rows(
    sets: Sequence[SetMetrics], means: Mapping[str, Mapping[str, Interval]]
) -> list[tuple[str, list[str], list[tuple[str, int, Mapping[str, Interval]]]]]:
    """Returns [(measure, names of its metrics, [(title of the set, number of problems, metrics)])].

    If a measure has several problem sets, the last entry of its list is the mean over the problem sets.
    """
    tables = []
    for measure, mean in means.items():
        measured = [s for s in sets if s.measure == measure]
        rows = [(s.title, s.problems, s.metrics) for s in measured]
        if len(measured) > 1:
            rows.append((MACRO, sum(s.problems for s in measured), mean))
        tables.append((measure, list(dict.fromkeys(name for s in measured for name in s.metrics)), rows))
    return tables


def _cell(interval: Interval | None, name: str) -> str:
    if interval is None:
        return "-"
    digits = ".4f" if SHARES.search(name) or abs(interval.value) < 10 else ".1f"
    return f"{interval.value:{digits}} [{interval.low:{digits}}, {interval.high:{digits}}]"


def _values(metrics: Mapping[str, Interval]) -> dict[str, float]:
    return {name: interval.value for name, interval in metrics.items()}


def _intervals(metrics: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {name: [interval.low, interval.high] for name, interval in metrics.items()}
