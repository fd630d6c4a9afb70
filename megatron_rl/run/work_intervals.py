"""The intervals in which the roles of a run work, as timeline.jsonl of the run directory has them."""

from __future__ import annotations

from typing import NamedTuple

PHASES = GENERATING, SCORING, TRAINING, SYNCING, SAVING = "generating", "scoring", "training", "syncing", "saving"


class Interval(NamedTuple):
    """The work of a role for an iteration. In timeline.jsonl, the times are seconds since the first iteration of the
    process began."""

    iteration: int
    role: str  # empty: the work of all roles
    phase: str  # one of PHASES
    began: float
    ended: float
