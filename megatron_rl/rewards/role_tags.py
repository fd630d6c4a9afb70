"""Parses the tags in texts of the proposer, solver and judge of Multi-Agent Evolve, and computes format scores.

The scores are those of the released code (ulab-uiuc/Multi-agent-evolve d71c00b, rewards/reward_managers.py:
calc_format_reward, extract_score_from_tags). For proposals and judgements, the released code counts the tags in the
prompt and the response together. Its prompts contain two pairs of tags, so the three pairs that it requires are one
pair in the response. The functions of this module only get the response, and return the same scores.
"""

from __future__ import annotations

import re

from megatron_rl.texts.tags import block_texts

# maximum number of question blocks of a well-formed proposal: a model may correct its question; the last block is used
QUESTIONS = 3
LOWEST, HIGHEST = 1.0, 10.0  # lowest and highest score of the judge's scale

_NUMBERS = (r"\b\d+/\d+\b", r"\b\d+\.\d+\b", r"\b\d+\b")  # in order of precedence: fraction, decimal, integer


def last_inside(text: str, tag: str) -> str | None:
    """Returns the stripped text inside the last <tag>...</tag>, or None if there is no block or the text is empty."""
    blocks = block_texts(text, tag)
    return (blocks[-1].strip() or None) if blocks else None


def tag_form(text: str, tag: str, most: int = 1) -> float:
    """Returns the format score of a tag: 1.0 for one to `most` pairs of the tag, 0.5 for more pairs, and 0.0 without
    the tag or if the numbers of opening and closing tags differ."""
    pairs, closing = text.count(f"<{tag}>"), text.count(f"</{tag}>")
    if not pairs or pairs != closing:
        return 0.0
    return 1.0 if pairs <= most else 0.5


def proposal_form(text: str) -> float:
    """Returns the mean format score of a proposal's question blocks and, if present, of its answer and type blocks.

    The score of the answer blocks is 1.0 if there is exactly one more answer block than question blocks, and 0.0
    otherwise, as in the released code of Multi-Agent Evolve.
    """
    parts = [tag_form(text, "question", QUESTIONS)]
    answers, closing = text.count("<answer>"), text.count("</answer>")
    if answers or closing:
        parts.append(float(answers == closing == text.count("<question>") + 1))
    if "<type>" in text or "</type>" in text:
        parts.append(tag_form(text, "type"))
    return sum(parts) / len(parts)


def judged_score(text: str) -> float | None:
    """Returns the score in the text of a judgement, mapped from the scale 1 to 10 onto [0, 1]; None if the text has no
    number.

    The score is the number in the first <score> block that has a number. Without such a block, it is the last number of
    the text. Numbers outside the scale are clamped to its ends. A fraction is evaluated: 9/10 is 0.9, clamped to 1.
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
