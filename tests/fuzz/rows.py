"""Damaged data sets: every row is a row or named as a bad one, or the file is refused by name."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from damaged_runs import damaged
from fuzzing import Tally, tally

from megatron_rl.config.base import ConfigError
from megatron_rl.config.datasets import PromptSet
from megatron_rl.data.problems import read_problems
from megatron_rl.data.rows import DataError

ODD = [True, None, 10**400, [], {}, "", " ", "\ud800", -0.0, 1e308, ["x"], {"a": 1}, "x" * 10_000, "\0", 7, "a\u2028b"]


def fuzz(seed: int, count: int) -> Tally:
    """Writes rows with odd values, damages the file, and reads problems from it."""
    with tempfile.TemporaryDirectory() as place:

        def one(rng: random.Random) -> str:
            rows = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]
            table = rng.random() < 0.3
            if not table:
                rng.choice(rows)[rng.choice(["question", "answer", "other"])] = rng.choice(ODD)
            file = Path(place) / ("rows.parquet" if table else "rows.jsonl")
            if table:
                pq.write_table(pa.Table.from_pylist(rows), file)
            else:
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            if rng.random() < 0.7:
                file.write_bytes(damaged(file.read_bytes(), rng))
            source = PromptSet(path=str(file), fields={"question": "question", "answer": "answer"}, max_bad_share=0.9)
            try:
                found = read_problems(source)
            except (ConfigError, DataError):
                return "refused"
            assert all(isinstance(problem.values["question"], str) for problem in found)
            return "read"

        return tally(seed, count, one)
