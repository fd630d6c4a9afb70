"""`megatron-rl eval` without a model: grades given completions, and compares finished evaluations."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from megatron_rl.commands.settings import split
from megatron_rl.config import files as config_files
from megatron_rl.config.evaluation import NO_SCALE
from megatron_rl.config.schema import ConfigError, GradingConfig
from megatron_rl.lib.leaf_modules import leaf

SAY_S = 10.0  # interval in seconds between progress lines


def run(args: argparse.Namespace) -> int:
    """Grades completions, or compares evaluations and writes comparison.json and comparison.html. Returns 0, or 1 if
    grading as a whole fails. Raises ConfigError for arguments or files that cannot be used."""
    from megatron_rl.rewards.grading_pool import RewardFailure

    if args.out is None or (args.completions and args.compare):
        raise ConfigError("give --out DIR, and one of --completions FILE and --compare A.json B.json ...")
    if args.compare:
        from rich.console import Console

        compare = leaf("report.evaluation_comparison", "eval --compare")
        rows = compare.compare(args.compare)
        compare.write(rows, args.out)
        Console(width=None if sys.stdout.isatty() else 180).print(compare.console(rows))
        print(args.out / "comparison.html")
        return 0
    grading = config_files.load(GradingConfig, *split(args.settings))
    try:
        return grade_completions(grading, args.completions, args.out)
    except RewardFailure as error:
        print(f"megatron-rl eval: {error}", file=sys.stderr)
        return 1


def grade_completions(config: GradingConfig, source: Path, directory: Path) -> int:
    """Grades the completions in the file `source`. Writes graded.jsonl and summary.json to `directory`.

    Returns 0, even if some rows could not be graded; the outcome field of such a row states the reason. Raises
    RewardFailure, after everything is written, if the share of these rows is above reward.max_failure_share.
    """
    from megatron_rl.data.benchmarks import benchmark
    from megatron_rl.evaluation import completions
    from megatron_rl.rewards.grading_pool import GradePool, check_failures

    reward = config.reward
    if config.benchmark is not None:
        reward = replace(reward, target=benchmark(config.benchmark).grader or reward.target, args={})
    start = said_at = time.monotonic()

    def say(done: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > SAY_S:
            said_at = time.monotonic()
            print(f"{done} rows", file=sys.stderr, flush=True)

    with GradePool(reward) as pool:
        summary = completions.grade_file(source, directory, pool.grade, say=say)
    print(f"{'graded by':12} {reward.target}")
    print(f"{'rows':12} {summary['rows']}")
    for metric in ("accuracy", "reward"):
        print(f"{metric:12} {summary[metric]:.4f}" if metric in summary else f"note: no accuracy: {NO_SCALE}")
    for outcome, count in sorted(summary["outcomes"].items()):
        print(f"{outcome:12} {count}")
    print(f"{directory / completions.GRADED} ({time.monotonic() - start:.1f} s)")
    check_failures(completions.gradings(directory), reward.max_failure_share)
    return 0
