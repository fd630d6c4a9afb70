"""Grades short answers to questions by exact match: equal but for case, punctuation, articles and spaces.

The rule is SQuAD's (arXiv 1606.05250), as Search-R1 (arXiv 2503.09516) rewards with it
(PeterGriffinJin/Search-R1 a14dc3a, verl/utils/reward_score/qa_em.py).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.rewards.tags import block_texts

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # of ASCII
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 when the last <answer> block is one of the known answers, else 0.0: payload["answers"], a text or a
    list of them, else payload["answer"] alone."""
    known = payload.get("answers")
    known = [payload["answer"]] if known is None else [known] if isinstance(known, str) else known
    return exact_match(response, known)


def exact_match(response: str, known: Sequence[str]) -> float:
    """Returns 1.0 when the last <answer> block is one of the known answers in normal form, else 0.0."""
    blocks = block_texts(response, "answer")
    return float(bool(blocks) and normal_form(blocks[-1]) in map(normal_form, known))


def normal_form(text: str) -> str:
    """Returns a text in lower case, without punctuation and articles, its words set apart by single spaces.

    Punctuation goes first: "a.b" becomes "ab", and "the-end" stays one word.
    """
    return " ".join(_ARTICLES.sub(" ", str(text).lower().translate(_PUNCTUATION)).split())
