"""Grades short answers to questions by exact match, ignoring case, punctuation, articles and spaces.

The rule is SQuAD's exact match (arXiv 1606.05250), which Search-R1 (arXiv 2503.09516) uses as its reward
(PeterGriffinJin/Search-R1 a14dc3a, verl/utils/reward_score/qa_em.py).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.texts.tags import block_texts

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # removes ASCII punctuation
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 if the last <answer> block of the response is one of the known answers, else 0.0.

    The known answers are payload["answers"], a text or a list of texts. Without this key, the only known answer is
    payload["answer"].
    """
    answers = payload.get("answers")
    answers = [payload["answer"]] if answers is None else [answers] if isinstance(answers, str) else answers
    return exact_match(response, answers)


def exact_match(response: str, gold_answers: Sequence[str]) -> float:
    """Returns 1.0 if the text in the last <answer> block of a response has the same normal form as one of the known
    answers, else 0.0."""
    blocks = block_texts(response, "answer")
    return float(bool(blocks) and normal_form(blocks[-1]) in map(normal_form, gold_answers))


def normal_form(text: str) -> str:
    """Returns the text in lower case, without punctuation and articles, with single spaces between its words.

    Punctuation is removed before articles: "a.b" becomes "ab", and "the-end" becomes "theend".
    """
    return " ".join(_ARTICLES.sub(" ", str(text).lower().translate(_PUNCTUATION)).split())
