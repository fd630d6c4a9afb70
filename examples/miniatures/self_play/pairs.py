"""Writes the files of the miniature of self-play: tasks for the proposer, and SFT pairs for both roles.

Model, rows and their answers are those of the miniature of Multi-Agent Evolve.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "evolve"))

import task  # noqa: E402  (beside the other example)
from rule import LETTERS, MOST, listed, row, solved  # noqa: E402

from megatron_rl.texts.text import fill  # noqa: E402

WRONG = 0.1  # of the letters in a proposal's answer


def write_tasks(path: Path) -> None:
    """Writes a task for each letter: a row that begins with it. No answer is known."""
    task.write_jsonl(path, [{"question": letter, "answer": "-"} for letter in LETTERS])


def write_pairs(path: Path, seed: int, *, batch: int, clean_steps: int, late_steps: int) -> None:
    """Writes SFT pairs in training order, half of them proposals. The late teacher of the solver is careless, so that
    reinforcement learning has something to mend, and its proposals are short and not always correct."""
    rng, rows = random.Random(seed), []
    for i in range(batch * (clean_steps + late_steps)):
        late = i >= batch * clean_steps
        rows.append(_proposal(rng, late) if i % 2 else task.draw_solution(rng, late))
    task.write_jsonl(path, rows)


def _proposal(rng: random.Random, late: bool) -> dict[str, str]:
    """Draws a proposal. Rows are of any length before the late teacher's, so that the model can answer long ones."""
    letters = task.draw_letters(rng, task.draw_length(rng) if late else rng.randint(1, MOST))
    correct = solved(letters)
    given = [own if late and rng.random() < WRONG else other for own, other in zip(letters, correct, strict=True)]
    prompt = fill((HERE / "proposer.txt").read_text(encoding="utf-8").strip(), question=letters[0])
    return {"prompt": prompt, "response": f"<question> {row(letters)} </question> <answer> {listed(given)} </answer>"}
