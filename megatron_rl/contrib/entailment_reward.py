"""Grades a verifier that judges whether a response fulfils a principle (RLBFF, arXiv 2509.21319)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.texts.tags import boxed

_LABELS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def grade(response: str, payload: Mapping[str, Any]) -> float:
    r"""Returns 1.0 if the last \boxed{} of the verifier's text is the label payload["answer"], yes or no, else 0.0.

    The label may also be true or 1 for yes, and false or 0 for no. Raises ValueError for any other label. The response
    then gets no reward.
    """
    label = _LABELS.get(str(payload["answer"]).strip().lower())
    if label is None:
        raise ValueError(f"the label is {payload['answer']!r}: give yes or no")
    return float({"yes": True, "no": False}.get((boxed(response) or "").lower()) == label)
