"""Arguments, parsed without torch, and implementation of `megatron-rl convert` and of the scripts in tools/."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.commands.settings import positive
from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion.output_directory import stoppable
from megatron_rl.models import registry

HELP = {
    "to-hf": "a run's checkpoint as a Hugging Face directory, loadable by transformers and vLLM as it stands",
    "to-megatron": "a Hugging Face directory as a Megatron checkpoint, loadable under any layout",
    "reshard": "a checkpoint, optimizer included, cut anew for another layout",
}
DTYPES = ("float32", "bfloat16", "float16")
SHARD_GB = 4.0


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the arguments of a conversion to a parser. `command`: name of the conversion, a key of HELP."""
    source = {"to-megatron": "a Hugging Face directory"}.get(
        command, "a run directory (its newest checkpoint), a checkpoint, or a role's directory in one"
    )
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("target", type=Path, help="the directory to make; it must not exist")
    add_family_argument(parser)
    if command != "to-megatron":
        everything = (
            ""
            if command == "to-hf"
            else "; without it all roles and the run's state go into a directory of the same name iteration_N"
        )
        parser.add_argument("--role", help=f"which role's model, where a checkpoint holds several{everything}")
        parser.add_argument(
            "--model",
            type=Path,
            help="model directory the role started from (default: the one in the run's config.yaml)",
        )
        parser.add_argument(
            "--trust",
            action="store_true",
            help="read pickled parts that are more than data; whoever wrote the checkpoint can then run code here",
        )
    if command == "reshard":
        for name, text in (("tp", "tensor parallel ranks"), ("pp", "pipeline stages"), ("ep", "expert parallel ranks")):
            parser.add_argument(
                f"--{name}",
                type=positive,
                default=1,
                help=f"{text} of the layout that will read it (default: 1)",
            )
        parser.add_argument(
            "--etp", type=positive, help="ranks that share an expert (default: tp, as in a run's layout)"
        )
        return
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: as they are stored)")
    parser.add_argument(
        "--shard-gb", type=_size, default=SHARD_GB, help=f"largest size of an output file (default: {SHARD_GB:g})"
    )
    checks = "read the result back and compare bit for bit" + (
        "; and logits against transformers, a merged adapter against peft" if command == "to-hf" else ""
    )
    parser.add_argument("--verify", action="store_true", help=checks)


def add_family_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument --family, which registers user-defined model families with `registry.add`."""
    parser.add_argument(
        "--family", action="append", default=[], metavar="MODULE:NAME",
        help="a model family of your own, as in a config's `families`; may be given several times",
    )  # fmt: skip


def run(command: str, args: argparse.Namespace) -> int:
    """Runs a conversion and prints the result. Returns 0.

    Raises ConfigError if the arguments cannot be used, and SystemExit after SIGINT or SIGTERM."""
    with stoppable(args.target):
        return _run(command, args)


def _run(command: str, args: argparse.Namespace) -> int:
    import torch

    from megatron_rl.conversion import convert, reshard
    from megatron_rl.conversion.weight_source import find
    from megatron_rl.weights.rank_layouts import TrainerLayout

    registry.add(args.family, "--family")
    if command == "reshard":
        dense, experts = (
            TrainerLayout(tp=args.tp, pp=args.pp, ep=args.ep, etp=etp, dp=math.lcm(args.tp, args.ep * etp) // args.tp)
            for etp in (args.etp or 1, args.etp or args.tp)
        )
        asked = {"role": args.role, "model": args.model, "trust": args.trust}
        for path in reshard.reshard(args.source, args.target, dense, experts=experts, **asked):
            etp = f", etp {args.etp}" if args.etp else ""
            print(f"{path} -> {args.target} (tp {args.tp}, pp {args.pp}, ep {args.ep}{etp})")
        return 0
    dtype, size = getattr(torch, args.dtype) if args.dtype else None, int(args.shard_gb * 1e9)
    if command == "to-megatron":
        source = find(args.source)
        convert.to_megatron(source, args.target, dtype=dtype, file_bytes=size, verify=args.verify)
        print(f"{source.path} -> {args.target}{' (verified bit for bit)' if args.verify else ''}")
        return 0
    source = find(args.source, role=args.role, model=args.model, trust=args.trust)
    said = convert.to_hf(source, args.target, dtype=dtype, shard_bytes=size, verify=args.verify)
    merged = f" with {source.adapter}" if source.adapter is not None else ""
    print(f"{source.path}{merged} -> {args.target}{f' (verified bit for bit; {said})' if args.verify else ''}")
    return 0


def script(command: str, text: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a conversion as a standalone script. Returns the exit status. `text`: help text of the script."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, command)
    args = parser.parse_args(arguments)
    try:
        return run(command, args)
    except ConfigError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 2


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give gigabytes, more than 0")
    return value
