"""Reports an evaluation: tables in the terminal, NAME.json with the figures, and NAME.html."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_rl.evaluation.estimators import Calibration, Interval
from megatron_rl.evaluation.figures import MACRO, RIGHT, SetFigures
from megatron_rl.evaluation.handoff import HANDOFF
from megatron_rl.evaluation.judge import JUDGE
from megatron_rl.evaluation.samples import Sample, Samples
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.report.html_page import grid, page, show, table
from megatron_rl.run.disk import write_text

SHOWN = 3  # right and wrong samples of each set on the page
MAX_CHARACTERS = 6000  # longest text of a sample that is shown whole
# Figures whose names contain one of these are shares, between 0 and 1.
SHARES = (
    "accuracy",
    "pass@",
    "maj@",
    "best_of_",
    "vote_of_",
    "f1",
    "finished",
    "aligned",
    "located",
    "first_share",
)
FORMAT = 1  # version of NAME.json


def figures_json(
    sets: Sequence[SetFigures], means: Mapping[str, Mapping[str, Interval]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of NAME.json: `figures` and `intervals` over all sets, and `sets`, the figures of each.

    Figures of other measures than solve and judge have the measure's name before theirs.
    """
    flat = {
        f"{prefix(measure)}{name}": interval for measure, figures in means.items() for name, interval in figures.items()
    }
    each: dict[str, Any] = {}
    for s in sets:
        each.setdefault(s.name, {"title": s.title})[s.measure] = {
            "problems": s.problems,
            "samples": s.samples,
            "figures": _values(s.figures),
            "intervals": _intervals(s.figures),
            "counts": dict(s.counts),
            "calibration": None if s.calibration is None else asdict(s.calibration),
        }
    return {"format": FORMAT, **about, "figures": _values(flat), "intervals": _intervals(flat), "sets": each}


def prefix(measure: str) -> str:
    """Returns the prefix of a measure's figures in NAME.json: none for solve and judge, else the measure's name."""
    return "" if measure in (SOLVE, JUDGE) else f"{measure}/"


def console_table(sets: Sequence[SetFigures], means: Mapping[str, Mapping[str, Interval]]) -> list[Table]:
    """Returns one table for each measure: a row for each figure, with its interval in a column for each set."""
    out = []
    for measure, names, rows in _rows(sets, means):
        shown = Table(
            box=SIMPLE_HEAD,
            title=f"{measure}: mean over problems [95 % bootstrap interval]",
            title_justify="left",
            show_edge=False,
        )
        shown.add_column("figure")
        for title, *_ in rows:
            shown.add_column(title, justify="right")
        for name in names:
            shown.add_row(name, *(_cell(figures.get(name), name) for *_, figures in rows))
        shown.add_row("problems", *(str(problems) for _, problems, _ in rows))
        out.append(shown)
    return out


def write_page(
    path: Path, sets: Sequence[SetFigures], means: Mapping[str, Mapping[str, Interval]], samples: Samples, config: str
) -> None:
    """Writes NAME.html, which loads nothing else. All texts of models are escaped."""
    sections = [(f"Figures: {measure}", _html_table(names, rows)) for measure, names, rows in _rows(sets, means)]
    sections += [
        ("Accuracy by set", _bars(sets)),
        ("Confidence of votes", grid(_calibrations(sets))),
        ("What went wrong", _counts(sets)),
    ]
    sections += [("Samples", "\n".join(_samples(s, samples) for s in sets if s.measure in (SOLVE, HANDOFF, JUDGE)))]
    sections += [("Config", f"<details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>")]
    problems = sum(s.problems for s in sets)
    num_sets, num_samples = len({s.name for s in sets}), sum(s.samples for s in sets)
    subtitle = f"{num_sets} sets · {problems} problems · {num_samples} samples · 95 % bootstrap intervals"
    text = page(f"Evaluation {path.stem}", subtitle, sections)
    write_text(path, text.encode("utf-8", "replace").decode())


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes NAME.json, whole or not at all: its existence says that the evaluation is done."""
    write_text(path, json.dumps(figures, indent=1) + "\n")


def percent(name: str) -> bool:
    """Returns whether a figure is a share, between 0 and 1."""
    return any(mark in name for mark in SHARES)


def _rows(
    sets: Sequence[SetFigures], means: Mapping[str, Mapping[str, Interval]]
) -> list[tuple[str, list[str], list[tuple[str, int, Mapping[str, Interval]]]]]:
    """Returns (measure, names of its figures, [(title, problems, figures)]) for each measure.

    The mean over sets comes last, where there are several sets.
    """
    out = []
    for measure, mean in means.items():
        own = [s for s in sets if s.measure == measure]
        rows = [(s.title, s.problems, s.figures) for s in own]
        if len(own) > 1:
            rows.append((MACRO, sum(s.problems for s in own), mean))
        out.append((measure, list(dict.fromkeys(name for s in own for name in s.figures)), rows))
    return out


def _cell(found: Interval | None, name: str) -> str:
    if found is None:
        return "-"
    digits = ".4f" if percent(name) or abs(found.value) < 10 else ".1f"
    return f"{found.value:{digits}} [{found.low:{digits}}, {found.high:{digits}}]"


def _values(figures: Mapping[str, Interval]) -> dict[str, float]:
    return {name: interval.value for name, interval in figures.items()}


def _intervals(figures: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {name: [interval.low, interval.high] for name, interval in figures.items()}


def _html_table(names: Sequence[str], rows: Sequence[tuple[str, int, Mapping[str, Interval]]]) -> str:
    lines = []
    for title, problems, figures in rows:
        cells = []
        for name in names:
            found = figures.get(name)
            interval = "" if found is None else f"<br><small>{show(found.low)} – {show(found.high)}</small>"
            cells.append(f"<td>{'-' if found is None else show(found.value)}{interval}</td>")
        lines.append(f'<tr><th scope="row">{escape(title)}</th><td>{problems}</td>{"".join(cells)}</tr>')
    return table(("set", "problems", *names), "".join(lines))


def _bars(sets: Sequence[SetFigures]) -> str:
    """Draws each set's main figure with its interval, on one axis from 0 to 1."""
    shown = [
        (f"{s.title} {'' if s.measure == SOLVE else s.measure}".strip(), f)
        for s in sets
        if (f := _headline(s)) is not None
    ]
    if not shown:
        return ""
    height, left, width = 24 * len(shown) + 30, 190, 430
    parts = [f'<svg viewBox="0 0 {left + width + 60} {height}" role="img" font-size="12" fill="currentColor">']
    for tick in range(0, 11, 2):
        x = left + width * tick / 10
        parts.append(f'<line x1="{x}" x2="{x}" y1="4" y2="{height - 22}" stroke="currentColor" opacity=".15"/>')
        parts.append(f'<text x="{x}" y="{height - 6}" text-anchor="middle">{tick / 10:.1f}</text>')
    for i, (title, found) in enumerate(shown):
        y = 18 + 24 * i
        low, high, middle = (left + width * value for value in (found.low, found.high, found.value))
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(title)}</text>')
        stroke = 'stroke="var(--accent)" stroke-width="3" opacity=".5"'
        parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" {stroke}/>')
        parts.append(f'<circle cx="{middle:.1f}" cy="{y}" r="4.5" fill="var(--accent)"/>')
        parts.append(f'<text x="{left + width + 8}" y="{y + 4}">{found.value:.3f}</text>')
    return grid(["".join([*parts, "</svg>"])])


def _headline(figures: SetFigures) -> Interval | None:
    return figures.figures.get("processbench_f1" if figures.measure == JUDGE else "accuracy")


def _calibrations(sets: Sequence[SetFigures]) -> list[str]:
    return [_calibration(s.title, s.calibration) for s in sets if s.calibration is not None]


def _calibration(title: str, found: Calibration) -> str:
    lines = "".join(
        f"<tr><td>{b.confidence:.2f}</td><td>{b.accuracy:.2f}</td><td>{b.count}</td></tr>" for b in found.bins
    )
    note = f"expected calibration error {found.ece:.3f}, Brier score {found.brier:.3f}"
    body = table(("votes say right", "are right", "solutions"), lines)
    return f"<figure><h3>{escape(title)}</h3>{body}<p>{note}</p></figure>"


def _counts(sets: Sequence[SetFigures]) -> str:
    rows = [(s, name, count) for s in sets for name, count in s.counts.items() if count]
    lines = "".join(
        f'<tr><th scope="row">{escape(s.title)}</th><td>{escape(n)}</td><td>{c} of {s.samples}</td></tr>'
        for s, n, c in rows
    )
    return table(("set", "what", "samples"), lines) if lines else ""


def _samples(figures: SetFigures, samples: Samples) -> str:
    rows = [row for group in samples.rows(figures.name, figures.measure) for row in group]
    right = [row for row in rows if _right(row)]
    wrong = [row for row in rows if not _right(row)]
    blocks = [_sample(figures, row, good) for good, chosen in ((True, right), (False, wrong)) for row in chosen[:SHOWN]]
    return "\n".join(blocks)


def _right(row: Sample) -> bool:
    return row["predicted"] == row["label"] if "predicted" in row else row["score"] > RIGHT


def _sample(figures: SetFigures, row: Sample, right: bool) -> str:
    mark = '<span class="tag right">right</span>' if right else '<span class="tag wrong">wrong</span>'
    facts = [
        f"problem {row['row']}",
        f"sample {row['sample']}",
        f"{row['tokens']} tokens",
        "" if row["finished"] else "cut",
    ]
    facts += [row.get("outcome", "") if row.get("outcome") != "score" else ""]
    facts += (
        [f"first error {row['label']}, found {row['predicted']}"]
        if "predicted" in row
        else [f"read as {row.get('key')}"]
    )
    lines = "".join(
        f"<p><b>{name}</b> {escape(_short(str(row[name.lower()])))}</p>"
        for name in ("Question", "Answer")
        if name.lower() in row
    )
    question = escape(_short(str(row.get("question", "")), 100))
    return (
        f'<details class="sample"><summary>{mark} {escape(figures.title)} · {question}</summary>'
        f'<p class="meta">{escape(" · ".join(fact for fact in facts if fact))}</p>{lines}'
        f'<div class="text">{escape(_short(row["response"]))}</div></details>'
    )


def _short(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"
