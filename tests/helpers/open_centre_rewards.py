"""Rewards of texts that a random model earns now and then, so that toys learn something within a few updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def share_of_vowels(response: str, payload: Mapping[str, Any]) -> float:
    return sum(c in "aeiou" for c in response) / max(1, len(response))


def has_capital(response: str, payload: Mapping[str, Any]) -> float:
    return float(any(c.isupper() for c in response[:1]))


def begins_well(response: str, payload: Mapping[str, Any]) -> float:
    """Whether one of the first two words is an a or a b."""
    return float(bool({"a", "b"} & set(response.split()[:2])))


def gold(response: str, payload: Mapping[str, Any]) -> list[float | None]:
    """Known scores of the three criteria of a rubric."""
    return [1.0, None, 0.0]
