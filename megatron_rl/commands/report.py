"""`megatron-rl report`: writes the HTML report of a run, of a sweep, or of several runs and evaluations."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from megatron_rl.config.schema import ConfigError

DEFAULT_OUT = Path("comparison.html")


def run(args: argparse.Namespace) -> int:
    """Writes the report and prints the path of each written file. Returns 0. Raises ConfigError if a run or an
    evaluation is missing."""
    from megatron_rl.report.pages import write_comparison, write_report
    from megatron_rl.report.reading import is_run, read_run
    from megatron_rl.report.shown_rollouts import MAX_ROLLOUTS
    from megatron_rl.run.run_directory import SWEEP

    first, most, why = args.runs[0], args.rollouts or MAX_ROLLOUTS, None
    for path in args.runs:
        if not path.exists():
            why = f"no run directory {path}"
        elif path.is_dir() and not is_run(path) and not (path / SWEEP).exists():
            why = f"{path} is no run directory: it has no metrics.jsonl, config.yaml or {SWEEP}"
    if why is None and args.png and (len(args.runs) > 1 or not is_run(first)):
        why = "--png draws the curves of one run: name one run"
    if why is None and args.png and importlib.util.find_spec("matplotlib") is None:
        why = '--png needs matplotlib: pip install "megatron-rl[png]"'
    if why is None and len(args.runs) == 1 and not first.is_dir():
        why = f"{first}: give a second evaluation to compare it with, or the directory of a run"
    if why is not None:
        raise ConfigError(why)
    if len(args.runs) > 1:
        print(write_comparison(args.runs, args.out or DEFAULT_OUT, rollouts=most))
    else:
        print(write_report(first, args.out, rollouts=most))
    if args.png:
        from megatron_rl.report.png import draw_overview

        print(draw_overview(read_run(first), args.png))
    return 0
