"""Implementation of `megatron-rl convert`."""

from __future__ import annotations

import argparse
import math

from megatron_rl.models import registry
from megatron_rl.session.output_directory import stoppable


def run(args: argparse.Namespace) -> int:
    """Runs a conversion and prints the result. Returns 0.

    Raises ConfigError if the arguments cannot be used, and SystemExit after SIGINT or SIGTERM."""
    with stoppable(args.target):
        return _run(args.form, args)


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
        source_options = {"role": args.role, "model": args.model, "trust": args.trust}
        for path in reshard.reshard(args.source, args.target, dense, experts=experts, **source_options):
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
    summary = convert.to_hf(source, args.target, dtype=dtype, shard_bytes=size, verify=args.verify)
    merged = f" with {source.adapter}" if source.adapter is not None else ""
    print(f"{source.path}{merged} -> {args.target}{f' (verified bit for bit; {summary})' if args.verify else ''}")
    return 0
