"""Parses the verifier's output: step verdicts, final verdict, format score and reward.

The rules are eq. 8 of arXiv 2505.15034 and the rules of its released code (verl/workers/verifier_worker.py and
verl/utils/reward_score/format.py), with one exception: spaces are allowed inside a verdict's braces, before its full
stop and around the final verdict, because the output of a word-level tokenizer always has spaces there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.texts.tags import between, step_spans, step_texts

GAMMA = 0.8  # weight of the format score in the reward of a verification
COUNT_GATE = 0.6  # minimum format score of a solution for which the number of verdicts must equal the number of steps

_STEPS, _END_STEPS = "<step_verification>", "</step_verification>"
_FINAL, _END_FINAL = "<final_verification>", "</final_verification>"
_BOX = r"\\box(?:ed)?\{\s*(CORRECT|INCORRECT)\s*\}\s*(?:\.\s*)?"
_VERDICT = re.compile(_BOX + "$", re.IGNORECASE)
_OPEN_OR_VERDICT = re.compile(rf"<step>|{_BOX}</step>", re.IGNORECASE)
_FINAL_VERDICT = re.compile(rf"{_FINAL}\s*{_BOX}{_END_FINAL}", re.IGNORECASE)
_FINAL_FOLLOWS = re.compile(rf"{_END_STEPS}\s*{_FINAL}")


@dataclass(frozen=True)
class Review:
    """A verifier's parsed verification of a solution, and the reward of the verification."""

    verdicts: tuple[bool, ...]  # verdicts on the steps, in order
    final: bool | None  # final verdict; None if it cannot be parsed
    agrees: bool  # whether the final verdict is equal to the graded outcome of the solution
    format: float  # format score of the verification, 0 to 1
    reward: float


def step_verdicts(text: str) -> tuple[bool, ...]:
    """Returns the verifier's verdicts on the steps (True for correct), in order, from the first <step_verification>
    section of a verification. Returns an empty tuple if the opening or the closing tag of the section is missing.

    A verdict is counted if it is at the end of a <step> block. A block without a verdict extends to the next verdict
    that is directly followed by a closing tag.
    """
    verdicts: list[bool] = []
    opened = False
    for match in _OPEN_OR_VERDICT.finditer(between(text, _STEPS, _END_STEPS) or ""):
        verdict = match.group(1)
        if verdict is not None and opened:
            verdicts.append(verdict.upper() == "CORRECT")
        opened = verdict is None
    return tuple(verdicts)


def final_verdict(text: str) -> bool | None:
    """Returns the final verdict of a verification (True for correct), from the first <final_verification> section that
    contains only a boxed verdict. Returns None if there is no such section."""
    match = _FINAL_VERDICT.search(text)
    return None if match is None else match.group(1).upper() == "CORRECT"


def verifier_format(text: str, num_steps: int, generator_format: float) -> float:
    """Returns the format score of a verification, in [0, 1].

    `num_steps`: number of steps of the solution. `generator_format`: format score of the solution.

    A step section is a <step_verification> block, and a final section is a <final_verification> block. The score is 0
    unless the text begins with a step section, ends with a final section, and has a final section directly after a step
    section. Otherwise the score starts at 1.0 and is reduced, but not below 0:

    - by 0.8 if the first final section does not end in a verdict;
    - by 0.8 if the first step section has no <step> blocks, or if the solution is well-formed (`generator_format` of at
      least COUNT_GATE) and the number of <step> blocks that end in a verdict is not `num_steps`;
    - by 0.4 if the first step section has text outside its <step> blocks.
    """
    text = text.strip()
    inner = text[len(_STEPS) : -len(_END_FINAL)]
    if not (text.startswith(_STEPS) and text.endswith(_END_FINAL) and _FINAL_FOLLOWS.search(inner)):
        return 0.0
    steps, final = (between(text, *tags) or "" for tags in ((_STEPS, _END_STEPS), (_FINAL, _END_FINAL)))
    spans = step_spans(steps)
    tenths = 10
    if not _ends_in_verdict(final):
        tenths -= 8
    judged = sum(_ends_in_verdict(block) for block in step_texts(steps))
    if not spans or (judged != num_steps and generator_format >= COUNT_GATE):
        tenths -= 8
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(steps)]
    if any(steps[end:start].strip() for end, start in zip(ends, starts, strict=True)):
        tenths -= 4
    return max(0, tenths) / 10


def review(
    text: str, *, num_steps: int, correct: bool, generator_format: float, gamma: float = GAMMA, correctness: float = 1.0
) -> Review:
    """Parses one verification of a solution and computes its reward. Any text is allowed.

    The reward is `correctness` * agreement + `gamma` * format score, or 0 if the final verdict cannot be parsed. The
    agreement is 1 if the final verdict equals `correct`, else 0. `verifier_format` computes the format score.

    `correct`: whether the solution was graded as correct. `correctness`: weight of the agreement. `gamma`: weight of
    the format score. `num_steps`, `generator_format`: number of steps and format score of the solution.
    """
    final, verdicts = final_verdict(text), step_verdicts(text)
    if final is None:
        return Review(verdicts, None, agrees=False, format=0.0, reward=0.0)
    form = verifier_format(text, num_steps, generator_format)
    agrees = final == correct
    return Review(verdicts, final, agrees=agrees, format=form, reward=correctness * agrees + gamma * form)


def _ends_in_verdict(section: str) -> bool:
    return _VERDICT.search(section.rstrip()) is not None
