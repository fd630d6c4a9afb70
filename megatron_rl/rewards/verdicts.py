"""Parses the verifier's output: step verdicts, final verdict, format and reward.

The rules are eq. 8 of arXiv 2505.15034 and those of its released code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.rewards.tags import step_spans, step_texts

GAMMA = 0.8  # weight of the format score
COUNT_GATE = 0.6  # from this format score of the solution on, the number of verdicts must match

_STEPS, _END_STEPS = "<step_verification>", "</step_verification>"
_FINAL, _END_FINAL = "<final_verification>", "</final_verification>"
_VERDICT = re.compile(r"\\box(?:ed)?\{\s*(CORRECT|INCORRECT)\s*\}\s*\.?$", re.IGNORECASE)


@dataclass(frozen=True)
class Review:
    """The content of one verification, and what it earns."""

    verdicts: tuple[bool, ...]  # verdicts of the step blocks that end in one
    num_blocks: int  # step blocks
    final: bool | None  # final verdict; None: it cannot be parsed
    agrees: bool  # the final verdict is the solution's outcome
    format: float  # format score, 0 to 1
    reward: float


def step_verdicts(text: str) -> tuple[bool, ...]:
    """Returns the verdicts of the step blocks, in order. A block without a verdict at its end gives none.

    Blocks behind the step section do not count.
    """
    found = (_verdict(block) for block in step_texts(_step_section(text)))
    return tuple(verdict for verdict in found if verdict is not None)


def final_verdict(text: str) -> bool | None:
    """Returns the boxed verdict that ends the final section, which must end the text; None if there is none."""
    text = text.strip()
    start = text.rfind(_FINAL)
    if start < 0 or not text.endswith(_END_FINAL):
        return None
    section = text[start + len(_FINAL) : -len(_END_FINAL)]
    return None if _END_FINAL in section else _verdict(section)


def verifier_format(text: str, num_steps: int, generator_format: float) -> float:
    """Returns the format score in [0, 1]. `num_steps`: steps of the solution; `generator_format`: its format score.

    The score is 0 unless the text is exactly a step section and a final section. Otherwise it is 1.0, minus 0.8 without
    a verdict at the end of the final section, minus 0.8 without step blocks or (given a well-formed solution) when the
    number of verdicts is not num_steps, minus 0.4 for text between step blocks.
    """
    sections = _sections(text)
    if sections is None:
        return 0.0
    steps, final = sections
    spans = step_spans(steps)
    tenths = 10
    if _verdict(final) is None:
        tenths -= 8
    if not spans or (len(step_verdicts(steps)) != num_steps and generator_format >= COUNT_GATE):
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
    final = final_verdict(text)
    verdicts, blocks = step_verdicts(text), len(step_spans(_step_section(text)))
    if final is None:
        return Review(verdicts, blocks, None, agrees=False, format=0.0, reward=0.0)
    form = verifier_format(text, num_steps, generator_format)
    agrees = final == correct
    return Review(verdicts, blocks, final, agrees=agrees, format=form, reward=float(agrees) + gamma * form)


def _verdict(section: str) -> bool | None:
    match = _VERDICT.search(section.rstrip())
    return None if match is None else match.group(1).upper() == "CORRECT"


def _step_section(text: str) -> str:
    """Returns the text up to the end of the step section; all of it when that end is missing."""
    return text.partition(_END_STEPS)[0]


def _sections(text: str) -> tuple[str, str] | None:
    """Returns the contents of the two sections; None unless the text is exactly one of each, in order."""
    text = text.strip()
    if not (text.startswith(_STEPS) and text.endswith(_END_FINAL)):
        return None
    steps, _, rest = text[len(_STEPS) : -len(_END_FINAL)].partition(_END_STEPS)
    final = rest.lstrip()
    if not final.startswith(_FINAL):
        return None
    final = final[len(_FINAL) :]
    again = any(tag in part for part in (steps, final) for tag in (_STEPS, _END_STEPS, _FINAL, _END_FINAL))
    return None if again else (steps, final)
