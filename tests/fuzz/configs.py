"""Hostile configs: each is read or refused by name, in little time and memory."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from damaged_runs import damaged
from fuzzing import Tally, tally

from megatron_rl.commands.settings import load
from megatron_rl.config.base import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
VALUES = [
    "1e999", ".nan", ".inf", "-1", "0", "99999999999999999999", "0x" + "f" * 40, "null", "true", "''", "[]", "{}",
    "[[[[]]]]", "{a: {b: c}}", '"\\ud800"', '"\\0"', "!!python/object:os.system {}", "&a [*a]", "'x'", "é", "1:2", "~",
]  # fmt: skip


def fuzz(seed: int, count: int) -> Tally:
    """Changes bytes or values of the examples' configs, or overrides a setting with nonsense."""
    with tempfile.TemporaryDirectory() as place:

        def one(rng: random.Random) -> str:
            text, overrides = rng.choice(EXAMPLES).read_text().encode(), []
            if rng.random() < 0.4:
                text = damaged(text, rng)
            else:
                rows = text.decode().split("\n")
                given = [i for i, row in enumerate(rows) if ":" in row]
                at = rng.choice(given)
                rows[at] = f"{rows[at].partition(':')[0]}: {rng.choice(VALUES)}"
                text = "\n".join(rows).encode()
            if rng.random() < 0.3:
                keys = ["run.seed", "roles.solver.sampling", "recipe.args.x", "a", "run", "reward.args", ".", "run..x"]
                overrides = [f"{rng.choice(keys)}={rng.choice(VALUES)}"]
            file = Path(place) / "config.yaml"
            file.write_bytes(text)
            try:
                load([str(file), *overrides], rng.choice([None, "train", "sft", "eval"]))
            except ConfigError:
                return "refused"
            return "read"

        return tally(seed, count, one)
