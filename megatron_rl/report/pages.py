"""Writes one self-contained HTML page about a run, a sweep, or any runs and evaluations beside each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from megatron_rl.report import flips
from megatron_rl.report import run_sections as tables
from megatron_rl.report.curves import QUESTIONS, TIME, VERIFY, Sorted, plain_charts, sort_curves, thin_clock
from megatron_rl.report.html_page import Block, as_json, page_parts, write_parts
from megatron_rl.report.reading import RunFigures, is_run, read_run
from megatron_rl.report.run_comparison import (
    Arm,
    arm_places,
    arms,
    differences_table,
    means_table,
    read_runs,
    runs_table,
)
from megatron_rl.report.shown_rollouts import MAX_ROLLOUTS, Picked, pick
from megatron_rl.run.directory import SWEEP

STYLES = ("page.css", "report.css", "uPlot.min.css")
SCRIPTS = ("uPlot.iife.min.js", "base.js", "charts.js", "distributions.js", "rollouts.js", "flips.js")
NO_SCRIPT = "<noscript><p>The curves and the rollouts of this page need JavaScript.</p></noscript>"
Sections = list[tuple[str, str]]
_log = logging.getLogger(__name__)


def write_report(run_dir: Path, target: Path | None = None, *, rollouts: int = MAX_ROLLOUTS) -> Path:
    """Writes a page about a run or a sweep from what its directory holds so far and returns its path, which is
    `target` or DIRECTORY/report.html. Uses no network. `rollouts`: most rollouts that the page holds.

    Any part that was not logged (rollouts, a verifier, evaluations) is left out, and so is what is damaged, which the
    page and a warning then say. Raises FileNotFoundError for a directory without a run, and ConfigError for a damaged
    sweep.json.
    """
    target = target or run_dir / "report.html"
    if (run_dir / SWEEP).exists():
        return write_comparison([run_dir], target, rollouts=rollouts)
    if not is_run(run_dir):
        raise FileNotFoundError(f"{run_dir} is not a run directory: it has neither metrics.jsonl nor config.yaml")
    run = read_run(run_dir)
    found, picked = sort_curves([run]), pick([run.record], rollouts)
    changed = flips.of_rollouts(picked, [run.name])
    sections = [
        ("Damage", tables.damage(run.record.damage)),
        ("In short", tables.headline(run)),
        *_questions(found, lambda question: _beside(run, question)),
        ("Problems that flipped", '<div id="flips"></div>' if changed else ""),
        ("Rollouts", _rollouts(picked)),
        ("Summary and config", tables.summary_table(run.summary) + tables.config(run.config_text)),
    ]
    data = _data([run], [Arm("all", [0])], found, changed, picked)
    parts = page_parts(
        run.name, tables.subtitle(run), sections, head=tables.facts(run) + NO_SCRIPT, styles=STYLES, scripts=SCRIPTS,
        data=data,
    )  # fmt: skip
    write_parts(target, parts)
    _warn(run.record.damage, target)
    return target


def write_comparison(paths: Sequence[Path], target: Path, *, rollouts: int = MAX_ROLLOUTS) -> Path:
    """Writes a page about several runs to `target` and returns it. `paths`: run directories, sweeps, and NAME.json of
    finished evaluations, of which each is compared with the one before it.

    Raises ConfigError for a path that is none of these.
    """
    evaluations = flips.of_evaluations([path for path in paths if not path.is_dir()])
    runs = read_runs([path for path in paths if path.is_dir()])
    names, found_arms = [run.name for run in runs], arms(runs)
    found, picked = sort_curves(runs), pick([run.record for run in runs], rollouts)
    changed = [*evaluations, *flips.of_rollouts(picked, names)]
    left_out = [line for run in runs for line in run.record.damage]
    sections = [
        ("Damage", tables.damage(left_out)),
        ("Runs", runs_table(runs, found_arms) if runs else ""),
        ("Means over seeds", means_table(runs, found_arms)),
        ("Settings that differ", differences_table(runs)),
        *_questions(found, lambda _: ""),
        ("Problems that flipped", '<div id="flips"></div>' if changed else ""),
        ("Rollouts", _rollouts(picked)),
    ]
    done = sum(run.finished for run in runs)
    told = [f"{done} of {len(runs)} runs are finished"] if runs else []
    told += [f"{len(evaluations) + 1} evaluations"] if evaluations else []
    title = paths[0].resolve().name if len(paths) == 1 else "Comparison"
    parts = page_parts(
        title, escape(" · ".join(told)), sections, head=NO_SCRIPT, styles=STYLES, scripts=SCRIPTS,
        data=_data(runs, found_arms, found, changed, picked),
    )  # fmt: skip
    write_parts(target, parts)
    _warn(left_out, target)
    return target


def _warn(sentences: Sequence[str], file: Path) -> None:
    """Says in a warning what a page is not made from, for those who do not open it."""
    told = list(dict.fromkeys(sentences))
    if told:
        rest = f"; and {len(told) - 1} more: see the page" if len(told) > 1 else ""
        _log.warning("%s leaves out what is damaged: %s%s", file, told[0], rest)


def _questions(found: Sorted, beside: Callable[[str], str]) -> Sections:
    """Returns a section for each question: a place for its charts, what else answers it, and what never changes."""
    out = []
    asked = {chart.question for chart in found.charts}
    for question, heading in QUESTIONS.items():
        charts = f'<div class="charts" data-question="{question}"></div>' if question in asked else ""
        out.append((heading, charts + beside(question) + tables.constants(found.constants.get(question, []))))
    return out


def _beside(run: RunFigures, question: str) -> str:
    """Returns what answers a question beside the charts."""
    if question == VERIFY:
        return tables.confusions(run)
    return tables.times(run) + tables.refits(run) if question == TIME else ""


def _rollouts(picked: Picked) -> str:
    return '<div id="rollout-list"></div>' if len(picked.index) else ""


def _data(
    runs: Sequence[RunFigures], found_arms: Sequence[Arm], found: Sorted, changed: Sequence[flips.Flips], picked: Picked
) -> Iterator[Block]:
    """Yields what the page's scripts read."""
    places = arm_places(found_arms, len(runs))
    yield Block(
        "report-data",
        as_json(
            {
                "runs": [{"name": run.name, "arm": places[i]} for i, run in enumerate(runs)],
                "arms": [arm.label for arm in found_arms],
                "charts": plain_charts(found),
                "clocks": [thin_clock(run.clock) for run in runs],
                "flips": [one.plain() for one in changed],
            }
        ),
    )
    yield from picked.blocks([run.name for run in runs])
