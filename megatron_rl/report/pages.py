"""Writes a self-contained HTML page about a run or a sweep, or a page that compares runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.report import diagnosis, run_sections, timeline
from megatron_rl.report.curves import PALETTE, Sorted, plain_charts, sort_curves, thin_clock
from megatron_rl.report.html_page import as_json, write_page
from megatron_rl.report.reading import METRICS, RunMetrics, is_run, read_run
from megatron_rl.report.run_comparison import Arm, arms, differences_table, means_table, read_runs, runs_table
from megatron_rl.report.shown_rollouts import MAX_ROLLOUTS, Picked, pick
from megatron_rl.run.console import duration
from megatron_rl.run.run_directory import SWEEP, flatten

STYLES = ("page.css", "report.css", "uPlot.min.css")
SCRIPTS = ("uPlot.iife.min.js", "base.js", "charts.js", "rollouts.js")
_log = logging.getLogger(__name__)


def write_report(
    run_dir: Path, target: Path | None = None, *, rollouts: int = MAX_ROLLOUTS, scripts: Sequence[str] = SCRIPTS
) -> Path:  # fmt: skip
    """Writes a page about a run or a sweep from the files that its directory has so far.

    Returns the path of the page: `target`, or DIRECTORY/report.html. Uses no network. `rollouts`: maximum number of
    rollouts on the page. Parts of the page whose data were not logged (rollouts, a verifier, evaluations) are left out.
    Damaged files are also left out, and are named on the page and in a warning. Raises FileNotFoundError if the
    directory has no run, and ConfigError if sweep.json is damaged.
    """
    target = target or run_dir / "report.html"
    if (run_dir / SWEEP).exists():
        return write_comparison([run_dir], target, rollouts=rollouts, scripts=scripts)
    if not is_run(run_dir):
        raise FileNotFoundError(f"{run_dir} is not a run directory: it has neither metrics.jsonl nor config.yaml")
    run = read_run(run_dir)
    picked = pick([run.record], rollouts)
    content = _Content([run], [Arm("all", [0])], picked)
    _write(target, "run.html", content, {
        "title": run.name,
        "subtitle": run_sections.subtitle(run),
        "run": run,
        "facts": run_sections.facts(run),
        "headline": run_sections.headline(run),
        "signs": diagnosis.signs(run, picked),
        "confusions": run_sections.confusions(run),
        "seconds": run_sections.seconds(run),
        "schedules": run_sections.schedules(run),
        "schedule_names": run_sections.SCHEDULE_FIGURES,
        "timeline": timeline.timeline(run),
        "phases": timeline.PHASES,
        "refits": run_sections.refits(run),
        "evaluations": run_sections.evaluations(run),
        "refit_names": [name.replace("_", " ") for name in run_sections.REFIT_FIGURES],
        "summary": flatten({name: value for name, value in run.summary.items() if name != "schedule"}),
        "duration": duration,
    }, scripts)  # fmt: skip
    return target


def write_comparison(
    paths: Sequence[Path], target: Path, *, rollouts: int = MAX_ROLLOUTS, scripts: Sequence[str] = SCRIPTS
) -> Path:  # fmt: skip
    """Writes a page that compares runs to `target`, and returns `target`.

    `paths`: run directories and directories of sweeps.
    """
    runs = read_runs(paths)
    found_arms, picked = arms(runs), pick([run.record for run in runs], rollouts)
    _write(target, "comparison.html", _Content(runs, found_arms, picked), {
        "title": paths[0].resolve().name if len(paths) == 1 else "Comparison",
        "subtitle": f"{sum(run.finished for run in runs)} of {len(runs)} runs are finished",
        "runs": runs_table(runs, found_arms),
        "means": means_table(runs, found_arms),
        "differences": differences_table(runs),
    }, scripts)  # fmt: skip
    return target


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of both kinds of pages: runs, arms (groups of runs that differ only in the seed) and rollouts."""

    runs: Sequence[RunMetrics]
    arms: Sequence[Arm]
    picked: Picked

    def runs_and_colours(self) -> list[dict[str, Any]]:
        """Returns the name, arm and colour of each run. If there are several arms, and one of them has several runs,
        all runs of an arm have the same colour."""
        arm_of = {run: number for number, arm in enumerate(self.arms) for run in arm.runs}
        shared = 1 < len(self.arms) < len(self.runs)
        return [
            {"name": run.name, "arm": arm_of[i], "colour": PALETTE[(arm_of[i] if shared else i) % len(PALETTE)]}
            for i, run in enumerate(self.runs)
        ]

    def data(self, sorted_charts: Sorted) -> Iterator[tuple[str, str]]:
        """Yields the blocks of data for the page's scripts, as (id, text). `sorted_charts`: the metrics by chart."""
        report = {
            "runs": self.runs_and_colours(),
            "arms": [arm.label for arm in self.arms],
            "colours": PALETTE,
            "charts": plain_charts(sorted_charts),
            "clocks": [thin_clock(run.clock) for run in self.runs],
        }
        yield "report-data", as_json(report)
        yield from self.picked.blocks([run.name for run in self.runs])


def _write(
    target: Path, template: str, content: _Content, values: Mapping[str, Any], scripts: Sequence[str]
) -> None:  # fmt: skip
    """Writes a page, and logs a warning if files are damaged. `values`: further values for the template."""
    sorted_charts = sort_curves(content.runs)
    damage = list(dict.fromkeys(sentence for run in content.runs for sentence in run.record.damage))
    shown = {"sorted": sorted_charts, "questions": METRICS["questions"], "left_out": damage, "picked": content.picked}
    shown |= {"palette": PALETTE, "drawn": content.runs_and_colours(), "arms": content.arms}
    write_page(target, template, {**values, **shown}, styles=STYLES, scripts=scripts, data=content.data(sorted_charts))
    if damage:
        rest = f"; and {len(damage) - 1} more: see the page" if len(damage) > 1 else ""
        _log.warning("%s leaves out what is damaged: %s%s", target, damage[0], rest)
