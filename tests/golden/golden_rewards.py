"""The reward of the runs of `make golden`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns the share of the response's words that name the answer."""
    words = response.split()
    return sum(str(payload["answer"]) in word for word in words) / max(1, len(words))
