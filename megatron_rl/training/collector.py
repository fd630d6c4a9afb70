"""Provides the rollouts of each iteration to the training loop. Rollouts are generated on demand, generated ahead of
training, or read from the record of another run.

The rollouts of an iteration are generated when at most `max_staleness` earlier iterations are still untrained. So the
weights that generate a token are at most `max_staleness` updates old. Generated iterations stay on disk until a
checkpoint that is completely written covers them, so a run that is killed and resumed does not generate an iteration
twice.
"""

from __future__ import annotations

import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.data.problems import PromptReader
from megatron_rl.run.metrics import SECONDS, Stopwatch
from megatron_rl.training.iteration import Collected, Iteration, Recipe, RolloutContext, Schedule
from megatron_rl.training.rollouts import measure, without_signal
from megatron_rl.training.store import IterationStore, State
from megatron_rl.types import Prompt, Rollout, Stop

LOOK_S = 0.5  # seconds between two calls of the `idle` callback while the training thread waits for rollouts


class RolloutError(RuntimeError):
    """A recipe returned rollouts that cannot be trained on. The message names the rollout and the problem."""


@dataclass(frozen=True)
class ReaderSource:
    """The source of the problems of one iteration: implements iteration.PromptSource with a prompt reader."""

    reader: PromptReader
    prompts_per_iteration: int

    def take(self, count: int | None = None) -> list[Prompt]:
        return self.reader.take(self.prompts_per_iteration if count is None else count)


@dataclass(frozen=True, kw_only=True)
class IterationMaker(ABC):
    """Generates the rollouts of iterations, or reads them from the record of another run. Holds everything that changes
    meanwhile: the recipe, and each role's prompt reader. Roles may share a reader.
    """

    recipe: Recipe
    readers: Mapping[str, PromptReader]

    @abstractmethod
    def make(self, iteration: Iteration) -> Collected:
        """Returns the rollouts and metrics of an iteration. Called for one iteration at a time, in order."""

    def state(self) -> State:
        """Returns the recipe's state and the positions of the prompt readers, as JSON values."""
        data = {role: reader.state_dict() for role, reader in self.readers.items()}
        return {"recipe": self.recipe.state_dict(), "data": data}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state returned by `state`."""
        self.recipe.load_state_dict(state["recipe"])
        for role, reader in self.readers.items():
            reader.load_state_dict(state["data"][role])


@dataclass(frozen=True, kw_only=True)
class RolloutMaker(IterationMaker):
    """Generates the rollouts of iterations with the recipe. Each iteration gets a new RolloutContext, and problems from
    the prompt reader of the first role that it trains.
    """

    context: RolloutContext
    prompts_per_iteration: int
    # roles whose loss does not use advantages, so that their rollouts may lack advantages
    uncredited: frozenset[str] = frozenset()
    # Stopwatch for rollouts that are generated while another iteration trains; None: the stopwatch of the context.
    # Its times are logged with the metrics of the iteration's first role.
    own_watch: Stopwatch | None = None

    def make(self, iteration: Iteration) -> Collected:
        """Returns the rollouts and the metrics of an iteration, both by role. The metrics include those that the recipe
        added.

        Raises RolloutError if the rollouts cannot be trained on.
        """
        context = replace(self.context, metrics={}, watch=self.own_watch or self.context.watch)
        reader = self.readers[iteration.role]
        dropped = reader.dropped
        found = self.recipe.rollout(iteration, ReaderSource(reader, self.prompts_per_iteration), context)
        if reader.dropped > dropped:
            context.add_metrics(iteration.role, {"prompts_too_long": float(reader.dropped - dropped)})
        if problem := next(_problems(iteration, found, self.uncredited), None):
            raise RolloutError(f"iteration {iteration.number}{problem}")
        rollouts = {role: list(found[role]) for role in iteration.roles}
        metrics = {role: measure(own) for role, own in rollouts.items()}
        for role in rollouts.keys() - self.uncredited:
            metrics[role]["groups_without_signal"] = without_signal(rollouts[role])
        # `context.metrics` may include roles that the iteration does not train
        for role, added in context.metrics.items():
            metrics[role] = {**metrics.get(role, {}), **added}
        if self.own_watch is not None:
            metrics[iteration.role].update(self.own_watch.take())
        return Collected(rollouts=rollouts, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class ReplayMaker(IterationMaker):
    """Reads the iterations that another run recorded, instead of generating rollouts. After each iteration, the recipe
    and the prompt readers are set to the state that the other run had after this iteration.
    """

    recorded: IterationStore

    def make(self, iteration: Iteration) -> Collected:
        """Returns the recorded iteration without its timings, which belong to the other run. Raises FileNotFoundError
        if the other run has no file of the iteration, and StoreError if the file is damaged or the iteration trained
        other roles.
        """
        collected, state = self.recorded.read(iteration)
        self.restore(state)
        metrics = {
            role: {name: value for name, value in metrics.items() if not name.startswith(SECONDS)}
            for role, metrics in collected.metrics.items()
        }
        return Collected(rollouts=collected.rollouts, metrics=metrics)


@dataclass(frozen=True)
class _CollectedIteration:
    """An iteration with its rollouts, and the state (recipe and prompt readers) after generating them."""

    iteration: Iteration
    collected: Collected
    state: State  # state of the recipe and the prompt readers after the iteration


class Collector:
    """Provides the rollouts of each iteration to the training loop, on the driver (rank 0). `upcoming` yields every
    iteration in order, beginning at the run's current position.

    If `max_staleness` is 0, the rollouts of an iteration are generated in the caller's thread when the iteration is
    due. Otherwise a background thread generates rollouts of later iterations ahead.
    """

    def __init__(
        self, maker: IterationMaker, upcoming: Iterator[Iteration], store: IterationStore, *, max_staleness: int,
        watch: Stopwatch | None = None, idle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Creates a collector.

        `watch`: measures how long `take` waits for the background thread.
        `idle`: callback that `take` calls about every LOOK_S seconds while it waits, for work that involves all ranks.
        """
        self._maker, self._upcoming, self._store, self._max = maker, upcoming, store, max_staleness
        self._watch, self._idle = watch or Stopwatch(), idle
        # state of the recipe and the prompt readers after the last iteration that `take` returned
        self._state = _as_json(maker.state())
        # Both threads hold the lock `_change` while they read or write the next four attributes.
        self._change = threading.Condition()
        self._ready: list[_CollectedIteration] = []
        self._failure: BaseException | None = None
        self._trained, self._closed = 0, False  # number of iterations trained since the collector started
        self._disk = threading.Lock()  # lock that is held while the store reads or writes files
        self._thread: threading.Thread | None = None

    def take(self, iteration: Iteration) -> Collected:
        """Returns the rollouts of the iteration that is due, and waits for them if necessary.

        Raises any error that occurred while the rollouts were generated, and ValueError if `iteration` is not the next
        one of the schedule.
        """
        if self._max > 0:
            with self._watch("wait"):
                done = self._await()
        else:
            done = self._one(self._next())
        if done.iteration != iteration:
            raise ValueError(
                f"{iteration} is due, and {done.iteration} was collected: "
                "the recipe's schedule is not a function of its arguments alone"
            )
        self._state = done.state
        return done.collected

    def trained(self) -> None:
        """Reports that the iteration last returned by `take` has been trained and the engines have the new weights, so
        that the rollouts of one more iteration may be generated.
        """
        with self._change:
            self._trained += 1
            self._change.notify_all()

    def state(self) -> State:
        """Returns the state for a checkpoint: the state of the recipe and the prompt readers after the iteration last
        returned by `take`, regardless of iterations generated ahead.
        """
        return self._state

    def saved(self, number: int) -> None:
        """Reports that a checkpoint which is completely written covers all iterations before number `number`, so their
        files can be removed.
        """
        self._store.drop(number)

    def close(self) -> None:
        """Stops generating rollouts ahead. If an iteration is being written to disk, waits until the file is complete.
        An iteration that is still being generated is discarded.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        with self._disk:
            pass

    def _next(self) -> Iteration:
        iteration = next(self._upcoming, None)
        if iteration is None:
            raise ValueError("an iteration is due after the last one of the schedule")
        return iteration

    def _await(self) -> _CollectedIteration:
        # the thread starts at the first `take`, so that the evaluation at the start of the run is not disturbed
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="rollouts", daemon=True)
            self._thread.start()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ready or self._failure, LOOK_S)
                if self._ready:
                    return self._ready.pop(0)
                if self._failure is not None:
                    raise self._failure
            self._idle()

    def _produce(self) -> None:
        try:
            for offset in itertools.count():
                with self._change:
                    self._change.wait_for(lambda at=offset: self._closed or at - self._trained <= self._max)
                    if self._closed:
                        return
                done = self._one(self._next())
                with self._change:
                    self._ready.append(done)
                    self._change.notify_all()
        except BaseException as error:  # re-raised by `take`
            with self._change:
                self._failure = error
                self._change.notify_all()

    def _one(self, iteration: Iteration) -> _CollectedIteration:
        """Returns an iteration with its rollouts: from the store if a previous, killed process of the run left its file
        there, otherwise newly generated.
        """
        with self._disk:
            kept = self._store.get(iteration)
        if kept is not None:
            self._maker.restore(kept[1])
            return _CollectedIteration(iteration, *kept)
        collected = self._maker.make(iteration)
        state = _as_json(self._maker.state())
        with self._disk:
            # a write that has begun holds the lock, so the process does not exit in the middle of it
            if not self._closed:
                self._store.put(iteration, collected, state)
        return _CollectedIteration(iteration, collected, state)


def upcoming(schedule: Schedule, progress: Mapping[str, Any]) -> Iterator[Iteration]:
    """Yields every iteration of the schedule, in order, from the position in `progress` (the state_dict of
    loop.Progress) to the end of the last cycle.
    """
    number, done = progress["number"], dict(progress["iterations"])
    for cycle in range(progress["cycle"], len(schedule)):
        first = progress["index"] if cycle == progress["cycle"] else 0
        for index in range(first, len(schedule[cycle])):
            roles = schedule[cycle][index]
            yield Iteration(cycle=cycle, index=index, roles=roles, number=number, updates=dict(done))
            number += 1
            for role in roles:
                done[role] = done.get(role, 0) + 1


def _as_json(state: State) -> State:
    """Returns a deep copy of the state, made by encoding it as JSON and decoding it. The copy equals what a checkpoint
    will restore, and later iterations do not change it.
    """
    return json.loads(json.dumps(state))


def _problems(
    iteration: Iteration, found: Mapping[str, Sequence[Rollout]], uncredited: Collection[str]
) -> Iterator[str]:
    """Yields why the rollouts of an iteration cannot be trained on, as the rest of a sentence that begins with the
    iteration. `uncredited`: roles whose loss needs no advantages.
    """
    if set(found) != set(iteration.roles):
        yield (
            f" trains {', '.join(iteration.roles)}, and the recipe returned rollouts of "
            f"{', '.join(found) or 'no role'}: return each role of the iteration, with an empty list where there are "
            "none"
        )
        return
    for role in iteration.roles:
        for place, rollout in enumerate(found[role]):
            if wrong := _fault(rollout, role, role not in uncredited):
                yield f", {role}: rollout {place} (group {rollout.group!r}) {wrong}"


def _fault(rollout: Rollout, role: str, credited: bool) -> str | None:
    """Returns the reason why a rollout cannot be trained on, as the end of a sentence, or None if it can be. Checks
    only conditions that the class Rollout does not check itself.
    """
    length = len(rollout.tokens)
    if rollout.stop is Stop.ABORTED:
        return "was cut off by its engine, and is no answer: a session gives completions that are written to their end"
    if rollout.role != role:
        return f"is of role {rollout.role!r}: make it for the role that it is returned for"
    if credited and rollout.advantages is None:
        return "has no advantages: assign them (algorithms.advantages.assign_advantages) before the iteration ends"
    if credited and not np.isfinite(np.asarray(rollout.advantages)).all():
        return "has advantages that are not finite: look at its rewards"
    if rollout.experts is not None and len(rollout.experts) != length - 1:
        return f"names the experts of {len(rollout.experts)} tokens; an engine tells those of all {length} but the last"
    for label, found in rollout.annotations.items():
        if len(found) and (found.ranges.min() < 0 or found.ranges.max() > length):
            return f"has annotations {label!r} outside its {length} tokens"
    return None
