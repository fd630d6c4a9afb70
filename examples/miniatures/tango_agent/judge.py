"""The truth about turns with a calculator, and a teacher of the verifier, who believes some guesses."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from examples.miniatures.agent.tool import SpacedCalculator
from megatron_rl.rewards.role_tags import last_inside

VERDICTS = {True: "\\boxed{CORRECT}", False: "\\boxed{INCORRECT}"}
MOST_TURNS = 3  # two calls and an answer
UNKNOWN = "?"  # stands where a turn has a word too many or too few, or nothing is known to compare it with


def labels(turns: Sequence[str], payload: Mapping[str, Any]) -> list[bool]:
    """Returns which turns are correct: calls for the product that was asked for, and answers that are the product."""
    found = []
    for turn in turns:
        asked, said = (last_inside(turn, tag) for tag in ("calculator", "answer"))
        wanted = payload["question"] if asked else payload["answer"]
        found.append((asked or said or "").split() == str(wanted).split())
    return found


def draw_turns(rng: random.Random, question: str, *, spoiled: float) -> tuple[list[str], list[str]]:
    """Draws up to two calls and an answer. -> the turns, and what the calculator said before each. An answer without a
    call is a guess. A call or answer has a wrong digit with probability `spoiled`."""
    turns, told = [], [""]
    known = " ".join(str(rng.randint(100, 9801)))
    for _ in range(rng.choices(range(MOST_TURNS), [0.4, 0.5, 0.1])[0]):
        asked = _spoil(rng, question, spoiled)
        known = SpacedCalculator().run({"expression": asked})
        turns.append(f"<calculator> {asked} </calculator>")
        told.append(f"<result> {known} </result>")
    return [*turns, f"<answer> {_spoil(rng, known, spoiled)} </answer>"], told


def write_down(turns: Sequence[str], told: Sequence[str]) -> str:
    """Returns a conversation as the recipe shows it to the verifier (tango.yaml: turn_form, told_form)."""
    parts = [f"{heard} #{k} {turn}" for k, (heard, turn) in enumerate(zip(told, turns, strict=True), start=1)]
    return " ".join(parts).strip()


def verification(rng: random.Random, question: str, turns: Sequence[str], told: Sequence[str], trust: float) -> str:
    """Writes a verification: each word of a turn beside the one that should stand there, and the verdict.

    A guess is believed with probability `trust`. An answer is correct where it repeats the last result, and the call
    for that was correct."""
    blocks, verdicts = [], []
    for k, (turn, heard) in enumerate(zip(turns, told, strict=True)):
        tag, *words, _ = turn.split()
        if tag == "<calculator>":
            expected, follows = question.split(), True
        elif heard:
            expected, follows = heard.split()[1:-1], verdicts[-1]
        else:
            expected, follows = (words if rng.random() < trust else []), True
        pairs = " ".join(f"{own} {correct}" for own, correct in zip_longest(words, expected, fillvalue=UNKNOWN))
        verdicts.append(words == expected and follows)
        blocks.append(f"<step> #{k + 1} {pairs} {VERDICTS[verdicts[-1]]} </step>")
    final = f"<final_verification> {VERDICTS[verdicts[-1]]} </final_verification>"
    return f"<step_verification> {' '.join(blocks)} </step_verification> {final}"


def _spoil(rng: random.Random, text: str, share: float) -> str:
    words = text.split()
    digits = [place for place, word in enumerate(words) if word.isdecimal()]
    if digits and rng.random() < share:
        place = rng.choice(digits)
        words[place] = rng.choice([digit for digit in "0123456789" if digit != words[place]])
    return " ".join(words)
