"""Grades the problems of data.tiny by the share of the requested letter in the response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns the share of the response's characters that are payload["answer"], 0 to 1; 0.0 for an empty response."""
    return response.count(str(payload["answer"])) / len(response) if response else 0.0
