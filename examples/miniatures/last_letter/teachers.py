"""Generates data of the last-letter task: problems, solutions of a teacher with known errors, and verification texts.

For the given words, reasoning step j reports the last letter of word j (a compact form; in the paper, a step reports
all letters so far). The answer consists of all these letters, so the correctness of every step is known. Texts are
words separated by spaces, so that a word-level tokenizer produces one token per word.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.texts.tags import boxed, step_texts

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CORRECT, INCORRECT = "\\boxed{CORRECT}", "\\boxed{INCORRECT}"
NOTHING = "<q>"  # token that a verifier generates for an empty step, or for a step without a corresponding word
MAX_STEPS = 13  # later steps are also numbered #13, so that the vocabulary of step numbers is finite


@dataclass(frozen=True)
class ProblemSizes:
    """The sizes of generated problems: inclusive ranges of the number of words and of letters per word, and the size of
    the alphabet.
    """

    words: tuple[int, int]
    letters: tuple[int, int]
    alphabet: int = 10


def make_problem(rng: random.Random, sizes: ProblemSizes) -> dict[str, Any]:
    """Generates a random problem as a row {question, answer, words}. The question `a b #1 c d e #2` has the answer `b
    e`.
    """
    words = [
        "".join(rng.choice(LETTERS[: sizes.alphabet]) for _ in range(rng.randint(*sizes.letters)))
        for _ in range(rng.randint(*sizes.words))
    ]  # fmt: skip
    question = " ".join(f"{' '.join(word)} #{i}" for i, word in enumerate(words, start=1))
    return {"question": question, "answer": " ".join(word[-1] for word in words), "words": words}


def teacher_solution(rng: random.Random, words: Sequence[str], misconception: float, *, place: int = 0) -> str:
    """Generates a random solution text. With probability `misconception`, a step reports the first letter of its word
    instead of the last letter. `place`: index of the letter to report instead, if it is not the first.
    """
    letters = [word[place] if rng.random() < misconception else word[-1] for word in words]
    return solution_text(letters)


def solution_text(letters: Sequence[str]) -> str:
    """Returns the solution text whose steps report the given letters."""
    steps = " ".join(f"<step> #{i} {letter} </step>" for i, letter in enumerate(letters, start=1))
    return f"<think> {steps} </think> <answer> \\boxed{{ {' '.join(letters)} }} </answer>"


def verification_text(rng: random.Random, words: Sequence[str], solution: str, misread: float) -> str:
    """Generates a random verification text: for each step the claimed and the expected letter, and whether they agree.

    With probability `misread`, the verifier expects the first letter of the word. The final verdict is CORRECT if all
    steps are correct, their number equals the number of words, and the boxed answer repeats their letters. Gold
    verdicts are not used.
    """
    # words of each step; `#j letter` if the step is well formed
    contents = [text.split() for text in step_texts(solution)]
    blocks, verdicts = [], []
    for j, content in enumerate(contents):
        expected = (words[j][0] if rng.random() < misread else words[j][-1]) if j < len(words) else NOTHING
        verdicts.append(content[1:] == [expected])
        claimed = content[-1] if content else NOTHING
        number = min(j + 1, MAX_STEPS)
        blocks.append(f"<step> #{number} {claimed} {expected} {CORRECT if verdicts[-1] else INCORRECT} </step>")
    repeated = (boxed(solution) or "").split() == [letter for content in contents for letter in content[1:]]
    final = all(verdicts) and len(contents) == len(words) and repeated
    steps = "".join(f"{block} " for block in blocks)
    verdict = CORRECT if final else INCORRECT
    return f"<step_verification> {steps}</step_verification> <final_verification> {verdict} </final_verification>"
