"""`megatron-rl eval` without a model: grading of given completions, comparisons of finished evaluations.."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_rl.config.schema import GradingConfig
from megatron_rl.evaluation import completions
from megatron_rl.evaluation.benchmarks import benchmark
from megatron_rl.rewards.pool import GradePool

SAY_S = 10.0  # between two lines on how far it is


def grade_completions(config: GradingConfig, source: Path, directory: Path) -> int:
    """DIR/graded.jsonl and DIR/summary.json. Returns 0, also when rows could not be graded: their outcome says so."""
    reward = config.reward
    if config.benchmark is not None:
        reward = replace(reward, target=benchmark(config.benchmark).grader, args={})
    start = said = time.monotonic()

    def say(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            print(f"{done} rows", file=sys.stderr, flush=True)

    with GradePool(reward) as pool:
        summary = completions.grade_file(source, directory, pool.grade, say=say)
    print(
        f"{'graded by':12} {reward.target}\n{'rows':12} {summary['rows']}\n{'mean score':12} {summary['mean_score']:.4f}"
    )
    for outcome, count in sorted(summary["outcomes"].items()):
        print(f"{outcome:12} {count}")
    print(f"{directory / completions.GRADED} ({time.monotonic() - start:.1f} s)")
    return 0


def compare_results(files: Sequence[Path], directory: Path) -> int:
    """DIR/comparison.json and .html, and the table."""
    from megatron_rl.evaluation import compare  # draws: seconds that grading does without

    rows = compare.compare(files)
    compare.write(rows, directory)
    Console(width=None if sys.stdout.isatty() else 180).print(compare.console(rows))
    print(directory / "comparison.html")
    return 0
