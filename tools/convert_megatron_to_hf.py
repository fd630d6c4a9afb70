#!/usr/bin/env python3
"""A run's checkpoint as a Hugging Face directory, loadable by transformers and vLLM as it stands. No GPU, no ranks.

    python tools/convert_megatron_to_hf.py runs/demo out/generator --role generator
    python tools/convert_megatron_to_hf.py runs/demo/checkpoints/step_000012 out/verifier --role verifier --dtype bfloat16 --verify

Reads whatever layout wrote the checkpoint. Memory holds one parameter and one output shard. A conversion that is cut short leaves nothing
that looks complete.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megatron_rl.commands import convert
from megatron_rl.config import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run directory (its newest checkpoint), a checkpoint, or a role's directory in one")
    parser.add_argument("target", type=Path, help="the directory to make; it must not exist")
    parser.add_argument("--role", help="which role's model, where a checkpoint holds several")
    parser.add_argument("--model", type=Path, help="model directory the role started from (default: as the run's config.yaml says)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast on the way (default: as stored)")
    parser.add_argument("--shard-gb", type=float, default=convert.SHARD_BYTES / 1e9, help="largest size of an output file")
    parser.add_argument("--verify", action="store_true", help="read the result back and compare bit for bit")
    args = parser.parse_args()
    try:
        source = convert.find(args.source, role=args.role, model=args.model)
        dtype = getattr(torch, args.dtype) if args.dtype else None
        convert.to_hf(source, args.target, dtype=dtype, shard_bytes=int(args.shard_gb * 1e9), verify=args.verify)
    except ConfigError as error:
        print(f"convert_megatron_to_hf: {error}", file=sys.stderr)
        return 2
    print(f"{source.path} -> {args.target}{' (verified)' if args.verify else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
