"""Gives the loop its iterations: collected when they are due or ahead of training, or read from another run's record.

An iteration is collected when at most `max_staleness` iterations before it are not trained yet, so that no token is
written by weights that miss more updates than that. What was collected is in the store until a complete checkpoint
holds it: a killed run collects no iteration twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from megatron_rl.run.metrics import SECONDS, Stopwatch
from megatron_rl.training.iteration import Collected, Iteration, Recipe, RolloutContext, Schedule
from megatron_rl.training.rollouts import measure, without_signal
from megatron_rl.training.store import IterationStore, State
from megatron_rl.types import Prompt, Rollout, Stop

LOOK_S = 0.5  # between two calls of `idle`


class RolloutError(RuntimeError):
    """A recipe returned rollouts that cannot be trained on; the message says what is wrong with which."""


class Reader(Protocol):
    """An endless stream of prompts with a place in it: data.problems.PromptReader."""

    dropped: int  # prompts so far that were too long, and left out

    def take(self, count: int) -> list[Prompt]: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class IterationMaker(Protocol):
    """Makes iterations, or reads them from a record. `make` is called for one iteration at a time, in order."""

    def make(self, iteration: Iteration) -> Collected: ...

    def state(self) -> State:
        """Returns what making rollouts changes, as JSON values: where the readers stand, and what the recipe
        remembers."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        ...


@dataclass(frozen=True)
class ReaderSource:
    """The problems of one iteration: implements iterations.PromptSource over a reader."""

    reader: Reader
    prompts_per_iteration: int

    def take(self, count: int | None = None) -> list[Prompt]:
        return self.reader.take(self.prompts_per_iteration if count is None else count)


@dataclass(frozen=True, kw_only=True)
class _Position:
    """The state that making rollouts changes: the recipe's, and the place of the readers, by role; roles may share a
    reader."""

    recipe: Recipe
    readers: Mapping[str, Reader]

    def state(self) -> State:
        data = {role: reader.state_dict() for role, reader in self.readers.items()}
        return {"recipe": self.recipe.state_dict(), "data": data}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recipe.load_state_dict(state["recipe"])
        for role, reader in self.readers.items():
            reader.load_state_dict(state["data"][role])


@dataclass(frozen=True, kw_only=True)
class RolloutMaker(_Position):
    """Makes iterations with the recipe, on problems from the reader of an iteration's first role and a fresh
    context."""

    context: RolloutContext
    prompts_per_iteration: int
    uncredited: frozenset[str] = frozenset()  # roles whose loss reads no advantages: their rollouts may lack them
    # for iterations collected beside training: their times go with the iteration's first role
    own_watch: Stopwatch | None = None

    def make(self, iteration: Iteration) -> Collected:
        """Returns the recipe's rollouts, and by role their metrics and what the recipe added.

        Raises RolloutError for rollouts that cannot be trained on.
        """
        context = replace(self.context, metrics={}, watch=self.own_watch or self.context.watch)
        reader = self.readers[iteration.role]
        dropped = reader.dropped
        found = self.recipe.rollout(iteration, ReaderSource(reader, self.prompts_per_iteration), context)
        if reader.dropped > dropped:
            context.add_metrics(iteration.role, {"prompts_too_long": float(reader.dropped - dropped)})
        _check_roles(iteration, found)
        rollouts = {role: list(found[role]) for role in iteration.roles}
        for role in iteration.roles:
            _check_rollouts(iteration, role, rollouts[role], credited=role not in self.uncredited)
        metrics = {role: self._figures(role, rollouts[role]) for role in iteration.roles}
        for role, added in context.metrics.items():  # also those of roles that the iteration does not train
            metrics[role] = {**metrics.get(role, {}), **added}
        if self.own_watch is not None:
            metrics[iteration.role].update(self.own_watch.take())
        return Collected(rollouts=rollouts, metrics=metrics)

    def _figures(self, role: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
        metrics = measure(rollouts)
        return metrics if role in self.uncredited else {**metrics, "groups_without_signal": without_signal(rollouts)}


@dataclass(frozen=True, kw_only=True)
class ReplayMaker(_Position):
    """Reads iterations that another run kept. Recipe and readers move to where that run had them after the
    iteration."""

    recorded: IterationStore

    def make(self, iteration: Iteration) -> Collected:
        """Raises what IterationStore.read raises. The record's times are left out: they were another run's."""
        collected, state = self.recorded.read(iteration)
        self.restore(state)
        metrics = {
            role: {name: value for name, value in metrics.items() if not name.startswith(SECONDS)}
            for role, metrics in collected.metrics.items()
        }
        return Collected(rollouts=collected.rollouts, metrics=metrics)


@dataclass(frozen=True)
class _CollectedIteration:
    """An iteration that was collected."""

    iteration: Iteration
    collected: Collected
    state: State  # after it


@dataclass
class _Exchange:
    """The news between the thread that collects and the one that trains. Both hold `change` while they look or
    write."""

    change: threading.Condition = field(default_factory=threading.Condition)
    ready: list[_CollectedIteration] = field(default_factory=list)
    failure: BaseException | None = None
    trained: int = 0  # iterations done since the collector began
    closed: bool = False


class Collector:
    """Gives the loop its iterations, on the driver. `upcoming` yields every iteration from where the run stands, in
    order.

    With `max_staleness` 0 an iteration is collected in the caller's thread when it is due; else a thread collects
    ahead.
    """

    def __init__(
        self, maker: IterationMaker, upcoming: Iterator[Iteration], store: IterationStore, *, max_staleness: int,
        watch: Stopwatch | None = None, idle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`watch` measures how long `take` waits for the thread. `idle` is called now and then meanwhile, so that what
        needs all ranks has its chance."""
        self._maker, self._upcoming, self._store, self._max = maker, upcoming, store, max_staleness
        self._watch, self._idle = watch or Stopwatch(), idle
        self._state = _as_json(maker.state())  # after the last iteration that was taken
        self._exchange = _Exchange()
        self._disk = threading.Lock()  # held while the store reads or writes
        self._thread: threading.Thread | None = None

    def take(self, iteration: Iteration) -> Collected:
        """Returns the rollouts of the iteration that is due.

        Raises what making the rollouts raised, and ValueError when another iteration comes next in the schedule.
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
        """Tells that the iteration taken last is done and its engines have the new weights: one more may be
        collected."""
        with self._exchange.change:
            self._exchange.trained += 1
            self._exchange.change.notify_all()

    def state(self) -> State:
        """Returns what a checkpoint needs: the maker's state after the last iteration taken, whatever was collected
        since."""
        return self._state

    def saved(self, number: int) -> None:
        """Tells that a complete checkpoint holds all iterations before `number`."""
        self._store.drop(number)

    def close(self) -> None:
        """Ends collecting ahead. It waits for an iteration that is being written; one that is still being collected is
        given up."""
        with self._exchange.change:
            self._exchange.closed = True
            self._exchange.change.notify_all()
        with self._disk:
            pass

    def _next(self) -> Iteration:
        iteration = next(self._upcoming, None)
        if iteration is None:
            raise ValueError("an iteration is due after the last one of the schedule")
        return iteration

    def _await(self) -> _CollectedIteration:
        if self._thread is None:  # only now: what came before, like an evaluation at the start, is not disturbed
            self._thread = threading.Thread(target=self._produce, name="rollouts", daemon=True)
            self._thread.start()
        exchange = self._exchange
        while True:
            with exchange.change:
                exchange.change.wait_for(lambda: exchange.ready or exchange.failure, LOOK_S)
                if exchange.ready:
                    return exchange.ready.pop(0)
                if exchange.failure is not None:
                    raise exchange.failure
            self._idle()

    def _produce(self) -> None:
        exchange = self._exchange
        try:
            for offset, iteration in enumerate(self._upcoming):
                with exchange.change:
                    exchange.change.wait_for(lambda at=offset: exchange.closed or at - exchange.trained <= self._max)
                    if exchange.closed:
                        return
                done = self._one(iteration)
                with exchange.change:
                    exchange.ready.append(done)
                    exchange.change.notify_all()
            raise ValueError("an iteration is due after the last one of the schedule")
        except BaseException as error:  # raised where the iteration is taken
            with exchange.change:
                exchange.failure = error
                exchange.change.notify_all()

    def _one(self, iteration: Iteration) -> _CollectedIteration:
        """Makes the rollouts of an iteration, or takes it from the store where a run that was killed left it."""
        with self._disk:
            kept = self._store.get(iteration)
        if kept is not None:
            self._maker.restore(kept[1])
            return _CollectedIteration(iteration, *kept)
        collected = self._maker.make(iteration)
        state = _as_json(self._maker.state())
        with self._disk:
            if not self._exchange.closed:  # a process that ends must not do so in the middle of a write
                self._store.put(iteration, collected, state)
        return _CollectedIteration(iteration, collected, state)


def upcoming(schedule: Schedule, progress: Mapping[str, Any]) -> Iterator[Iteration]:
    """Yields every iteration from a loop's progress (its state_dict) to the last cycle, as the loop asks for them."""
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
    """Returns a copy that later iterations do not change, as a checkpoint will give it back."""
    return json.loads(json.dumps(state))


def _check_roles(iteration: Iteration, found: Mapping[str, Sequence[Rollout]]) -> None:
    if set(found) != set(iteration.roles):
        raise RolloutError(
            f"iteration {iteration.number} trains {', '.join(iteration.roles)}, and the recipe returned rollouts of "
            f"{', '.join(found) or 'no role'}: return each role of the iteration, with an empty list where there are "
            "none"
        )


def _check_rollouts(iteration: Iteration, role: str, rollouts: Sequence[Rollout], *, credited: bool) -> None:
    """Raises RolloutError for the first rollout that no update could train on."""
    for place, rollout in enumerate(rollouts):
        wrong = _fault(rollout, role, credited)
        if wrong is not None:
            raise RolloutError(
                f"iteration {iteration.number}, {role}: rollout {place} (group {rollout.group!r}) {wrong}"
            )


def _fault(rollout: Rollout, role: str, credited: bool) -> str | None:
    """Returns what is wrong with a rollout, as the end of a sentence, beyond what Rollout itself checks."""
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
