"""What the training loop asks of the policies, their engines and the checkpoints. The driver calls every method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from megatron_rl.training.lessons import Lesson, Metrics
from megatron_rl.types import Rollout


class Fleet(Protocol):
    """The policies of a run and their engines. Unless it returns a future, a method returns when all ranks that
    have a part in it have done it."""

    @property
    def with_engine(self) -> Sequence[str]:
        """The names of the policies that send their weights to an engine."""
        ...

    def start(self, versions: Mapping[str, int]) -> None:
        """Sends the weights of every policy to its engine, for the first time in this process. `versions`: versions of
        the weights by policy; a missing one is 0.
        """

    def begin(self, number: int) -> None:
        """Begins the iteration with this index: applies the settings of its stage, and profiles what the ranks do from
        here on.
        """

    def end(self) -> None:
        """Ends the profile of the iteration."""

    def generate(self) -> None:
        """Gives the devices to the engines. On return, the engines accept requests."""

    def score(self, policy: str, rollouts: Sequence[Rollout], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """Returns scores of each rollout (see iteration.Score), computed by a policy: {name: [T] float32}."""
        ...

    def apart(self, policy: str, other: str) -> bool:
        """Returns whether two policies have no rank in common, so that they can be updated at the same time."""
        ...

    def update(self, lesson: Lesson, learning: Sequence[str]) -> Future[Metrics]:
        """Begins to train a policy on its lesson. The future gives the metrics of the update. `learning`: names of all
        policies that are updated in the iteration.
        """
        ...

    def refit(self, policy: str, version: int) -> None:
        """Sends a policy's weights to its engine as weights of this version. No-op without an engine."""

    def occupied_s(self) -> float | None:
        """Returns for how many seconds a slot of the engines' batches has been occupied so far, as a mean over all
        slots; None if this is unknown.
        """


class Checkpoints(Protocol):
    """Saves a run, and keeps its best models. `save` and `settle` return the number of iterations that a checkpoint
    covers whose files have meanwhile been completely written, or None.
    """

    def begin(self, number: int) -> None:
        """Begins the checkpoint of `number` iterations, of which all updates have begun: each policy is saved when its
        updates that have begun are complete. The call does not wait for them.
        """

    def save(self, number: int, state: Mapping[str, Any]) -> int | None:
        """Saves the checkpoint of `number` iterations, which may be written in the background. Begins it, if `begin`
        was not called for it. `state`: JSON values that the checkpoint stores besides the policies.
        """

    def settle(self, *, wait: bool) -> int | None:
        """Completes the checkpoint that `save` started, if its files are written. With `wait`, waits for them."""

    def keep_best(self, number: int, best: Sequence[tuple[int, float]]) -> None:
        """Exports the present models if their evaluation is among the best. `number`: number of finished iterations.
        `best`: Progress.best.
        """

    def remove_surpassed(self, best: Sequence[tuple[int, float]]) -> None:
        """Removes checkpoints and models of evaluations that are not in `best` (Progress.best) any more."""
