"""Schedules for the weight of Tango's step advantages over a run (arXiv 2505.15034, appendix; the schedules linear and
cosine are those of the paper's code).
"""

from __future__ import annotations

import math
from typing import Literal

WeightSchedule = Literal["exponential", "linear", "cosine"]


def step_weight(schedule: WeightSchedule, update: int, *, start: float, floor: float, total: float) -> float:
    """Returns the weight alpha of the step advantages at the generator update with the index `update`, from 0 to
    `total`. From update `total` on, alpha is `floor`.

        exponential  max(floor, start * exp(-update * ln(start / floor) / total)); the paper's schedule
        linear       start + (floor - start) * update / total
        cosine       floor + (start - floor) * (1 + cos(pi * update / total)) / 2

    If `start` is at or below `floor`, alpha is constant at `start`. A `start` of 0 switches the step advantages off.
    Raises ValueError for an exponential schedule with floor 0 below `start`.
    """
    if schedule == "exponential" and floor == 0 < start:
        raise ValueError("floor = 0.0 of an exponential schedule: give a number above 0; other schedules can end at 0")
    if start <= floor:
        return start
    share = min(1.0, update / total)
    match schedule:
        case "exponential":
            return max(floor, start * math.exp(-share * math.log(start / floor)))
        case "linear":
            return max(floor, start + (floor - start) * share)
        case "cosine":
            return floor + (start - floor) * 0.5 * (1 + math.cos(math.pi * share))
