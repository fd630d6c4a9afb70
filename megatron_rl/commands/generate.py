"""`megatron-rl generate`: a teacher's answers to a problem set, as SFT pairs in train.parquet and validation.parquet."""

from __future__ import annotations

import random
from pathlib import Path

from megatron_rl.commands.common import Answered, answers, open_world
from megatron_rl.commands.launch import Place
from megatron_rl.config import GenerateConfig
from megatron_rl.data import write_parquet


def run(config: GenerateConfig, place: Place) -> int:
    """Every rank runs it. Rows: prompt, response, finished, and every mapped field of the problem. Returns the exit status."""
    with open_world(place) as world:
        found = answers(config, world)
        if found is not None:
            _write(config, found)
    return 0


def _write(config: GenerateConfig, found: list[Answered]) -> None:
    rows = [{**a.problem.values, "prompt": a.prompt, "response": a.text, "finished": a.completion.stop.finished} for a in found]
    problems = sorted({a.problem.row for a in found})
    chosen = set(random.Random(config.seed).sample(problems, round(config.validation_share * len(problems))))
    held = [row for row, a in zip(rows, found, strict=True) if a.problem.row in chosen]  # whole problems: no leak by a second sample
    kept = [row for row, a in zip(rows, found, strict=True) if a.problem.row not in chosen]
    output = Path(config.output)
    write_parquet(output / "train.parquet", kept)
    if held:
        write_parquet(output / "validation.parquet", held)
    unfinished = sum(not row["finished"] for row in rows)
    print(f"{len(kept)} training and {len(held)} validation pairs in {output}; {unfinished} answers were cut at sampling.max_tokens")
