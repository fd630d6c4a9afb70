"""Entry point of the program `megatron-rl`: parses the arguments and runs one command."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

ON_RANKS = ("train", "drift", "sft", "generate", "eval")  # commands that start distributed processes or run in them
INTERRUPTED = 130  # exit status after SIGINT


def program() -> int:
    """Runs the command that the process arguments specify. Returns the exit status. Ctrl-C, and a closed pipe such as
    that of `megatron-rl settings | head`, end the program without a traceback.
    """
    # `python -m` puts the current directory first: a file sympy.py beside a data file would be imported as sympy.
    if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
        sys.path.append(sys.path.pop(0))
    try:
        status = _program()
        sys.stdout.flush()  # a closed pipe raises an error here, not while the interpreter exits
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while exit handlers run prints no traceback
        return status
    except KeyboardInterrupt:
        print("megatron-rl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout when it exits. With stdout on /dev/null, this flush raises no second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _program() -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # printing a character outside the locale's encoding must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] and sys.argv[1] in ON_RANKS:
        from megatron_rl.devices.allocator import restart_without_thread_caches

        restart_without_thread_caches()
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 success, 1 failure, 2 wrong config or arguments, 130 interrupted."""
    # Only their owner may write to files and directories that this process and its children create. Others could
    # otherwise replace files of a run directory by links if the umask is 002.
    os.umask(os.umask(0o022) | 0o022)
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else None
    if command in ON_RANKS:
        # pyarrow reads this variable when it is imported. pyarrow's default allocator grows in large steps: after
        # some training iterations it held 6 MB of memory, of which 64 KiB were used (docs/experiments/log.md).
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
        # Ranks that overlap communication with matmuls need this setting. Ranks that this process starts inherit it.
        # CUDA reads the variable once, when torch first accesses a GPU, which may happen during an import.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # rank 0 of a launcher (torchrun or Slurm), or a process without a launcher, prints a line before slow imports
        first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
        if first and not {"-h", "--help"} & {*words}:
            from megatron_rl.run.startup_messages import tell

            files = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            tell(command, f"reading {', '.join(files)}" if files else "reading the settings")
    from megatron_rl.commands.parser import (  # slow imports: done after the first line has been printed
        COMMANDS,
        build_parser,
    )
    from megatron_rl.config.base import ConfigError, without_passwords
    from megatron_rl.lib.leaf_modules import leaf
    from megatron_rl.lib.regular_files import UntrustedFile
    from megatron_rl.run.json_lines import DiskError
    from megatron_rl.run.run_directory import RunBusy

    parser = build_parser(command)
    args, rest = parser.parse_known_args(words)
    if rest and (not hasattr(args, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.settings += rest  # settings given after an option
    module = COMMANDS[args.command][1]
    if args.command == "eval" and (args.completions or args.compare):
        module = "offline"
    try:
        return leaf(f"commands.{module}", f"`megatron-rl {args.command}`").run(args)
    except (ConfigError, DiskError, RunBusy, UntrustedFile) as error:
        print(f"megatron-rl {args.command}: {without_passwords(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(program())
