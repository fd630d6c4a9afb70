"""Reads the tags that proposer, solver and judge write, and scores their form as Multi-Agent Evolve's code does.

The released code (ulab-uiuc/Multi-agent-evolve d71c00b, rewards/reward_managers.py: calc_format_reward,
extract_score_from_tags) counts the tags of a proposal and of a judgement over prompt and response together, and its
prompts hold two pairs themselves: its "three pairs" are one pair in the response. The functions here see the response
alone and give the same numbers.
"""

from __future__ import annotations

import re

from megatron_rl.rewards.tags import block_texts

QUESTIONS = 3  # a proposal may correct itself: so many question blocks are in form, and the last one counts
LOWEST, HIGHEST = 1.0, 10.0  # the judge's scale

_NUMBERS = (r"\b\d+/\d+\b", r"\b\d+\.\d+\b", r"\b\d+\b")  # a fraction is looked for first, then a decimal


def last_inside(text: str, tag: str) -> str | None:
    """Returns the stripped text inside the last <tag>...</tag>, or None if there is no block or it is empty."""
    found = block_texts(text, tag)
    return (found[-1].strip() or None) if found else None


def tag_form(text: str, tag: str, most: int = 1) -> float:
    """Returns 1.0 for one to `most` pairs of a tag, 0.5 for more, and 0.0 for none or a tag without its partner."""
    pairs, closing = text.count(f"<{tag}>"), text.count(f"</{tag}>")
    if not pairs or pairs != closing:
        return 0.0
    return 1.0 if pairs <= most else 0.5


def proposal_form(text: str) -> float:
    """Returns the mean form of a proposal's question blocks and, where it has any, of its answer and type blocks.

    Answer blocks are in form when they number one more than the question blocks, as the released code counts them.
    """
    parts = [tag_form(text, "question", QUESTIONS)]
    answers, closing = text.count("<answer>"), text.count("</answer>")
    if answers or closing:
        parts.append(float(answers == closing == text.count("<question>") + 1))
    if "<type>" in text or "</type>" in text:
        parts.append(tag_form(text, "type"))
    return sum(parts) / len(parts)


def judged_score(text: str) -> float | None:
    """Returns a judgement's score, 1 to 10, mapped onto [0, 1]; None where it has no number.

    The first <score> block with a number counts; without one, the last number of the text. Numbers beyond the scale
    count as its ends, and so does a fraction: 9/10 is read as 0.9, below the scale.
    """
    blocks = block_texts(text, "score", re.IGNORECASE)
    numbers = [next((m[0] for kind in _NUMBERS if (m := re.search(kind, block))), "") for block in blocks]
    values = [value for number in numbers if (value := _value(number)) is not None]
    if not values:
        values = [_value(number) for number in re.findall("|".join(_NUMBERS), text)[-1:]]
    if not values or values[0] is None:
        return None
    return min(1.0, max(0.0, (values[0] - LOWEST) / (HIGHEST - LOWEST)))


def _value(number: str) -> float | None:
    """Returns the value of a number or a fraction; None for an empty text and for a fraction with denominator 0."""
    above, _, below = number.partition("/")
    if not below:
        return float(above) if above else None
    return float(above) / float(below) if float(below) else None
