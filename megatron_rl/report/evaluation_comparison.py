"""Compares several checkpoints on the same problems: differences with paired intervals and tests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import markup
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_rl.config.schema import ConfigError
from megatron_rl.evaluation.estimators import Paired, paired
from megatron_rl.evaluation.judge import JUDGE
from megatron_rl.evaluation.samples import read_samples
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.report.html_page import page, show, table
from megatron_rl.run.disk import write_text

Scores = dict[tuple[str, str], dict[str, float]]  # (set, measure) -> problem -> mean score


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result `second` against `first`, on one measure of one set.

    The set named "all" holds the problems of all sets.
    """

    first: str
    second: str
    name: str
    measure: str
    scores: tuple[float, float]  # means over the problems that both have
    test: Paired


def compare(files: Sequence[Path]) -> list[Compared]:
    """Compares finished evaluations, each with the first. `files`: their NAME.json, with NAME.jsonl beside it.

    Raises ConfigError for a file that is no finished evaluation, or has no problem in common with the first.
    """
    if len(files) < 2:
        raise ConfigError("--compare: give two results or more, NAME.json files of `megatron-rl eval`")
    names = _names(files)
    read = [_scores(path) for path in files]
    out = []
    for second, scores in zip(names[1:], read[1:], strict=True):
        shared = [key for key in read[0] if key in scores and read[0][key].keys() & scores[key].keys()]
        if not shared:
            raise ConfigError(
                f"{second} and {names[0]} have no problem in common: compare evaluations of the same sets"
            )
        out += [_one(names[0], second, *key, read[0][key], scores[key]) for key in shared]
        for measure in dict.fromkeys(measure for _, measure in shared):
            own = [key for key in shared if key[1] == measure]
            if len(own) > 1:
                both = (
                    {f"{name}/{p}": v for name, m in own for p, v in part[name, m].items()}
                    for part in (read[0], scores)
                )
                out.append(_one(names[0], second, "all", measure, *both))
    return out


def console(rows: Sequence[Compared]) -> Table:
    """Returns the comparisons as a table for the terminal."""
    shown = Table(
        box=SIMPLE_HEAD,
        title="paired differences [95 % bootstrap interval over problems]",
        title_justify="left",
        show_edge=False,
    )
    for column in ("set", "first", "second", "scores", "difference", "better / worse", "p (signs)", "p (McNemar)"):
        shown.add_column(column, justify="left" if column in ("set", "first", "second") else "right")
    for row in rows:
        shown.add_row(*map(markup.escape, _cells(row)))
    return shown


def write(rows: Sequence[Compared], directory: Path) -> None:
    """Writes comparison.json and comparison.html into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "comparison.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in rows)
    body = table(
        ("set", "first", "second", "scores", "difference", "better / worse", "p (signs)", "p (McNemar)"), lines
    )
    note = (
        "<p>Second minus first, on the problems that both have. "
        "The p-values are not corrected for the number of comparisons.</p>"
    )
    write_text(
        directory / "comparison.html",
        page("Comparison", f"{len(rows)} comparisons", [("Paired differences", note + body)]),
    )


def _one(first: str, second: str, name: str, measure: str, a: Mapping[str, float], b: Mapping[str, float]) -> Compared:
    shared = [key for key in a if key in b]
    means = fmean(a[key] for key in shared), fmean(b[key] for key in shared)
    return Compared(first=first, second=second, name=name, measure=measure, scores=means, test=paired(a, b))


def _cells(row: Compared) -> list[str]:
    test, difference = row.test, row.test.difference
    name = row.name if row.measure in (SOLVE, JUDGE) else f"{row.name} ({row.measure})"
    return [
        f"{name} ({test.problems})", row.first, row.second, f"{row.scores[0]:.4f} -> {row.scores[1]:.4f}",
        f"{difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]", f"{test.better} / {test.worse}",
        show(test.p_permutation), "-" if test.p_mcnemar is None else show(test.p_mcnemar),
    ]  # fmt: skip


def _names(files: Sequence[Path]) -> list[str]:
    """Returns a short name for each file: its stem, or its path where stems are equal."""
    stems = [path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path.with_suffix("")) for path in files]


def _scores(path: Path) -> Scores:
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            f"--compare: {path} is no result: give the NAME.json that a finished `megatron-rl eval` has written"
        )
    try:
        rows = read_samples(path.with_suffix(".jsonl"))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"--compare: {path}: {error}") from error
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        score, problem = _score(row), f"{row.get('row')} {row.get('question', '')}"
        if score is not None:
            found[row["set"], row["measure"]][problem].append(score)
    return {key: {problem: fmean(values) for problem, values in problems.items()} for key, problems in found.items()}


def _score(row: Mapping[str, Any]) -> float | None:
    """Returns a row's score; None for a row without one."""
    score = row.get("score")
    if score is not None:
        return float(score) if isinstance(score, int | float) else None
    return float(row["predicted"] == row["label"]) if {"predicted", "label"} <= row.keys() else None
