"""Grades answers that are a label or a short text, by comparing texts. No expression in a response is evaluated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

from megatron_rl.texts.tags import answer_text

MAX_CHARACTERS = 2000  # longer answers are truncated
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|texttt|textit)\s*\{([^{}]*)\}")
_NUMBER = re.compile(r"[-+]?\d{1,40}(?:,\d{3})*(?:\.\d{1,40})?|[-+]?\.\d{1,40}")
_EXACT = Context(prec=2 * MAX_CHARACTERS)  # the default precision of 28 digits raises an error for longer numbers
_SYNONYMS = {"true": "yes", "false": "no"}


def stated_answer(response: str) -> str:
    r"""Returns the answer in a response: the content of the last \boxed{}; without a box, of the last <answer> block;
    without both, the last line."""
    answer = answer_text(response)
    if answer is None:
        answer = (response.strip().splitlines() or [""])[-1]
    for _ in range(4):  # removes up to four nested \text{}
        answer = _TEXT.sub(r"\1", answer)
    return answer.replace("\\ ", " ").replace("$", "").replace("\\%", "%").strip()[:MAX_CHARACTERS]


def grade_label(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 if the answer in the response contains the known label payload["answer"] and no other label of
    payload["choices"], else 0.0."""
    choices = [str(choice).lower() for choice in payload["choices"]]
    words = [
        _SYNONYMS.get(word, word) if word not in choices else word
        for word in re.findall(r"[a-z]+", stated_answer(response).lower())
    ]
    named = {word for word in words if word in choices}
    return float(named == {str(payload["answer"]).lower()})


def grade_text(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 if the answer in the response is the same text as the known answer payload["answer"], else 0.0.

    Comma-separated lists are compared element by element. A number with more decimal places than the known number is
    rounded to the decimal places of the known number, unless the known number has none.
    """
    return float(same_text(stated_answer(response), str(payload["answer"])))


def same_text(answer: str, gold: str) -> bool:
    """Returns whether two answers are the same text, the same number, or the same list of texts and numbers."""
    if _plain(answer) == _plain(gold):
        return True
    numbers = _number(answer), _number(gold)
    if numbers[0] is not None and numbers[1] is not None:
        return _agree(numbers[0], numbers[1])
    parts, gold_parts = ([_plain(part) for part in text.split(", ")] for text in (answer, gold))
    return len(parts) == len(gold_parts) > 1 and all(same_text(a, b) for a, b in zip(parts, gold_parts, strict=True))


def _plain(text: str) -> str:
    """Returns the text in lower case, without quotes, articles, trailing full stops and doubled spaces."""
    text = re.sub(r"[\"'`“”‘’*]", "", text.lower()).strip().rstrip(".")
    return " ".join(word for word in text.split() if word not in ("the", "a", "an"))


def _number(text: str) -> Decimal | None:
    text = text.strip().rstrip(".").removeprefix("$").removesuffix("%").strip()
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _agree(answer: Decimal, gold: Decimal) -> bool:
    """Returns whether the number `answer` is equal to the known number `gold`.

    If `answer` has more decimal places than `gold`, it is first rounded to the decimal places of `gold`, unless
    `gold` has none.
    """
    if answer == gold:
        return True
    exponent = gold.as_tuple().exponent
    if not isinstance(exponent, int) or exponent >= 0:
        return False
    step = Decimal(1).scaleb(exponent)
    finer = isinstance(answer_exponent := answer.as_tuple().exponent, int) and answer_exponent < exponent
    return finer and answer.quantize(step, ROUND_HALF_UP, _EXACT) == gold
