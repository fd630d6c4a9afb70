"""`megatron-rl report`: writes the page of a run or of a sweep."""

from __future__ import annotations

import argparse

from megatron_rl.config.schema import ConfigError


def run(args: argparse.Namespace) -> int:
    """Prints the path of every file that it writes. Returns 0; raises ConfigError where there is no directory."""
    from megatron_rl.run.directory import SWEEP
    from megatron_rl.run.report import write_figure, write_report
    from megatron_rl.run.report_sweep import write_sweep_report

    if not args.run.is_dir():
        raise ConfigError(f"no run directory {args.run}")
    if (args.run / SWEEP).exists():
        print(write_sweep_report(args.run))
        return 0
    print(write_report(args.run))
    if args.png:
        print(write_figure(args.run, args.png))
    return 0
