"""`megatron-rl report`: writes the HTML report of a run, of a sweep, or of several runs and evaluations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.base import refuse
from megatron_rl.run.run_directory import SWEEP

DEFAULT_OUT = Path("comparison.html")


def run(args: argparse.Namespace) -> int:
    """Writes the report and prints the path of each written file. Returns 0. Raises ConfigError if a run or an
    evaluation is missing."""
    from megatron_rl.report.pages import write_comparison, write_report
    from megatron_rl.report.shown_rollouts import MAX_ROLLOUTS

    most = args.rollouts or MAX_ROLLOUTS
    refuse_paths(args.runs)
    if len(args.runs) > 1:
        print(write_comparison(args.runs, args.out or DEFAULT_OUT, rollouts=most))
    else:
        print(write_report(args.runs[0], args.out, rollouts=most))
    return 0


def refuse_paths(paths: Sequence[Path]) -> None:
    """Raises ConfigError if a path is not a run, sweep or evaluation, or if the only path is an evaluation, which can
    only be compared."""
    from megatron_rl.report.reading import is_run

    wrong = [f"no run directory {path}" for path in paths if not path.exists()]
    wrong += [
        f"{path} is no run directory: it has no metrics.jsonl, config.yaml or {SWEEP}"
        for path in paths
        if path.is_dir() and not is_run(path) and not (path / SWEEP).exists()
    ]
    if len(paths) == 1 and paths[0].is_file():
        wrong.append(f"{paths[0]}: give a second evaluation to compare it with, or the directory of a run")
    refuse(*wrong)
