"""`megatron-rl report`: writes the HTML report of a run, of a sweep, or of several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.base import refuse
from megatron_rl.run.run_directory import SWEEP

DEFAULT_OUT = Path("comparison.html")


def run(args: argparse.Namespace) -> int:
    """Writes the report and prints its path. Returns 0. Raises ConfigError if a path is not a run or a sweep."""
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
    """Raises ConfigError if a path is not the directory of a run or a sweep."""
    from megatron_rl.report.reading import is_run

    wrong = [f"no run directory {path}" for path in paths if not path.exists()]
    wrong += [
        f"{path} is no run directory: it has no metrics.jsonl, config.yaml or {SWEEP}"
        for path in paths
        if path.is_dir() and not is_run(path) and not (path / SWEEP).exists()
    ]
    wrong += [
        f"{path} is a file: give the directory of a run or a sweep (`megatron-rl eval --compare` compares evaluations)"
        for path in paths
        if path.is_file()
    ]
    refuse(*wrong)
