"""Chains of sums and differences: their true steps, solutions and verifications for supervised warm-up, and labels.

A problem is `7 + 5 - 4 =`. A solution has one step for each operation (`7 + 5 = 12`, `12 - 4 = 8`), so that the truth
of every step is known from its text. Texts have few line breaks, because each is a token to write and to train on.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.texts.text import fill

HERE = Path(__file__).parent
EQUATION = re.compile(r"\s*(-?\d{1,9}) ([+-]) (\d{1,9}) = (-?\d{1,9})\s*")


def step_labels(steps: Sequence[str], payload: Mapping[str, Any]) -> list[bool]:
    """Returns of each step whether it is true: an equation that holds, applies the problem's next operation, and starts
    from the number that the step before it gave (the first: from the problem's first number)."""
    first, operations = read(payload["question"])
    value, labels = first, []
    for j, text in enumerate(steps):
        found = EQUATION.fullmatch(text)
        if found is None or value is None:
            labels.append(False)
            value = None if found is None else int(found[4])
            continue
        left, sign, correct, result = int(found[1]), found[2], int(found[3]), int(found[4])
        wanted = j < len(operations) and operations[j] == (sign, correct) and left == value
        labels.append(wanted and applied(left, sign, correct) == result)
        value = result
    return labels


def read(question: str) -> tuple[int, list[tuple[str, int]]]:
    """Returns a problem's first number and its operations."""
    words = question.removesuffix("=").split()
    return int(words[0]), [(sign, int(word)) for sign, word in zip(words[1::2], words[2::2], strict=True)]


def applied(left: int, sign: str, correct: int) -> int:
    return left + correct if sign == "+" else left - correct


def solution(rng: random.Random, question: str, wrong: float) -> str:
    """Draws a solution. With probability `wrong` a step's result is off by a little."""
    value, operations = read(question)
    lines = []
    for sign, correct in operations:
        result = applied(value, sign, correct)
        result += rng.choice((-10, -2, -1, 1, 2, 10)) if rng.random() < wrong else 0
        lines.append(f"<step>{value} {sign} {correct} = {result}</step>")
        value = result
    body = "\n".join(lines)
    return f"<think>{body}</think><answer>\\boxed{{{value}}}</answer>"


def verification(text: str, misread: float, rng: random.Random) -> str:
    """Draws a verification of a solution made above: each step is computed again, and compared with what it says. With
    probability `misread` the verifier's own result is off. No known label is used."""
    blocks, every = [], True
    for step in re.findall(r"<step>(.*?)</step>", text):
        found = EQUATION.fullmatch(step)
        assert found is not None, step
        own = applied(int(found[1]), found[2], int(found[3]))
        own += rng.choice((-10, -2, -1, 1, 2, 10)) if rng.random() < misread else 0
        correct = own == int(found[4])
        every &= correct
        left = f"{found[1]} {found[2]} {found[3]}"
        blocks.append(f"<step>{left} = {own} {verdict(correct)}</step>")
    steps = "\n".join(blocks)
    return f"<step_verification>{steps}</step_verification><final_verification>{verdict(every)}</final_verification>"


def verdict(correct: bool) -> str:
    return f"\\boxed{{{'CORRECT' if correct else 'INCORRECT'}}}"


def write_pairs(rows: Path, out: Path, *, count: int, wrong: float, judged_wrong: float, misread: float) -> None:
    """Writes OUT/generator_sft.jsonl and OUT/verifier_sft.jsonl, `count` pairs each of the problems in `rows`."""
    rng = random.Random(0)
    questions = [json.loads(line)["question"] for line in rows.read_text(encoding="utf-8").splitlines()]
    templates = {name: (HERE / f"prompts/{name}.txt").read_text()[:-1] for name in ("generator", "verifier")}
    pairs: dict[str, list[dict[str, str]]] = {name: [] for name in templates}
    for _ in range(count):
        question = rng.choice(questions)
        prompt = fill(templates["generator"], question=question)
        pairs["generator"].append({"prompt": prompt, "response": solution(rng, question, wrong)})
        text = solution(rng, question, judged_wrong)
        values = {"question": question, "solution": text, "num_steps": str(text.count("<step>"))}
        prompt = fill(templates["verifier"], **values)
        pairs["verifier"].append({"prompt": prompt, "response": verification(text, misread, rng)})
    out.mkdir(parents=True, exist_ok=True)
    for name, found in pairs.items():
        lines = "".join(json.dumps(pair) + "\n" for pair in found)
        (out / f"{name}_sft.jsonl").write_text(lines, encoding="utf-8")
