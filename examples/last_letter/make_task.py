"""Writes the files of the last-letter experiment, without training anything.

    python examples/last_letter/make_task.py files --regime a --out runs/mine/task
    python examples/last_letter/make_task.py verifier-sft --regime a --out runs/mine/task --solutions runs/mine/pool/train.parquet

`files` writes model/ (random weights and tokenizer), test.jsonl and train.jsonl (problems without a question in common), judged.jsonl
(problems of the verifier's turns), pool.jsonl (problems whose sampled solutions the verifier's SFT judges) and generator_sft.jsonl.
`verifier-sft` writes verifier_sft.jsonl from those solutions: rows with question, words and response, as `megatron-rl generate` writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import task


def write_files(options: argparse.Namespace) -> None:
    """Everything that needs no trained model; each file has its own seed, counted from options.seed."""
    regime, out, seed = task.regimes()[options.regime], options.out, options.seed
    task.write_model(out / "model", seed)
    held = [row["question"] for row in task.write_problems(out / "test.jsonl", regime.test, options.test, seed + 1)]
    task.write_problems(out / "train.jsonl", regime.train, options.train, seed + 2, without=held)
    task.write_problems(out / "judged.jsonl", regime.judged, options.judged, seed + 3, without=held)
    task.write_problems(out / "pool.jsonl", regime.sft, options.pool, seed + 4, without=held)
    steps = {"clean_steps": options.clean_steps, "noisy_steps": options.noisy_steps}
    task.write_generator_pairs(out / "generator_sft.jsonl", regime, seed + 5, **steps)


def write_verifier_sft(options: argparse.Namespace) -> None:
    pool = read_solutions(options.solutions)
    task.write_verifier_pairs(
        options.out / "verifier_sft.jsonl", task.regimes()[options.regime], pool, options.seed + 6, steps=options.steps
    )


def read_solutions(path: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet or JSONL file. Raises ValueError for another kind, an empty file, and one without the columns needed."""
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        raise ValueError(f"{path}: solutions are read from .parquet or .jsonl, not {path.suffix!r}")
    missing = {"question", "words", "response"} - set(rows[0] if rows else ())
    if missing:
        raise ValueError(
            f"{path}: {len(rows)} rows, without {', '.join(sorted(missing))}; write it with `megatron-rl generate` from pool.jsonl"
        )
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    files = commands.add_parser("files", help="model, problems and the generator's SFT pairs")
    files.set_defaults(write=write_files)
    for name, count in (("test", 512), ("train", 8000), ("judged", 4000), ("pool", 512)):
        files.add_argument(f"--{name}", type=int, default=count, help=f"problems in {name}.jsonl (default {count})")
    files.add_argument(
        "--clean-steps", type=int, default=300, help=f"SFT steps of {task.BATCH} pairs by a teacher without fault (default 300)"
    )
    files.add_argument("--noisy-steps", type=int, default=100, help="SFT steps by the teacher with the misconception (default 100)")
    judge = commands.add_parser("verifier-sft", help="the verifier's SFT pairs")
    judge.set_defaults(write=write_verifier_sft)
    judge.add_argument("--solutions", type=Path, required=True, help="sampled solutions, .parquet or .jsonl")
    judge.add_argument("--steps", type=int, default=400, help=f"SFT steps of {task.BATCH} pairs (default 400)")
    for command in (files, judge):
        command.add_argument("--regime", choices=sorted(task.regimes()), default="a")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--out", type=Path, required=True, help="directory to write to")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        options.write(options)
    except (ValueError, OSError) as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
