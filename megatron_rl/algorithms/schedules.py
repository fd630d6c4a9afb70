"""How much the step advantages weigh as a run goes on (arXiv 2505.15034, appendix; linear and cosine as in its code)."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["exponential", "linear", "cosine"]


def step_weight(schedule: Schedule, update: int, *, start: float, floor: float, total: int) -> float:
    """alpha at generator update `update` (0 for the first) of `total`; never below `floor`.

    exponential: start * exp(-update * ln(start / floor) / total). linear, cosine: from start to floor over `total` updates.
    """
    if start <= floor:
        return start
    share = min(1.0, update / max(1, total))
    if schedule == "exponential":
        return max(floor, start * math.exp(-share * math.log(start / floor)) if floor > 0 else start * (1 - share))
    if schedule == "linear":
        return max(floor, start + (floor - start) * share)
    if schedule == "cosine":
        return max(floor, floor + (start - floor) * 0.5 * (1 + math.cos(math.pi * share)))
    raise ValueError(f"alpha schedule {schedule!r}: use exponential, linear or cosine")
