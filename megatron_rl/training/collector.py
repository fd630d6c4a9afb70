"""Provides the rollouts of each iteration to the training loop. Rollouts are generated on demand, generated ahead of
training, or read from the record of another run.

The rollouts of an iteration are generated when at most `max_staleness` earlier iterations are still untrained. So the
weights that generate a token are at most `max_staleness` updates old. Generated iterations stay on disk until a
checkpoint that is completely written covers them, so a run that is killed and resumed does not generate an iteration
twice.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.data.problems import PromptReader
from megatron_rl.run.metrics import SECONDS, Stopwatch
from megatron_rl.training.credit import CreditStage, RolloutError, as_json
from megatron_rl.training.iteration import Collected, Iteration, Recipe, RolloutContext, Schedule
from megatron_rl.training.store import IterationStore, State
from megatron_rl.types import Prompt, Rollout

LOOK_S = 0.5  # seconds between two calls of the `idle` callback while the training thread waits for rollouts


@dataclass(frozen=True)
class ReaderSource:
    """The source of the problems of one iteration: implements iteration.PromptSource with a prompt reader."""

    reader: PromptReader
    prompts_per_iteration: int

    def take(self, count: int | None = None) -> list[Prompt]:
        return self.reader.take(self.prompts_per_iteration if count is None else count)


@dataclass(frozen=True, kw_only=True)
class IterationMaker(ABC):
    """Generates the rollouts of iterations, or reads them from the record of another run. Holds each role's prompt
    reader. Roles may share a reader.
    """

    readers: Mapping[str, PromptReader]

    @abstractmethod
    def make(self, iteration: Iteration, recipe_state: State) -> tuple[Collected, State | None]:
        """Returns the rollouts and metrics of an iteration, and the recorded state after the iteration; None instead of
        the state if the rollouts were generated. Called for one iteration at a time, in order.

        `recipe_state`: the recipe's state with which rollouts are generated.
        """

    def positions(self) -> State:
        """Returns the positions of the prompt readers by role, as JSON values."""
        return as_json({role: reader.state_dict() for role, reader in self.readers.items()})

    def restore(self, positions: Mapping[str, Any]) -> None:
        """Restores positions returned by `positions`."""
        for role, reader in self.readers.items():
            reader.load_state_dict(positions[role])


@dataclass(frozen=True, kw_only=True)
class RolloutMaker(IterationMaker):
    """Uses the recipe to generate the rollouts of each iteration. Each iteration gets a new RolloutContext, and takes
    its problems from the prompt reader of the first role that the iteration trains.

    `recipe`: if rollouts.max_staleness is above 0, this must not be the same instance as the recipe of the credit
        stage, because both are used concurrently.
    """

    recipe: Recipe
    context: RolloutContext
    prompts_per_iteration: int
    # Stopwatch for rollouts that are generated while another iteration trains; None: the stopwatch of the context.
    # Its times are logged with the metrics of the iteration's first role.
    own_watch: Stopwatch | None = None

    def make(self, iteration: Iteration, recipe_state: State) -> tuple[Collected, None]:
        """Returns the rollouts of an iteration, without advantages, and the metrics that the recipe added.

        Raises RolloutError if the recipe changes its state.
        """
        self.recipe.load_state_dict(recipe_state)
        context = replace(self.context, metrics={}, handed_over={}, watch=self.own_watch or self.context.watch)
        reader = self.readers[iteration.role]
        dropped = reader.dropped
        found = self.recipe.rollout(iteration, ReaderSource(reader, self.prompts_per_iteration), context)
        if as_json(self.recipe.state_dict()) != recipe_state:
            raise RolloutError(
                f"iteration {iteration.number}: the recipe changed its state in the method rollout: change it in "
                "credit, which is called for the iterations in order (context.handed_over takes values there)"
            )
        if reader.dropped > dropped:
            context.add_metrics(iteration.role, {"prompts_too_long": float(reader.dropped - dropped)})
        if self.own_watch is not None:
            context.add_metrics(iteration.role, self.own_watch.take())
        rollouts = {role: list(own) for role, own in found.items()}
        return Collected(rollouts=rollouts, metrics=context.metrics, handed_over=as_json(context.handed_over)), None


@dataclass(frozen=True, kw_only=True)
class ReplayMaker(IterationMaker):
    """Reads the iterations that another run recorded, instead of generating rollouts."""

    recorded: IterationStore

    def make(self, iteration: Iteration, recipe_state: State) -> tuple[Collected, State]:
        """Returns the recorded iteration without its timings, which belong to the other run, and the state that the
        other run had after the iteration.

        Raises FileNotFoundError if the other run has no file of the iteration, and StoreError if the file is damaged or
        the iteration trained other roles.
        """
        collected, state = self.recorded.read(iteration)
        metrics = {
            role: {name: value for name, value in metrics.items() if not name.startswith(SECONDS)}
            for role, metrics in collected.metrics.items()
        }
        return replace(collected, metrics=metrics), state


@dataclass(frozen=True)
class _CollectedIteration:
    """An iteration with its rollouts, and the state (recipe and prompt readers) after it."""

    iteration: Iteration
    collected: Collected
    state: State


class Collector:
    """Provides the rollouts of each iteration to the training loop, on the driver (rank 0). `upcoming` yields every
    iteration in order, beginning at the run's current position.

    If `max_staleness` is 0, the rollouts of an iteration are generated in the caller's thread when the iteration is
    due. Otherwise a background thread generates rollouts of later iterations ahead. An iteration is credited in the
    same thread, unless its credit needs scores of the trainer.
    """

    def __init__(
        self, maker: IterationMaker, credit: CreditStage, upcoming: Iterator[Iteration], store: IterationStore, *,
        max_staleness: int, watch: Stopwatch | None = None, idle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Creates a collector.

        `credit`: the credit stage, with the recipe's states at the run's current position.
        `watch`: measures how long `take` waits for the background thread.
        `idle`: callback that `take` calls about every LOOK_S seconds while it waits, for work that involves all ranks.
        """
        self._maker, self._credit, self._upcoming, self._store = maker, credit, upcoming, store
        self._max, self._watch, self._idle = max_staleness, watch or Stopwatch(), idle
        # state of the recipe and the prompt readers after the last iteration that `take` returned
        self._state = self._state_now()
        # Both threads hold the lock `_change` while they read or write the next four attributes.
        self._change = threading.Condition()
        self._ready: list[_CollectedIteration] = []
        self._failure: BaseException | None = None
        self._trained, self._closed = 0, False  # number of iterations trained since the collector started
        self._disk = threading.Lock()  # lock that is held while the store reads or writes files
        self._thread: threading.Thread | None = None

    def take(self, iteration: Iteration) -> Collected:
        """Returns the rollouts of the iteration that is due, and waits for them if necessary. If they are not credited
        yet (see CreditStage.after_scores), call `credit` with the scored rollouts.

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

    def credit(self, iteration: Iteration, scored: Collected) -> Collected:
        """Credits the iteration last returned by `take`, whose rollouts now have the scores that the recipe requests.
        Returns the rollouts to train on, and their metrics.

        The stored file of an iteration that is kept permanently is replaced, so that it has the advantages of the
        rollouts. A later process credits the iteration again. Raises RolloutError if the rollouts cannot be trained on.
        """
        credited = self._credit.apply(iteration, scored)
        self._state = {**self._state, "recipe": self._credit.states}
        if self._store.keeps(iteration.number):
            # Only the roles that generated rollouts: a critic is trained on the rollouts of another role. While the
            # critic warms up, only the critic has rollouts to train on.
            shown = {role: _with_credit(own, credited.rollouts.get(role, ())) for role, own in scored.rollouts.items()}
            with self._disk:
                self._store.put(iteration, replace(credited, rollouts=shown, metrics=scored.metrics), self._state)
        return credited

    def trained(self) -> None:
        """Reports that the iteration last returned by `take` has been trained and the engines have the new weights, so
        that the rollouts of one more iteration may be generated.
        """
        with self._change:
            self._trained += 1
            self._change.notify_all()

    def state(self) -> State:
        """Returns the state for a checkpoint: the recipe's states (see CreditStage.states) and the positions of the
        prompt readers after the iteration last returned by `take`, regardless of iterations generated ahead.
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
        collected, state = kept or self._maker.make(iteration, self._credit.state_for(iteration.number))
        if state is not None:  # recorded by another process or run
            self._maker.restore(state["data"])
        if self._credit.after_scores:
            collected = replace(collected, credited=False)  # also if another process has credited the iteration
        elif state is not None and collected.credited:
            self._credit.restore(state["recipe"], iteration.number + 1)
        else:
            collected = self._credit.apply(iteration, collected)
        state = self._state_now()
        with self._disk:
            # a write that has begun holds the lock, so the process does not exit in the middle of it
            if kept is None and not self._closed:
                self._store.put(iteration, collected, state)
        return _CollectedIteration(iteration, collected, state)

    def _state_now(self) -> State:
        return {"recipe": self._credit.states, "data": self._maker.positions()}


def _with_credit(rollouts: Sequence[Rollout], credited: Sequence[Rollout]) -> list[Rollout]:
    """Returns the credited rollouts if they are the same texts in the same order, otherwise `rollouts`: the credit of a
    later process needs all of them.
    """
    same = len(rollouts) == len(credited) and all(
        one.tokens is two.tokens for one, two in zip(rollouts, credited, strict=True)
    )
    return list(credited if same else rollouts)


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
