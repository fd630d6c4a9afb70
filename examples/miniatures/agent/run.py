"""Runs agents in miniature: a tiny model learns to ask a calculator rather than to guess.

    python examples/miniatures/agent/run.py

The model multiplies numbers of two digits, which it cannot do by itself. Its supervised start calls the calculator in
some answers, which are correct, and guesses in the others. Reinforcement learning rewards correct answers alone. The
same is done with a calculator that never knows the result: what the model reaches then, it reaches without help. The
conversations are in the report's page.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import mini_agents  # noqa: E402  (beside the examples)
import task  # noqa: E402  (beside the other example; `mini_agents` finds it)
from mini_agents import Arm, Miniature, split_pairs  # noqa: E402

TAGS = [f"<{slash}{tag}>" for tag in ("calculator", "result", "answer") for slash in ("", "/")]
KNOWN = [*TAGS, "<ask>", "*", "?", *map(str, range(10))]
# Steps of the supervised start, and the share of answers with a call in them: first the model learns how the calculator
# is asked and its result read, then to ask seldom.
STAGES = [(700, 1.0), (200, 0.15)]
BATCH = 32  # as in sft.yaml


def write_task(files: Path, seed: int) -> None:
    """Makes the model, the questions and the pairs of the supervised start."""
    task.write_model(files / "model", seed, KNOWN)
    rng = random.Random(seed + 1)
    held_out, taught = split_pairs(rng)
    for name, pairs in (("train", taught), ("test", held_out)):
        rows = [{"question": _question(*pair), "answer": _digits(pair[0] * pair[1])} for pair in pairs]
        task.write_jsonl(files / f"{name}.jsonl", rows)
    pairs = [_pair(rng, *rng.choice(taught), share) for steps, share in STAGES for _ in range(steps * BATCH)]
    task.write_jsonl(files / "sft.jsonl", pairs)


def _question(a: int, b: int) -> str:
    return f"{_digits(a)} * {_digits(b)}"


def _digits(number: int) -> str:
    return " ".join(str(number))


def _pair(rng: random.Random, a: int, b: int, share: float) -> dict[str, str]:
    """Draws an answer with a call, which is correct, or one without, which guesses."""
    called = rng.random() < share
    product = a * b if called else rng.randint(100, 9801)
    call = f"<calculator> {_question(a, b)} </calculator> <result> {_digits(product)} </result> " if called else ""
    response = f"{call}<answer> {_digits(product)} </answer>"
    return {"prompt": f"<bos> {_question(a, b)} <ask>", "response": response}


MINIATURE = Miniature(
    config=HERE / "agent.yaml",
    title="products of two numbers of two digits",
    tool="calculator",
    write_task=write_task,
    sft_steps=sum(steps for steps, _ in STAGES),
    arms=[
        Arm(name="agent", label="works", tool="examples.miniatures.agent.tool:SpacedCalculator"),
        Arm(name="without", label="broken", tool="examples.miniatures.agent.tool:BrokenCalculator"),
    ],
)

if __name__ == "__main__":
    mini_agents.main(MINIATURE, __doc__)
