"""`megatron-rl data split`: divides rows that were made elsewhere into training and validation data."""

from __future__ import annotations

import argparse
import json
import random

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.data.rows import BadRow, DataError, refuse, rows_of, write_parquet

PROMPTS = ("prompt", "messages", "conversations", "question", "problem")  # keys in which a row may have its prompt


def run(args: argparse.Namespace) -> int:
    """Writes DIR/train.parquet and DIR/validation.parquet. Returns 0.

    Raises ConfigError if there is no data, for a row that cannot be read or has no prompt, and for fewer than two
    different prompts.
    """
    found = list(rows_of(args.source, "train", None))
    first = next((row for _, row in found if not isinstance(row, BadRow)), {})
    key = args.by or next((name for name in PROMPTS if name in first), None)
    if key is None:
        raise ConfigError(
            f"{args.source}: the first row has the keys {', '.join(first)}, and none is known to hold a "
            "prompt: name the key with --by"
        )
    bad = [row for _, row in found if isinstance(row, BadRow)]
    bad += [BadRow(where, f"it has no {key}") for where, row in found if not isinstance(row, BadRow) and key not in row]
    with refusing(str, DataError):
        refuse(bad, len(found), 0.0, args.source)
    prompts = [json.dumps(row[key], sort_keys=True, default=str) for _, row in found]
    different = sorted({*prompts})
    if len(different) < 2:
        raise ConfigError(
            f"{args.source}: all {len(found)} rows have the same prompt ({key}), and rows with the same "
            "prompt must go to the same file"
        )
    count = min(max(1, round(args.share * len(different))), len(different) - 1)
    chosen = {*random.Random(args.seed).sample(different, count)}
    for name, held_out in (("train", False), ("validation", True)):
        rows = [row for (_, row), prompt in zip(found, prompts, strict=True) if (prompt in chosen) == held_out]
        write_parquet(args.out / f"{name}.parquet", rows)
        print(f"{args.out / name}.parquet: {len(rows)} rows")
    return 0
