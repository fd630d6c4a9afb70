"""The events of a training run. One observer receives every event, on the driver (rank 0)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron_rl.training.held_out_sets import Answers
from megatron_rl.training.iteration import Iteration
from megatron_rl.types import Rollout


class Said(NamedTuple):
    """A message to the user about the current operation."""

    text: str


class Measured(NamedTuple):
    """Metrics to log: of a role in an iteration, of an evaluation, or of the preflight checks."""

    cycle: int
    scope: str  # a role, "eval" or "preflight"
    metrics: Mapping[str, float]
    iteration: int


class Trained(NamedTuple):
    """An iteration whose policies are updated."""

    iteration: Iteration
    rollouts: Mapping[str, Sequence[Rollout]]  # by role, with advantages


class Finished(NamedTuple):
    """The end of an iteration."""

    iterations: int  # number of finished iterations


class Saved(NamedTuple):
    """A checkpoint whose files are all written."""

    iterations: int  # number of iterations that the checkpoint covers


class Evaluated(NamedTuple):
    """A complete evaluation. Its metrics are a Measured."""

    iterations: int  # number of finished iterations
    answers: Answers


Event = Said | Measured | Trained | Finished | Saved | Evaluated
Observer = Callable[[Event], None]
