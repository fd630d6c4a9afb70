"""The verifier's output: step verdicts, final verdict, format and reward (arXiv 2505.15034, eq. 8 and its released rules)."""

from __future__ import annotations

import re
from dataclasses import dataclass

GAMMA = 0.8  # weight of the format score
COUNT_GATE = 0.6  # generator format from which on the number of verdicts must match

_BLOCK = re.compile(r"<step>(.*?)</step>", re.DOTALL)
_VERDICT = re.compile(r"\\box(?:ed)?\{\s*(CORRECT|INCORRECT)\s*\}[\s.]*$", re.IGNORECASE)
_FINAL = re.compile(r"<final_verification>(?:(?!<final_verification>).)*?\\box(?:ed)?\{\s*(CORRECT|INCORRECT)\s*\}[\s.]*</final_verification>\s*$",
                    re.DOTALL | re.IGNORECASE)  # fmt: skip
_WHOLE = re.compile(r"<step_verification>(.*)</step_verification>\s*<final_verification>(.*)</final_verification>", re.DOTALL)


@dataclass(frozen=True)
class Review:
    """What a verification says, and what it earns."""

    verdicts: tuple[bool, ...]  # of the step blocks that end in one
    num_blocks: int
    final: bool | None  # None: cannot be parsed
    agrees: bool
    format: float
    reward: float


def step_verdicts(text: str) -> tuple[bool, ...]:
    """Verdicts of the step blocks, in order; a block without a verdict at its end gives none."""
    found = (_VERDICT.search(block.strip()) for block in _BLOCK.findall(text))
    return tuple(match.group(1).upper() == "CORRECT" for match in found if match)


def final_verdict(text: str) -> bool | None:
    """The boxed verdict that ends the final section, which must end the text; None when it cannot be parsed."""
    match = _FINAL.search(text)
    return None if match is None else match.group(1).upper() == "CORRECT"


def verifier_format(text: str, num_steps: int, generator_format: float) -> float:
    """Format score in [0, 1]; `num_steps` K of the solution, `generator_format` as tags.generator_format gives it.

    0 unless the text is exactly a step section and a final section; then 1.0, minus 0.8 without a verdict at the end of the final
    section, minus 0.8 without step blocks or (given a well-formed solution) when the verdicts are not K, minus 0.4 for text between
    step blocks.
    """
    whole = _WHOLE.fullmatch(text.strip())
    if whole is None:
        return 0.0
    body, final = whole.groups()
    score = 1.0
    if _VERDICT.search(final.strip()) is None:
        score -= 0.8
    if not _BLOCK.search(body) or (len(step_verdicts(body)) != num_steps and generator_format >= COUNT_GATE):
        score -= 0.8
    if _BLOCK.sub("", body).strip():
        score -= 0.4
    return min(1.0, max(0.0, score))


def review(text: str, *, num_steps: int, correct: bool, generator_format: float, gamma: float = GAMMA) -> Review:
    """Reads one verification of a solution with K steps whose graded outcome is `correct`.

    Reward 1[final verdict = outcome] + gamma * format; both parts are 0 when the final verdict cannot be parsed.
    """
    final = final_verdict(text)
    verdicts, blocks = step_verdicts(text), len(_BLOCK.findall(text))
    if final is None:
        return Review(verdicts, blocks, None, agrees=False, format=0.0, reward=0.0)
    form = verifier_format(text, num_steps, generator_format)
    agrees = final == correct
    return Review(verdicts, blocks, final, agrees=agrees, format=form, reward=float(agrees) + gamma * form)
