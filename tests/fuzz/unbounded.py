"""Numbers without bounds: every setting that takes a number gets absurd ones, and `check` refuses or reads each."""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fuzzing import Tally, tally

from megatron_rl.commands.settings import SCHEMAS
from megatron_rl.config.describe import settings_of
from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems
from megatron_rl.main import main

NUMBERS = ["1000000000000000000000000000000", "-1000000000000000000000000000000", "9223372036854775808", "2147483648",
           "1e300", "-1e300", "1e-300", "4294967296", "1000000000", "0", "-1"]  # fmt: skip
MEMORY = 8 << 30
ARGUMENTS = ["updates", "group_size"]  # of the recipe


def fuzz(seed: int, count: int) -> Tally:
    """Overrides one to three settings of a small run with absurd numbers, and checks the run or plans it.

    The memory of this process is limited, so that a number that something counts up to is a defect and no crash.
    """
    with tempfile.TemporaryDirectory() as place, _memory_limit():
        base = Path(place)
        write_tiny_model(base / "model")
        write_tiny_problems(base / "data.jsonl", 8)
        (base / "run.yaml").write_text(json.dumps(_config(base)))
        names = [*sorted(_numeric()), *(f"recipe.args.{name}" for name in ARGUMENTS)]

        def one(rng: random.Random) -> str:
            given = [f"{rng.choice(names)}={rng.choice(NUMBERS)}" for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            words = rng.choice([["check"], ["check"], ["plan", "--cluster", "1x8xA100-80"]])
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = main([words[0], str(base / "run.yaml"), *given, *words[1:]])
            assert status in (0, 1, 2), f"{given}: status {status}"
            assert "Traceback" not in said.getvalue(), f"{given}: {said.getvalue()[-2000:]}"
            return f"{words[0]}: {'refused' if status else 'read'}"

        return tally(seed, count, one)


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _config(base: Path) -> Mapping[str, Any]:
    return {
        "roles": {"generator": {"model": {"path": f"{base}/model"}}},
        "recipe": {"target": "megatron_rl.recipes.grpo:Grpo", "args": {"updates": 3, "template": "boxed_answer"}},
        "data": {"path": f"{base}/data.jsonl"},
        "reward": {"target": "megatron_rl.rewards.tiny_task:grade"},
    }


def _numeric() -> Iterator[str]:
    """Yields the settings of `train` whose default is a number."""
    for setting, _ in settings_of(SCHEMAS["train"], ""):
        name, _, default = setting.partition(" = ")
        with contextlib.suppress(ValueError):
            float(default)
            yield name.replace("roles.NAME", "roles.generator")
