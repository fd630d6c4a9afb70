"""Measures how far the graders can be trusted, on every known answer of the data sets at hand.

    itself       \\boxed{answer} is right
    reformatted  the same answer, written otherwise (decimal, fraction, thousands, units, a sentence), is right
    plain        the same answer without a box (in an answer tag, a sentence, a formula, after ####) is right
    near_miss    another answer that looks alike (one more, ten times, other sign, an element too many) is wrong
    plain_miss   such an answer without a box is wrong

It needs a folder of data sets as `megatron-rl eval` reads them (data_dir). Sets that are not there are left out. Wrong
gradings go to --disagreements, a JSONL file, one row each.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import common

from megatron_rl.config.schema import ConfigError, Reward
from megatron_rl.data.benchmarks import MATH, Benchmark, benchmarks, read_benchmark, source_of
from megatron_rl.rewards.grading_pool import GradePool, Outcome

BARS = {"itself": 0.99, "reformatted": 0.98, "plain": 0.98, "near_miss": 0.99, "plain_miss": 0.99}
WRAPPED = "Half of it is $\\frac{{1}}{{2}}$, and so on.\n<answer>\\boxed{{{}}}</answer>"
PLAIN = (
    *("<answer>{}</answer>", "We get 2 of 3.\n<answer>\n${}$\n</answer>", "So, as 7 > 2, the answer is ${}$."),
    *("2 and 3 give it.\n\n**Answer:** {}", "From 12 it follows that\n\\[{}\\]", "so 9 more\n#### {}"),
)
NUMBER = re.compile(r"-?\d+(\.\d+)?")
LIST = re.compile(r"[^(),\[\]{}=]+(,[^(),\[\]{}=]+)+")  # 1,3,5
Case = tuple[str, str, str, float]  # kind, response, known answer, wanted score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/, amc23/, ...")
    parser.add_argument("--limit", type=int, help="problems of each set, drawn at random (default: all)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=20.0, help="seconds for one grading")
    parser.add_argument("--disagreements", type=Path, metavar="FILE")
    common.add_arguments(parser)
    args = parser.parse_args()
    metrics: dict[str, float] = {}
    rows: list[dict[str, str]] = []
    for benchmark in benchmarks().values():
        if benchmark.grader != MATH or benchmark.judged:
            continue
        try:
            problems = read_benchmark(benchmark, source_of(benchmark, str(args.data)))
        except ConfigError:  # the set is not in the folder
            continue
        answers = [str(problem.values["answer"]) for problem in problems]
        if args.limit and args.limit < len(answers):
            answers = random.Random(0).sample(answers, args.limit)
        agreement, wrong = measure(benchmark, answers, args)
        metrics |= agreement
        rows += wrong
    if not metrics:
        parser.error(f"{args.data} has none of the sets that math-verify grades")
    if args.disagreements:
        args.disagreements.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bars = {name: BARS[name.partition("/")[2]] for name in metrics if name.partition("/")[2] in BARS}
    common.finish(metrics, bars, args)


def measure(
    benchmark: Benchmark, answers: list[str], args: argparse.Namespace
) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Returns the set's metrics, and the cases in which the grader gives another score than wanted."""
    cases = [case for answer in answers for case in cases_of(answer)]
    with GradePool(Reward(target=benchmark.grader, workers=args.workers, timeout_s=args.timeout_s)) as pool:
        pool.grade(["\\boxed{1}"], [{"answer": "1"}])
        start = time.perf_counter()
        graded = pool.grade([case[1] for case in cases], [{"answer": case[2]} for case in cases])
        seconds = time.perf_counter() - start
    counts, hits, rows = Counter(case[0] for case in cases), Counter[str](), []
    for (kind, response, answer, score), result in zip(cases, graded, strict=True):
        agrees = result.outcome is Outcome.SCORE and result.score == score
        hits[kind] += agrees
        if not agrees:
            rows.append(
                {
                    "set": benchmark.name,
                    "kind": kind,
                    "answer": answer,
                    "response": response,
                    "outcome": result.outcome.value,
                }
            )
    metrics = {f"{benchmark.name}/{kind}": hits[kind] / count for kind, count in counts.items()}
    metrics |= {f"{benchmark.name}/answers": float(len(answers)), f"{benchmark.name}/cases": float(len(cases))}
    return metrics | {f"{benchmark.name}/per_minute": 60 * len(cases) / seconds}, rows


def cases_of(answer: str) -> Iterator[Case]:
    """Yields the cases of one known answer."""
    yield "itself", f"\\boxed{{{answer}}}", answer, 1.0
    for text in dict.fromkeys(reformatted(answer)):
        yield "reformatted", text, answer, 1.0
    for form in PLAIN:
        yield "plain", form.format(answer), answer, 1.0
    for number, text in enumerate(dict.fromkeys(near_misses(answer))):
        yield "near_miss", f"\\boxed{{{text}}}", answer, 0.0
        yield "plain_miss", PLAIN[number % len(PLAIN)].format(text), answer, 0.0


def reformatted(answer: str) -> Iterator[str]:
    """Yields responses that give the same answer, written otherwise."""
    yield WRAPPED.format(answer)
    yield f"\\boxed{{ {answer} }}"
    if NUMBER.fullmatch(answer):
        value = Fraction(answer)
        yield f"\\boxed{{{answer}\\text{{ units}}}}"
        yield f"\\boxed{{x = {answer}}}"
        if value.denominator == 1:
            yield f"\\boxed{{{int(value)}.0}}"
            yield f"\\boxed{{{int(value):,}}}".replace(",", "{,}")
        else:
            yield f"\\boxed{{{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}}}"
    if LIST.fullmatch(answer):  # several answers, whose order says nothing
        yield f"\\boxed{{{', '.join(reversed(answer.split(',')))}}}"
    if "\\frac" in answer:
        yield f"\\boxed{{{answer.replace(chr(92) + 'frac', chr(92) + 'dfrac')}}}"
    if "(" in answer and answer.count("(") == answer.count(")"):
        yield (
            "\\boxed{"
            + answer.replace("\\left", "").replace("\\right", "").replace("(", "\\left(").replace(")", "\\right)")
            + "}"
        )


def near_misses(answer: str) -> Iterator[str]:
    """Yields other answers that look like it."""
    if NUMBER.fullmatch(answer):
        value, digits = Fraction(answer), len(answer.partition(".")[2])
        step = Fraction(1, 10**digits)
        for miss in (value + step, value * 10, -value):
            if miss != value:
                yield f"{float(miss):.{digits}f}" if digits else str(int(miss))
        yield f"{answer}, {int(value) + 7}"
        return
    if LIST.fullmatch(answer):
        yield answer.rpartition(",")[0]
    pair = re.fullmatch(r"\(([^(),]+),([^(),]+)\)", answer)
    if pair and pair[1].strip() != pair[2].strip():
        yield f"({pair[2]},{pair[1]})"
    numbers = list(re.finditer(r"(?<![\w.^_{])\d+(?![\w.])", answer))
    if numbers:
        last = numbers[-1]
        yield answer[: last.start()] + str(int(last.group()) + 1) + answer[last.end() :]
    if not re.search(r"[=,;<>]|\\(?:in|cup|infty|text|le|ge)\b|^[(\[]", answer):
        yield f"{answer} + 1"


if __name__ == "__main__":
    main()
