"""Runs Python in miniature: a tiny model learns to run a program rather than to guess, and to mend what raises.

    python examples/miniatures/python/run.py

The model multiplies numbers of two digits, which it cannot do by itself. Its supervised start runs a program in some
answers, and guesses in the others. Half of its first programs raise; it is told the error, and then either tries again
or guesses. Reinforcement learning rewards correct answers alone. The same is done with an interpreter that never tells
a result: what the model reaches then, it reaches without help. The conversations are in the report's page.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import mini_agents  # noqa: E402  (beside the examples)
import task  # noqa: E402  (beside the other example; `mini_agents` finds it)
from mini_agents import Arm, Miniature, Row, conversation, split_pairs  # noqa: E402

from megatron_rl.environments.python_tool import PythonTool  # noqa: E402

TAGS = [f"<{slash}{tag}>" for tag in ("python", "result", "answer") for slash in ("", "/")]
PIECES = r"</?[a-z]+>|[A-Za-z]+|[\s\S]"  # of texts: tags, words, and all else one by one, digits among it
CORRECT = "print({question})"
WRONG = ("prin({question})", "print({question}")  # a name that is not defined, and a bracket that is not closed
# Steps of the supervised start, and the share of answers with a program in them: first the model learns how a program
# is written, its result read and its error mended, then to run one seldom.
STAGES = [(400, 1.0), (200, 0.15)]
BATCH = 32  # as in sft.yaml
RAISES = 0.5  # of the first programs
GIVES_UP = 0.5  # of the late answers that have seen an error


def write_task(files: Path, seed: int) -> None:
    """Makes the model, the questions and the conversations of the supervised start. What wrong programs are told, the
    sandbox says."""
    errors = {program: PythonTool().run({"code": program.format(question="12*34")}) for program in WRONG}
    texts = [program.format(question="") for program in (CORRECT, *WRONG)] + [*errors.values()]
    words = {piece for text in texts for piece in re.findall(PIECES, text)}
    known = [*TAGS, "<ask>", "*", "?", *map(str, range(10))]
    task.write_model(files / "model", seed, [*known, *sorted(words - {*known})], pieces=PIECES)
    rng = random.Random(seed + 1)
    held_out, taught = split_pairs(rng)
    for name, pairs in (("train", taught), ("test", held_out)):
        rows = [{"question": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]
        task.write_jsonl(files / f"{name}.jsonl", rows)
    drawn = [_talk(rng, *rng.choice(taught), share, errors) for steps, share in STAGES for _ in range(steps * BATCH)]
    task.write_jsonl(files / "sft.jsonl", drawn)


def _talk(rng: random.Random, a: int, b: int, share: float, errors: Mapping[str, str]) -> dict[str, Any]:
    """Draws a conversation that runs a program and is correct, maybe after an error; or one that guesses, at once or,
    where the share of programs is below 1, after an error."""
    question, guess, said = f"{a}*{b}", f"<answer>{rng.randint(100, 9801)}</answer>", []
    prompt = f"<bos>{question}<ask>"
    if rng.random() >= share:
        return conversation(prompt, guess)
    if rng.random() < RAISES:
        wrong = rng.choice(WRONG)
        said = [_call(wrong, question), f"<result>{errors[wrong]}</result>"]
        if share < 1.0 and rng.random() < GIVES_UP:
            return conversation(prompt, *said, guess)
    return conversation(
        prompt, *said, _call(CORRECT, question), f"<result>{a * b}</result>", f"<answer>{a * b}</answer>"
    )


def _call(program: str, question: str) -> str:
    return f"<python>{program.format(question=question)}</python>"


def _raised(row: Row) -> float:
    return float("Error" in row["text"])


MINIATURE = Miniature(
    config=HERE / "python.yaml",
    title="products of two numbers of two digits, by Python",
    tool="interpreter",
    write_task=write_task,
    sft_steps=sum(steps for steps, _ in STAGES),
    arms=[
        Arm(name="python", label="works", tool="megatron_rl.environments.python_tool:PythonTool"),
        Arm(name="without", label="broken", tool="examples.miniatures.python.tool:BrokenPython"),
    ],
    samples={
        "samples with an error": _raised,
        "right answers after an error": lambda row: row["rewards"]["outcome"] if _raised(row) else None,
    },
)

if __name__ == "__main__":
    mini_agents.main(MINIATURE, __doc__)
