"""Entry point of the program `megatron-rl`: parses the arguments and runs one command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

ON_RANKS = ("train", "drift", "sft", "generate", "eval")  # commands that start ranks or are executed by ranks


def program() -> int:
    """Runs the command that the process arguments specify. Returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # printing a character outside the locale's encoding must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] and sys.argv[1] in ON_RANKS:
        from megatron_rl.allocator import restart_without_thread_caches

        restart_without_thread_caches()
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 success, 1 failure, 2 wrong config or arguments, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else None
    if command in ON_RANKS:
        # pyarrow selects its memory allocator when it is imported. Its default allocator holds 6 MB after iterations
        # that need 64 KiB, and grows in large steps (docs/log.md).
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
        # Ranks that overlap communication with matrix products need this setting. CUDA reads it once, when torch first
        # accesses a GPU, which may happen during an import. Ranks that this process starts inherit the setting.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if not {"-h", "--help"} & {*words} and _is_first():
            _tell_start(command, words)
    from megatron_rl.commands.parser import build_parser  # slow imports: done after the first line has been printed
    from megatron_rl.config.base import ConfigError, without_passwords
    from megatron_rl.run.json_lines import DiskError
    from megatron_rl.run.run_directory import RunBusy

    parser = build_parser(command)
    args, rest = parser.parse_known_args(words)
    if rest and (not hasattr(args, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.settings += rest  # settings given after an option
    try:
        return _call(args)
    except (ConfigError, DiskError, RunBusy) as error:
        print(f"megatron-rl {args.command}: {without_passwords(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _is_first() -> bool:
    """Returns whether this process is rank 0 of a launcher (torchrun or Slurm), or was started without a launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _tell_start(command: str, words: Sequence[str]) -> None:
    """Prints the first line of output, before slow imports."""
    from megatron_rl.run.startup_messages import tell

    files = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    tell(command, f"reading {', '.join(files)}" if files else "reading the settings")


def _call(args: argparse.Namespace) -> int:
    """Runs the command that the parsed arguments specify. Imports only the modules of this command."""
    from megatron_rl.commands import cluster
    from megatron_rl.config.base import ConfigError

    if args.command in cluster.NAMES:
        return cluster.run(args)
    if args.command == "convert":
        from megatron_rl.commands import conversions

        return conversions.run(args.form, args)
    if args.command in ("report", "check", "plan", "serve", "init", "settings", "fetch"):
        return _alone(args)
    if args.command == "eval" and (args.completions or args.compare):
        from megatron_rl.commands import offline

        return offline.run(args)
    if not args.settings:
        raise ConfigError("give a config: model.path=..., benchmarks=[gsm8k] and where their data is, or a YAML file")
    from megatron_rl.commands import ranks

    return ranks.run(args)


def _alone(args: argparse.Namespace) -> int:
    """Runs a command that needs no ranks (no distributed processes)."""
    if args.command == "check":
        from megatron_rl.commands.check import run
    elif args.command == "plan":
        from megatron_rl.commands.plan import run
    elif args.command == "report":
        from megatron_rl.commands.report import run
    elif args.command == "fetch":
        from megatron_rl.commands.fetch import run
    elif args.command == "init":
        from megatron_rl.commands.init import run
    elif args.command == "settings":
        from megatron_rl.commands.show_settings import run
    else:
        from megatron_rl.commands.serve import run
    return run(args)


if __name__ == "__main__":
    sys.exit(program())
