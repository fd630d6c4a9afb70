"""Enters the program `megatron-rl`: parses the arguments and calls one command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_rl.commands import check, cluster, conversions, fetch, offline, plan, ranks, report, serve
from megatron_rl.commands.parser import build_parser
from megatron_rl.config.schema import ConfigError
from megatron_rl.run.lines import DiskError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 done, 1 failed, 2 wrong config or arguments, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    args, rest = parser.parse_known_args(words)
    if rest and (not hasattr(args, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.settings += rest  # settings that stand behind an option
    try:
        return _call(args)
    except (ConfigError, DiskError) as error:
        print(f"megatron-rl {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, DiskError) else 2


def _call(args: argparse.Namespace) -> int:
    if args.command == "convert":
        return conversions.run(args.form, args)
    if args.command in cluster.NAMES:
        return cluster.run(args)
    alone = {"report": report.run, "check": check.run, "plan": plan.run, "serve": serve.run, "fetch": fetch.run}
    if args.command in alone:
        return alone[args.command](args)
    if args.command == "eval" and (args.completions or args.compare):
        return offline.run(args)
    if not args.settings:
        raise ConfigError("give a config: model.path=..., benchmarks=[gsm8k] and where their data is, or a YAML file")
    return ranks.run(args)


if __name__ == "__main__":
    sys.exit(main())
