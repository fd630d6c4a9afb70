"""Writes what the small experiments start from: a model with random weights, problems, SFT pairs of both roles.

python examples/nemo_run/last_letter_data.py DIRECTORY
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "miniatures/last_letter")]

import task  # noqa: E402
from teachers import ProblemSizes, make_problem, teacher_solution  # noqa: E402

SIZES = ProblemSizes((2, 3), (2, 3), alphabet=6)
MISTAKES = 0.35  # share of the teacher's solutions with the misconception


def main() -> None:
    directory = Path(sys.argv[1])
    if (directory / "ready").exists():
        return
    regime = task.Regime(MISTAKES, SIZES, SIZES, SIZES, SIZES, 0.3, 1e-3, 1, 3, 1e-3)
    task.write_model(directory / "model", 0)
    held = task.write_problems(directory / "test.jsonl", SIZES, 32, 1)
    task.write_problems(directory / "train.jsonl", SIZES, 200, 2, without=[row["question"] for row in held])
    task.write_generator_pairs(directory / "generator_sft.jsonl", regime, 3, clean_steps=150, noisy_steps=20)
    rng, judged = random.Random(4), []
    for _ in range(200):
        problem = make_problem(rng, SIZES)
        judged.append({**problem, "response": teacher_solution(rng, problem["words"], MISTAKES)})
    task.write_verifier_pairs(directory / "verifier_sft.jsonl", regime, judged, 5, steps=100)
    (directory / "ready").touch()


if __name__ == "__main__":
    main()
