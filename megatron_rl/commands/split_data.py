"""`megatron-rl data split`: splits existing rows into training and validation data."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import pyarrow as pa

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.data.rows import BadRow, DataError, refuse, rows_of, table_of, write_parquet

PROMPTS = ("prompt", "messages", "conversations", "question", "problem")  # keys under which a row may have the prompt
ANSWERING = ("assistant", "gpt", "model")  # roles of messages that answer


def run(args: argparse.Namespace) -> int:
    """Writes train.parquet and validation.parquet to the directory `args.out`. Returns 0.

    Raises ConfigError if there is no data, if the directory has data already, if a row cannot be read or has no prompt,
    if the values of a column have several types, and if there are fewer than two different prompts.
    """
    if existing := sorted(path.name for path in args.out.glob("*") if path.suffix in (".parquet", ".jsonl")):
        raise ConfigError(f"--out {args.out} has {', '.join(existing[:3])}: name a directory without data")
    with refusing(str, DataError, pa.ArrowException):
        rows = list(rows_of(args.source, "train", None))
        bad = [row for _, row in rows if isinstance(row, BadRow)]
        refuse(bad, len(rows), 0.0, args.source)
        first = rows[0][1] if rows else {}
        key = args.by or next((name for name in PROMPTS if name in first), None)
        if key is None:
            raise ConfigError(
                f"{args.source}: the first row has the keys {', '.join(first) or '(there is no row)'}, and none is "
                "known to hold a prompt: name the key with --by"
            )
        lacking = [BadRow(where, f"it has no {key}") for where, row in rows if key not in row]
        refuse(lacking, len(rows), 0.0, args.source)
        table = table_of([row for _, row in rows])
    prompts = [json.dumps(_asked(row[key]), sort_keys=True, default=str) for _, row in rows]
    different = sorted({*prompts})
    if len(different) < 2:
        raise ConfigError(
            f"{args.source}: all {len(rows)} rows have the same prompt ({key}), and rows with the same "
            "prompt must go to the same file"
        )
    count = min(max(1, round(args.share * len(different))), len(different) - 1)
    chosen = {*random.Random(args.seed).sample(different, count)}
    for name, held_out in (("train", False), ("validation", True)):
        part = table.filter(pa.array([(prompt in chosen) == held_out for prompt in prompts]))
        write_parquet(args.out / f"{name}.parquet", part)
        print(f"{args.out / name}.parquet: {len(part)} rows")
    return 0


def _asked(prompt: Any) -> Any:
    """Returns the part of a row's prompt that must be equal for two rows to have the same prompt. For a conversation,
    this is the list of messages before the first answer."""
    if not isinstance(prompt, list):
        return prompt
    roles = [message.get("role", message.get("from")) if isinstance(message, dict) else None for message in prompt]
    return prompt[: next((i for i, role in enumerate(roles) if role in ANSWERING), len(prompt))]
