"""Compares several checkpoints on the same problems: differences with paired intervals and tests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.evaluation.console_table import console_table
from megatron_rl.evaluation.judge import JUDGE
from megatron_rl.evaluation.samples import Sample, read_samples
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.evaluation.statistics import Paired, paired
from megatron_rl.report.html_page import show, write_page
from megatron_rl.run.atomic_files import write_text

COLUMNS = ("set", "first", "second", "scores", "difference", "better / worse", "p (signs)", "p (McNemar)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The comparison of the evaluations `first` and `second` by one measure (such as solve) on one problem set.

    The set named "all" contains the problems of all sets.
    """

    first: str
    second: str
    name: str
    measure: str
    scores: tuple[float, float]  # mean scores of `first` and `second` over the problems that both evaluations contain
    test: Paired


def compare(files: Sequence[Path]) -> list[Compared]:
    """Compares each finished evaluation with the first one. `files`: the file NAME.json of each evaluation, with
    NAME.jsonl in the same directory.

    Raises ConfigError if a file is not a finished evaluation, or if an evaluation has no problem in common with the
    first evaluation.
    """
    if len(files) < 2:
        raise ConfigError("--compare: give two results or more, NAME.json files of `megatron-rl eval`")
    names, comparisons = names_of(files), list[Compared]()
    first, *others = (_scores(path) for path in files)
    for second, scores in zip(names[1:], others, strict=True):
        count = len(comparisons)
        for measure, sets in first.items():
            sets_b = scores.get(measure, {})
            pairs = [(name, a, sets_b[name]) for name, a in sets.items() if a.keys() & sets_b.get(name, {}).keys()]
            if len(pairs) > 1:
                first_all = {f"{name}/{p}": v for name, a, _ in pairs for p, v in a.items()}
                second_all = {f"{name}/{p}": v for name, _, b in pairs for p, v in b.items()}
                pairs.append(("all", first_all, second_all))
            comparisons += [_compared(names[0], second, name, measure, a, b) for name, a, b in pairs]
        if len(comparisons) == count:
            raise ConfigError(
                f"{second} and {names[0]} have no problem in common: compare evaluations of the same sets"
            )
    return comparisons


def console(rows: Sequence[Compared]) -> Table:
    """Returns the comparisons as a `rich` table for the terminal."""
    title = "paired differences [95 % bootstrap interval over problems]"
    return console_table(title, COLUMNS, [_cells(row) for row in rows], left_columns=3)


def write(rows: Sequence[Compared], directory: Path) -> None:
    """Writes comparison.json and comparison.html into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "comparison.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    shown = {"title": "Comparison", "subtitle": f"{len(rows)} comparisons", "heads": COLUMNS}
    write_page(
        directory / "comparison.html", "evaluation_comparison.html", {**shown, "rows": [_cells(row) for row in rows]}
    )


def names_of(files: Sequence[Path]) -> list[str]:
    """Returns a short name for each file: its stem, or, if several stems are equal, its path without the suffix."""
    stems = [path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path.with_suffix("")) for path in files]


def read_answers(path: Path) -> dict[tuple[str, str], dict[str, list[Sample]]]:
    """Returns the scored samples of a finished evaluation, as {(measure, set): {problem: samples}}.

    A problem is identified by its row and its question. Raises ConfigError if the file is not NAME.json of a finished
    evaluation.
    """
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(f"{path} is no result: give the NAME.json of a finished `megatron-rl eval`")
    with refusing(lambda error: f"{path}: {error}", FileNotFoundError, ValueError):
        rows = read_samples(path.with_suffix(".jsonl"))
    answers: dict[tuple[str, str], dict[str, list[Sample]]] = defaultdict(dict)
    for row in rows:
        if score_of(row) is not None:
            problem = f"{row.get('row', row['id'])} {row.get('question', '')}"
            answers[row["measure"], row["set"]].setdefault(problem, []).append(row)
    return answers


def score_of(row: Sample) -> float | None:
    """Returns a sample's score. If the sample is a judgement, returns 1.0 if the judgement is correct and 0.0 if not.
    Returns None if the sample has neither a score nor a judgement."""
    if isinstance(score := row.get("score"), int | float):
        return float(score)
    return float(row["predicted"] == row["label"]) if {"predicted", "label"} <= row.keys() else None


def _scores(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {measure: {set: {problem: mean score}}} of a finished evaluation."""
    scores: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (measure, name), problems in read_answers(path).items():
        scores[measure][name] = {
            problem: fmean(score_of(row) or 0.0 for row in samples) for problem, samples in problems.items()
        }
    return scores


def _compared(
    first: str, second: str, name: str, measure: str, a: Mapping[str, float], b: Mapping[str, float]
) -> Compared:
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
