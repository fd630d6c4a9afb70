"""JSON files beside a model's weights: each is of a wrong type, too deep, too large, or damaged, and is refused or
read."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from damaged_runs import damaged
from fuzzing import Tally, tally

from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems
from megatron_rl.main import main

NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
         "model.safetensors.index.json")  # fmt: skip
VALUES: list[Any] = [None, True, 0, -1, 10**30, 1e300, "", "x" * 1000, [], {}, [[]], {"a": {}}, [1, "a"], float("inf")]
WHOLE = ["null", "[]", "3", '"x"', "", "NaN", "[" * 50_000, '{"a":' * 50_000, "{" + " " * 1_000_000 + "}", "\ud800"]


def fuzz(seed: int, count: int) -> Tally:
    """Changes one file of a model directory, and checks a run that reads it (also with --deep) or plans it."""
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        write_tiny_model(base / "model")
        write_tiny_problems(base / "data.jsonl", 4)
        (base / "model/generation_config.json").write_text('{"eos_token_id": 0}')
        run = [
            f"roles.generator.model.path={base}/changed", "recipe.target=megatron_rl.recipes.grpo:Grpo",
            "recipe.args.updates=3", "recipe.args.template=boxed_answer", f"data.path={base}/data.jsonl",
            "reward.target=megatron_rl.rewards.tiny_task:grade",
        ]  # fmt: skip

        def one(rng: random.Random) -> str:
            shutil.rmtree(base / "changed", ignore_errors=True)
            shutil.copytree(base / "model", base / "changed")
            _change(base / "changed" / rng.choice(NAMES), rng)
            words = rng.choice([["check"], ["check", "--deep"], ["plan", "--cluster", "1x8xA100-80"]])
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = main([words[0], *run, *words[1:]])
            assert "Traceback" not in said.getvalue(), said.getvalue()[-2000:]
            return f"{words[-1] if words[-1] == '--deep' else words[0]}: {'refused' if status else 'read'}"

        return tally(seed, count, one)


def _change(file: Path, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.3 or not file.exists():
        file.write_bytes(rng.choice(WHOLE).encode(errors="surrogatepass"))
    elif kind < 0.5:
        file.write_bytes(damaged(file.read_bytes(), rng))
    else:
        found = json.loads(file.read_text())
        holder = found
        while isinstance(holder, dict) and holder and rng.random() < 0.4:  # sometimes deeper
            inner = holder[rng.choice(sorted(holder))]
            holder = inner if isinstance(inner, dict) and inner else holder
            if not isinstance(inner, dict):
                break
        holder[rng.choice(sorted(holder))] = rng.choice(VALUES)
        file.write_text(json.dumps(found))
