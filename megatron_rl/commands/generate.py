"""`megatron-rl generate`: asks a teacher a problem set, and writes SFT pairs to train.parquet and validation.parquet.

Answers that were cut at sampling.max_tokens go to cut.parquet: training on them would teach to stop in the middle.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import GenerateConfig
from megatron_rl.data.problems import write_parquet
from megatron_rl.session.common import Answered, answers, open_world
from megatron_rl.session.launch import Place, run_directory


def run(config: GenerateConfig, place: Place) -> int:
    """Asks the teacher and writes its answers. Every rank runs it. Returns 0.

    A row has prompt, response, and every mapped field of the problem.
    """
    parts = Path(config.output) / "parts"
    with open_world(place, run_directory(config)) as world:
        found = answers(config, world, parts)
        if found is not None:
            _write(config, found)
            shutil.rmtree(parts)
    return 0


def _write(config: GenerateConfig, found: list[Answered]) -> None:
    rows = [{**a.problem.values, "prompt": a.prompt, "response": a.text} for a in found]
    problems = sorted({a.problem.row for a in found})
    chosen = set(random.Random(config.seed).sample(problems, round(config.validation_share * len(problems))))
    files: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "cut": []}
    for row, a in zip(rows, found, strict=True):  # whole problems are held out, so that no second sample leaks
        files["cut" if not a.finished else "validation" if a.problem.row in chosen else "train"].append(row)
    output = Path(config.output)
    for name, part in files.items():
        (output / f"{name}.parquet").unlink(missing_ok=True)
        if part:
            write_parquet(output / f"{name}.parquet", part)
    print(
        f"{len(files['train'])} training and {len(files['validation'])} validation pairs in {output}; "
        f"{len(files['cut'])} answers were cut at sampling.max_tokens = {config.sampling.max_tokens} "
        "and stand in cut.parquet"
    )
