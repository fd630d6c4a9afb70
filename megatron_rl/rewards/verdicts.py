"""Parses the verifier's output: step verdicts, final verdict, format and reward.

The rules are eq. 8 of arXiv 2505.15034 and those of its released code (verl/workers/verifier_worker.py and
verl/utils/reward_score/format.py), with one leniency: spaces inside a verdict's braces, before its full stop and around
the final verdict are allowed, because a word-level tokenizer cannot write without them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.rewards.tags import step_spans, step_texts

GAMMA = 0.8  # weight of the format score
COUNT_GATE = 0.6  # from this format score of the solution on, the number of verdicts must match

_STEPS, _END_STEPS = "<step_verification>", "</step_verification>"
_FINAL, _END_FINAL = "<final_verification>", "</final_verification>"
_BOX = r"\\box(?:ed)?\{\s*(CORRECT|INCORRECT)\s*\}\s*(?:\.\s*)?"
_VERDICT = re.compile(_BOX + "$", re.IGNORECASE)
_OPEN_OR_VERDICT = re.compile(rf"<step>|{_BOX}</step>", re.IGNORECASE)
_FINAL_VERDICT = re.compile(rf"{_FINAL}\s*{_BOX}{_END_FINAL}", re.IGNORECASE)
_FINAL_FOLLOWS = re.compile(rf"{_END_STEPS}\s*{_FINAL}")


@dataclass(frozen=True)
class Review:
    """A parsed verification and its reward."""

    verdicts: tuple[bool, ...]  # verdicts of the step section, in order
    final: bool | None  # final verdict; None: it cannot be parsed
    agrees: bool  # the final verdict is the solution's outcome
    format: float  # format score, 0 to 1
    reward: float


def step_verdicts(text: str) -> tuple[bool, ...]:
    """Returns the verdicts of the first step section, in order; none when one of its two tags is missing.

    A verdict counts where it ends a step block. A block without one gives none: it goes on to the next verdict that
    stands before a closing tag.
    """
    found: list[bool] = []
    opened = False
    for match in _OPEN_OR_VERDICT.finditer(_between(text, _STEPS, _END_STEPS) or ""):
        verdict = match.group(1)
        if verdict is not None and opened:
            found.append(verdict.upper() == "CORRECT")
        opened = verdict is None
    return tuple(found)


def final_verdict(text: str) -> bool | None:
    """Returns the verdict of the first final section that holds a boxed verdict and nothing else, wherever it stands;
    None if there is none."""
    match = _FINAL_VERDICT.search(text)
    return None if match is None else match.group(1).upper() == "CORRECT"


def verifier_format(text: str, num_steps: int, generator_format: float) -> float:
    """Returns the format score in [0, 1]. `num_steps`: steps of the solution; `generator_format`: its format score.

    The score is 0 unless the text begins with a step section, ends with a final section, and a final section follows a
    step section in it. Otherwise it is 1.0, minus 0.8 without a verdict at the end of the first final section, minus
    0.8 without step blocks in the first step section or (given a well-formed solution) when the number of blocks that
    end in a verdict is not num_steps, minus 0.4 for text between these blocks.
    """
    text = text.strip()
    inner = text[len(_STEPS) : -len(_END_FINAL)]
    if not (text.startswith(_STEPS) and text.endswith(_END_FINAL) and _FINAL_FOLLOWS.search(inner)):
        return 0.0
    steps, final = (_between(text, *tags) or "" for tags in ((_STEPS, _END_STEPS), (_FINAL, _END_FINAL)))
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


def review(text: str, *, num_steps: int, correct: bool, generator_format: float, gamma: float = GAMMA) -> Review:
    """Reads one verification of a solution whose graded outcome is `correct`. Any text is allowed.

    The reward is 1[final verdict = outcome] + gamma * format; both parts are 0 when the final verdict cannot be parsed.
    """
    final, verdicts = final_verdict(text), step_verdicts(text)
    if final is None:
        return Review(verdicts, None, agrees=False, format=0.0, reward=0.0)
    form = verifier_format(text, num_steps, generator_format)
    agrees = final == correct
    return Review(verdicts, final, agrees=agrees, format=form, reward=float(agrees) + gamma * form)


def _ends_in_verdict(section: str) -> bool:
    return _VERDICT.search(section.rstrip()) is not None


def _between(text: str, opening: str, closing: str) -> str | None:
    """Returns the text from the first opening tag to the next closing one; None when one of them is missing."""
    _, opened, rest = text.partition(opening)
    inside, closed, _ = rest.partition(closing)
    return inside if opened and closed else None
