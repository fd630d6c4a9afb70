"""The calculator of the miniature, whose numbers are digits set apart by spaces; one that is broken; and the grader."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.contrib.calculator import Calculator
from megatron_rl.rewards.role_tags import last_inside


@dataclass(kw_only=True)
class SpacedCalculator(Calculator):
    """A calculator for a vocabulary of single digits: `4 7 * 3 8` is 47 * 38."""

    def run(self, arguments: Mapping[str, Any]) -> str:
        expression = "".join(str(arguments.get("expression", "")).split())
        result = super().run({"expression": expression})
        return " ".join(result) if result.isdecimal() else "?"


@dataclass(kw_only=True)
class BrokenCalculator(Calculator):
    """A calculator that never knows the result: what the model reaches without help."""

    def run(self, arguments: Mapping[str, Any]) -> str:
        return "?"


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 where the last answer's digits are those of the product, else 0.0."""
    return float((last_inside(response, "answer") or "").split() == str(payload["answer"]).split())
