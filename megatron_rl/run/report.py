"""Writes one self-contained HTML page about a run: its gains, its curves, its times, and what the models wrote."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from megatron_rl.run import report_figures as figures
from megatron_rl.run.metrics import MetricsRow
from megatron_rl.run.record import RunRecord
from megatron_rl.run.report_samples import RolloutEnds, num_answers, samples

# Settings that the head of the page shows, as patterns of their names.
FACTS = (
    r"recipe\.target",
    r"(roles\.\w+\.)?model\.(path|init)",
    r"(roles\.\w+\.)?layout\.(tp|pp)",
    r"(roles\.\w+\.)?optimizer\.lr",
    r"roles\.\w+\.sampling\.(temperature|max_tokens)",
    r"data\.(path|train)",
    r"run\.(seed|steps|prompts_per_step)",
    r"(samples_per_step|epochs)",
    r"launch\.nproc",
    r"recipe\.args\.\w+",
)
WINDOW = 0.2  # the first turns are this share of all, and so are the last turns
MAX_FILES = 5  # most rollout files read for each role and end of the run
LARGEST = 1e300  # whole numbers beyond it are no floats, and differences of floats beyond it are not finite
_log = logging.getLogger(__name__)


def write_report(run_dir: Path) -> Path:
    """Writes RUN/report.html from what the run directory holds so far and returns its path. Uses no network.

    Any part that was not logged (rollouts, a verifier, evaluations) is left out, and so is what is damaged, which the
    page and a warning then say. Raises FileNotFoundError for a
    directory with neither metrics nor a config.
    """
    record = _record(run_dir)
    directory, rows, summary, rollouts = record.directory, record.metrics(), record.summary(), _read_ends(record)
    refits, facts, config_text = record.refits(), _facts(record.config()), record.config_text()
    title = directory.path.resolve().name
    sections = [
        ("Damage", damage(record.damage)),
        ("Before and after", _gains(summary, rows)),
        ("Held-out evaluation", grid(figures.line_svg(chart) for chart in figures.evaluation_charts(rows))),
        ("Training curves", grid(figures.line_svg(chart) for chart in figures.charts(rows))),
        ("Verdicts against the truth", _confusions(rows)),
        ("Where the time went", _time(rows)),
        ("Refits", _refits(refits)),
        ("First turns and last turns", grid(_histograms(rollouts))),
        ("Sample rollouts", samples(rollouts)),
        ("Summary", _key_values(_flatten(summary))),
        ("Config", _config(config_text)),
    ]
    path = directory.path / "report.html"
    path.write_text(page(title, _subtitle(rows), sections, head=facts), encoding="utf-8")
    warn(record.damage, path)
    return path


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str]], *, head: str = "") -> str:
    """Returns an HTML page of (heading, HTML) sections, which loads nothing else. Empty sections are left out."""
    shown = [(heading, body) for heading, body in sections if body]
    links = "".join(f'<a href="#{_anchor(heading)}">{escape(heading)}</a>' for heading, _ in shown)
    body = "\n".join(
        f'<section id="{_anchor(heading)}"><h2>{escape(heading)}</h2>\n{text}\n</section>' for heading, text in shown
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n"
        f"</head>\n<body>\n<header><h1>{escape(title)}</h1>\n<p>{subtitle}</p>\n{head}\n<nav>{links}</nav>\n</header>\n"
        f"<main>\n{body or '<p>Nothing has been logged yet.</p>'}\n</main>\n</body>\n</html>\n"
    )


def write_figure(run_dir: Path, png_path: Path) -> Path:
    """Draws the main curves of a run as one PNG and returns its path.

    Raises FileNotFoundError as `write_report` does.
    """
    record = _record(run_dir)
    figures.draw_overview(record.metrics(), Path(run_dir).resolve().name, Path(png_path))
    warn(record.damage, Path(png_path))
    return Path(png_path)


def pairs(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns {NAME: (start, end)} for every figure that a summary gives as NAME_start and NAME_end."""
    flat = _flatten(summary)
    names = [
        key.removesuffix("_start")
        for key in flat
        if key.endswith("_start") and f"{key.removesuffix('_start')}_end" in flat
    ]
    both = {name: (flat[f"{name}_start"], flat[f"{name}_end"]) for name in names}
    return {
        name: values
        for name, values in both.items()
        if "_num_" not in name and all(_is_number(value) for value in values)
    }


def confusion(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Returns the sums of tp, fp, tn, fn over metrics lines; empty when none has them."""
    cells = ("tp", "fp", "tn", "fn")
    having = [
        row.metrics for row in rows if all(math.isfinite(row.metrics.get(f"confusion/{c}", math.nan)) for c in cells)
    ]
    return {cell: sum(metrics[f"confusion/{cell}"] for metrics in having) for cell in cells} if having else {}


def damage(sentences: Sequence[str]) -> str:
    """Returns an HTML list of what could not be read."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in dict.fromkeys(sentences))
    return f"<p>Some of what this page is made from could not be read:</p><ul>{items}</ul>" if items else ""


def warn(sentences: Sequence[str], file: Path) -> None:
    """Says in a warning what a page or figure is not made from, for those who do not open it."""
    told = list(dict.fromkeys(sentences))
    if told:
        rest = f"; and {len(told) - 1} more: see the page" if len(told) > 1 else ""
        _log.warning("%s leaves out what is damaged: %s%s", file, told[0], rest)


def _record(run_dir: Path) -> RunRecord:
    record = RunRecord(run_dir)
    if not record.directory.metrics.exists() and not record.directory.config.exists():
        raise FileNotFoundError(f"{run_dir} is not a run directory: it has neither metrics.jsonl nor config.yaml")
    return record


def _read_ends(record: RunRecord) -> dict[str, RolloutEnds]:
    """Returns the rollouts of a run's first and last turns, by role."""
    ends = {}
    for role, paths in sorted(record.rollout_files().items()):
        count = min(MAX_FILES, max(1, int(WINDOW * len(paths))))
        late = paths[-count:] if len(paths) > 1 else []
        ends[role] = RolloutEnds(
            early=[row for path in paths[:count] for row in record.rollouts(path, role)],
            late=[row for path in reversed(late) for row in record.rollouts(path, role)],
        )
    return ends


def _subtitle(rows: Sequence[MetricsRow]) -> str:
    updates: dict[str, int] = {}
    for row in rows:
        if row.scope not in ("eval", "gate"):
            updates[row.scope] = updates.get(row.scope, 0) + 1
    seconds = sum(value for row in rows for value in row.time.values() if math.isfinite(value))
    parts = [f"{count} {escape(scope)} updates" for scope, count in updates.items()]
    return " · ".join([*parts, f"{_duration(seconds)} measured"])


def _facts(settings: Mapping[str, Any]) -> str:
    flat = _flatten(settings)
    chosen = [(key, flat[key]) for pattern in FACTS for key in flat if re.fullmatch(pattern, key)]
    items = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(show(value))}</dd></div>" for key, value in chosen if value is not None
    )
    return f'<dl class="facts">{items}</dl>' if items else ""


def _gains(summary: Mapping[str, Any], rows: Sequence[MetricsRow]) -> str:
    gains = pairs(summary)
    if not gains:
        evaluations = [row.metrics for row in rows if row.scope == "eval"]
        if len(evaluations) > 1:
            gains = {
                name: (value, evaluations[-1][name])
                for name, value in evaluations[0].items()
                if name in evaluations[-1]
            }
    if not gains:
        return ""
    lines = []
    for name, (start, end) in gains.items():
        change = "up" if end > start else "down" if end < start else "same"
        lines.append(
            f'<tr><th scope="row">{escape(name.replace("_", " "))}</th><td>{show(start)}</td><td>{show(end)}</td>'
            f'<td class="{change}">{end - start:+.4g}</td></tr>'
        )
    return table(("", "before", "after", "change"), "".join(lines))


def _confusions(rows: Sequence[MetricsRow]) -> str:
    blocks = []
    for scope in sorted({row.scope for row in rows}):
        having = [row for row in rows if row.scope == scope and "confusion/tp" in row.metrics]
        count = max(1, int(WINDOW * len(having)))
        parts = (
            [("first turns", having[:count]), ("last turns", having[-count:])] if len(having) > 1 else [("", having)]
        )
        blocks += [
            _confusion_table(f"{scope} {when}".strip(), cells) for when, part in parts if (cells := confusion(part))
        ]
    return grid(blocks)


def _confusion_table(title: str, cells: Mapping[str, float]) -> str:
    positive, negative = cells["tp"] + cells["fn"], cells["tn"] + cells["fp"]

    def cell(name: str, of: float) -> str:
        share = cells[name] / of if of else 0.0
        color = "var(--good)" if name in ("tp", "tn") else "var(--bad)"
        style = f"background: color-mix(in srgb, {color} {round(10 + 60 * share)}%, transparent)"
        return f'<td style="{style}">{cells[name]:.0f}<small>{share:.0%}</small></td>'

    sensitivity, specificity = (
        (cells["tp"] / positive if positive else 0.0),
        (cells["tn"] / negative if negative else 0.0),
    )
    f1 = 2 * sensitivity * specificity / (sensitivity + specificity) if sensitivity + specificity else 0.0
    body = (
        f'<tr><th scope="row">right</th>{cell("tp", positive)}{cell("fn", positive)}</tr>'
        f'<tr><th scope="row">wrong</th>{cell("fp", negative)}{cell("tn", negative)}</tr>'
    )
    note = f"harmonic mean of the two class accuracies: {f1:.3f}"
    cells_html = table(("truth", "says right", "says wrong"), body)
    return f'<figure class="confusion"><h3>{escape(title)}</h3>{cells_html}<p>{note}</p></figure>'


def _finite(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in values.items() if math.isfinite(value)]


def _time(rows: Sequence[MetricsRow]) -> str:
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        for phase, value in _finite(row.time):
            by_phase = seconds.setdefault(row.scope, {})
            by_phase[phase] = by_phase.get(phase, 0.0) + value
    total = sum(value for by_phase in seconds.values() for value in by_phase.values())
    if not total:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{escape(scope)}</th><th>{escape(phase)}</th>'
        f"<td>{value:,.1f}</td><td>{value / total:.1%}</td></tr>"
        for scope, by_phase in seconds.items()
        for phase, value in sorted(by_phase.items(), key=lambda item: -item[1])
    )
    return grid([*figures.time_svgs(rows, seconds), table(("role", "phase", "seconds", "share"), lines)])


def _refits(refits: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with a row for each role: its number of refits and the medians of their figures."""
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for line in refits:
        by_role.setdefault(line["role"], []).append(line)
    names = (
        "seconds",
        "floor_seconds",
        "ratio_to_floor",
        "gigabytes",
        "local_gigabytes",
        "checked_slices",
        "failed_engines",
    )
    lines = "".join(
        f'<tr><th scope="row">{escape(role)}</th><td>{len(found)}</td>'
        + "".join(f"<td>{_median(found, f'refit/{name}')}</td>" for name in names)
        + "</tr>"
        for role, found in by_role.items()
    )
    return table(("role", "refits", *(name.replace("_", " ") for name in names)), lines) if lines else ""


def _median(found: Sequence[Mapping[str, Any]], name: str) -> str:
    having = [line[name] for line in found if name in line]
    return f"{median(having):,.4g}" if having else ""


def _histograms(rollouts: Mapping[str, RolloutEnds]) -> Iterable[str]:
    for role, ends in rollouts.items():
        names = sorted({name for row in [*ends.early, *ends.late] for name in row["rewards"]})
        columns: dict[str, Callable[[dict[str, Any]], Any]] = {f"reward {name}": _reward(name) for name in names}
        columns |= {
            "length (tokens)": lambda row: row["num_tokens"],
            "steps per solution": lambda row: len(row["steps"] or []) or None,
            "answers in an episode": num_answers,
        }
        for name, value in columns.items():
            early, late = (
                [float(v) for row in rows if _is_number(v := value(row))] for rows in (ends.early, ends.late)
            )
            if early or late:
                yield figures.histogram_svg(f"{role}: {name}", early, late)


def _reward(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda row: row["rewards"].get(name)


def _config(text: str) -> str:
    return f"<details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>" if text else ""


def _key_values(flat: Mapping[str, Any]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(show(value))}</td></tr>' for key, value in flat.items()
    )
    return f"<details><summary>summary.json</summary>{table(('', ''), lines)}</details>" if lines else ""


def table(head: Sequence[str], lines: str) -> str:
    """Returns an HTML table. `head`: names of the columns; `lines`: its rows as HTML."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    row = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{row}<tbody>{lines}</tbody></table></div>'


def grid(blocks: Iterable[str]) -> str:
    """Returns HTML that shows the blocks as cards beside each other."""
    inner = "\n".join(f'<div class="card">{block}</div>' for block in blocks)
    return f'<div class="grid">{inner}</div>' if inner else ""


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value} if prefix else {}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in _flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < LARGEST


def show(value: Any) -> str:
    """Returns a value as text; floats get four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


_CSS = """
:root { color-scheme: light dark; --ink: #1d2329; --paper: #f6f7f8; --card: #ffffff; --line: #d9dde1; --dim: #67707a;
  --good: #2ca25f; --bad: #d64550; --accent: #2f7ed8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde2e7; --paper: #14181c; --card: #1d2329; --line: #343c44; --dim: #98a2ac; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header, main { max-width: 1280px; margin: 0 auto; padding: 1rem 1.25rem; }
h1 { margin: .5rem 0 0; font-size: 1.7rem; } h2 { margin: 2rem 0 .75rem; font-size: 1.2rem; }
h3 { margin: 0 0 .5rem; font-size: .95rem; }
header p, .meta { color: var(--dim); margin: .25rem 0 .75rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin-top: 1rem; padding: .6rem 0;
  border-block: 1px solid var(--line); }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .4rem 1.25rem; margin: 0; }
.facts dt { color: var(--dim); font-size: .78rem; } .facts dd { margin: 0; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.card, .sample, section > .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .75rem; }
.card { min-width: 0; } .card svg { width: 100%; height: auto; display: block; }
figure { margin: 0; } figure p { color: var(--dim); font-size: .85rem; margin: .5rem 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.4rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
tbody th { text-align: left; font-weight: 500; } thead th { color: var(--dim); font-weight: 500; font-size: .85rem; }
thead th:first-child { text-align: left; } td.up { color: var(--good); } td.down { color: var(--bad); }
.confusion td { padding: .6rem .9rem; text-align: center; font-size: 1.1rem; }
.confusion small { display: block; color: var(--dim); }
.confusion thead th { text-align: center; padding-left: .9rem; }
.sample { margin-bottom: .6rem; } summary { cursor: pointer; overflow-wrap: anywhere; }
pre, .text { font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre { max-height: 30rem; overflow: auto; } .text { padding: .75rem; border: 1px solid var(--line); border-radius: 6px; }
.step { border-radius: 4px; padding: 1px 3px; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.step.right { background: color-mix(in srgb, var(--good) 20%, transparent); border-left: 3px solid var(--good); }
.step.wrong { background: color-mix(in srgb, var(--bad) 20%, transparent); border-left: 3px solid var(--bad); }
.step.unread { background: color-mix(in srgb, var(--dim) 15%, transparent); border-left: 3px solid var(--dim); }
.seat { margin-top: .9rem; padding-top: .6rem; border-top: 1px solid var(--line); }
.seat h3 small, .who { color: var(--dim); font-weight: 400; }
.said { margin: .5rem 0; padding: .4rem .75rem; border-radius: 6px; border-left: 3px solid var(--accent);
  background: color-mix(in srgb, var(--accent) 7%, transparent); }
.said.environment { margin-left: 2.5rem; border-left: 0; border-right: 3px solid var(--dim);
  background: color-mix(in srgb, var(--dim) 10%, transparent); }
.who { margin: 0 0 .2rem; font-size: .78rem; } .sample > p { margin: .35rem 0; }
.words, .said summary { font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.about { color: var(--dim); }
.about span.said, .about span { display: inline-block; color: var(--ink);
  margin: .15rem .4rem .15rem 0; padding: 0 .5rem; }
.call { outline: 1px dashed var(--accent); outline-offset: 1px; border-radius: 3px; }
.partner { font-style: italic; color: var(--dim); }
.legend { color: var(--dim); font-size: .78rem; }
.legend span { display: inline-block; padding: 1px .5rem; color: var(--ink); }
.badge { color: var(--dim); font-size: .72rem; margin-left: .6em; white-space: pre; }
.tag { display: inline-block; border-radius: 9px; padding: 0 .55rem; font-size: .78rem; color: #fff;
  background: #67707a; }
.tag.right { background: var(--good); } .tag.wrong { background: var(--bad); }
"""
