"""Provides the rollouts of each iteration to the training loop. Rollouts are generated on demand, generated ahead of
training, or read from the record of another run.

The rollouts of an iteration are generated when at most `max_staleness` earlier iterations are still untrained. So the
weights that generate a token are at most `max_staleness` updates old. All iterations that may begin are generated at
once: the engines do not idle while the last long rollouts of an iteration are finished. No rollout is discarded.
Generated iterations stay on disk until a checkpoint that is completely written covers them, so a run that is killed and
resumed does not generate an iteration twice.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron_rl.data.mixed_sources import MixedReader
from megatron_rl.data.problems import ANY, Draw, PromptReader
from megatron_rl.lib.timing import named_range
from megatron_rl.run.metrics import SECONDS, Stopwatch
from megatron_rl.training.credit import CreditStage, RolloutError, as_json
from megatron_rl.training.iteration import Collected, Iteration, Recipe, RolloutContext, Schedule
from megatron_rl.training.iteration_engines import CutOffCounter, GradeTurns, IterationEngine, OpenSessions
from megatron_rl.training.store import IterationStore, State
from megatron_rl.training.write_ahead import WriteAhead
from megatron_rl.types import CUT_OFF, Prompt

UNSERVED_S = 10.0  # an evaluation is cancelled after this many seconds without an engine that has its weights
LOOK_S = 0.5  # seconds between two calls of the `idle` callback while the training thread waits for rollouts
T = TypeVar("T")
Turn = Callable[[], AbstractContextManager[None]]  # see IterationMaker.make


class ReaderSource:
    """The source of the problems of one iteration: implements iteration.PromptSource with a prompt reader.

    `turn`: returns a context manager. The first call of `take` reads from the prompt reader inside this context
    manager, because other iterations use the same reader. Later calls of `take` read the data set in a separate random
    order, which depends on `name`. If `turn` is None, all calls of `take` read from the reader. `draw`: weights of the
    sources and maximum prompt length of the iteration.
    """

    def __init__(
        self, reader: PromptReader | MixedReader, prompts_per_iteration: int, *, turn: Turn | None = None,
        name: str = "", draw: Draw = ANY,
    ) -> None:  # fmt: skip
        self.prompts_per_iteration, self.dropped = prompts_per_iteration, 0  # dropped: number of too long prompts
        self._reader, self._turn, self._name, self._draw = reader, turn, name, draw
        self._first: list[Prompt] | None = None  # result of the first call of `take`; None before that call
        self._state: Mapping[str, Any] = {}  # the reader's position after the first `take`

    def take(self, count: int | None = None, fits: Callable[[Prompt], bool] = lambda prompt: True) -> list[Prompt]:
        count = self.prompts_per_iteration if count is None else count
        if self._first is not None:
            if self._turn is not None:
                self._reader, self._turn = self._reader.beside(self._name, self._first, self._state), None
            return self._read(count, fits)
        with contextlib.nullcontext() if self._turn is None else self._turn():
            self._first, self._state = self._read(count, fits), self._reader.state_dict()
        return list(self._first)

    def _read(self, count: int, fits: Callable[[Prompt], bool]) -> list[Prompt]:
        before = self._reader.dropped
        found = self._reader.take(count, fits, self._draw)
        self.dropped += self._reader.dropped - before
        return found


@dataclass(frozen=True, kw_only=True)
class IterationMaker(ABC):
    """Generates the rollouts of iterations, or reads them from the record of another run. Holds each role's prompt
    reader. Roles may share a reader.
    """

    readers: Mapping[str, PromptReader | MixedReader]

    @abstractmethod
    def make(
        self, iteration: Iteration, recipe_state: State, turn: Turn = contextlib.nullcontext
    ) -> tuple[Collected, State | None]:
        """Returns (rollouts and metrics of an iteration, positions of the prompt readers after the iteration). The
        positions are None if the rollouts were generated, and the recorded positions if the rollouts were read from the
        record of another run. Several threads may call `make` at once, each for a different iteration.

        `recipe_state`: the recipe's state with which rollouts are generated.
        `turn`: returns a context manager that waits until all earlier iterations have used the prompt readers. When its
            block ends for the first time, the readers' positions are recorded as the positions after the iteration.
        """

    def positions(self) -> State:
        """Returns the positions of the prompt readers by role, as JSON values."""
        return as_json({role: reader.state_dict() for role, reader in self.readers.items()})

    def restore(self, positions: Mapping[str, Any]) -> None:
        """Restores positions returned by `positions`."""
        for role, reader in self.readers.items():
            reader.load_state_dict(positions[role])

    def close(self) -> None:
        """Cancels the calls of `make` that are in progress, which then raise an error. A no-op in this base class."""
        return None


@dataclass(frozen=True, kw_only=True)
class RolloutMaker(IterationMaker):
    """Uses the recipe to generate the rollouts of each iteration. Each iteration gets a new RolloutContext, and takes
    its problems from the prompt reader of the first role that the iteration trains.

    `max_staleness`: number of iterations that may be generated while an earlier iteration is not trained yet. If above
        0, each iteration uses a copy of the recipe and a separate stopwatch, whose times are logged with the metrics of
        the iteration's first role. Engines and the grader then serve earlier iterations first.
    """

    recipe: Recipe
    context: RolloutContext
    prompts_per_iteration: int
    draw: Draw = ANY  # weights of sources and maximum length of prompts
    max_staleness: int = 0
    sessions: OpenSessions = field(default_factory=OpenSessions)  # open sessions with engines
    turns: GradeTurns | None = None  # grader that serves earlier iterations first; None: use `context.grade`
    # function (number of an iteration) -> RolloutMaker with the settings of the iteration's stage; None: this object
    # generates all iterations
    at: Callable[[int], RolloutMaker] | None = None
    ahead: WriteAhead | None = None  # stores finished samples and gradings in files; None: they are not stored
    # called with (iteration, role, begin, end) when an engine has generated, see TimedSession
    generated: Callable[[int, str, float, float], None] | None = None

    def __post_init__(self) -> None:
        if self.max_staleness:  # copy, because the credit stage changes its recipe while threads copy this recipe
            object.__setattr__(self, "recipe", copy.deepcopy(self.recipe))

    def make(
        self, iteration: Iteration, recipe_state: State, turn: Turn = contextlib.nullcontext
    ) -> tuple[Collected, None]:
        """Returns the rollouts of an iteration, without advantages, and the metrics that the recipe added.

        Raises RolloutError if the recipe changes its state.
        """
        if self.at is not None:
            return self.at(iteration.number).make(iteration, recipe_state, turn)
        recipe, context, reader = self.recipe, self.context, self.readers[iteration.role]
        priority = iteration.number + 1 if self.max_staleness else 0
        grade = context.grade if self.turns is None else self.turns.at(priority)
        context = replace(context, metrics={}, handed_over={}, grade=grade)
        log = None if self.ahead is None else self.ahead.open(iteration.number)
        if log is not None:
            context = replace(context, grade=log.grader(context.grade))
        own = {
            role: IterationEngine(
                engine, priority, self.sessions, log and log.samples(role),
                self.generated and functools.partial(self.generated, iteration.number, role),
            )
            for role, engine in context.engines.items()
        }  # fmt: skip
        cut_offs = CutOffCounter(context.grade)
        context = replace(context, engines=own, grade=cut_offs)
        source = ReaderSource(reader, self.prompts_per_iteration, draw=self.draw)
        if self.max_staleness:
            recipe = copy.deepcopy(recipe)
            context = replace(context, watch=Stopwatch(context.watch.beat))
            name = f"iteration {iteration.number}"
            source = ReaderSource(reader, self.prompts_per_iteration, turn=turn, name=name, draw=self.draw)
        recipe.load_state_dict(recipe_state)
        before = as_json(recipe.state_dict())  # not `recipe_state`, because the recipe may ignore parts of it
        found = recipe.rollout(iteration, source, context)
        with turn():
            pass  # if the recipe took no problem, the turn of this iteration ends here
        if as_json(recipe.state_dict()) != before:
            raise RolloutError(
                f"iteration {iteration.number}: the recipe changed its state in the method rollout: change it in "
                "credit, which is called for the iterations in order (context.handed_over takes values there)"
            )
        if source.dropped:
            context.add_metrics(iteration.role, {"prompts_too_long": float(source.dropped)})
        if cut_offs.count:
            context.add_metrics(iteration.role, {f"graded/{CUT_OFF}": float(cut_offs.count)})
        if self.max_staleness:
            context.add_metrics(iteration.role, context.watch.take())
        rollouts = {role: list(own) for role, own in found.items()}
        return Collected(rollouts=rollouts, metrics=context.metrics, handed_over=as_json(context.handed_over)), None

    def close(self) -> None:
        self.sessions.close()
        if self.turns is not None:
            self.turns.close()


@dataclass(frozen=True, kw_only=True)
class ReplayMaker(IterationMaker):
    """Reads the iterations that another run recorded, instead of generating rollouts."""

    recorded: IterationStore

    def make(
        self, iteration: Iteration, recipe_state: State, turn: Turn = contextlib.nullcontext
    ) -> tuple[Collected, State]:
        """Returns the recorded iteration without its timings, which belong to the other run, and the positions of the
        other run's prompt readers after the iteration.

        Raises FileNotFoundError if the other run has no file of the iteration, and StoreError if the file is damaged or
        the iteration trained other roles.
        """
        collected, positions = self.recorded.read(iteration)
        metrics = {
            role: {name: value for name, value in metrics.items() if not name.startswith(SECONDS)}
            for role, metrics in collected.metrics.items()
        }
        return replace(collected, metrics=metrics), positions


@dataclass(frozen=True)
class _CollectedIteration:
    """The rollouts of an iteration, and the state of the recipe and the prompt readers after the iteration."""

    collected: Collected
    state: State


class CollectorClosed(RuntimeError):
    """Raised in a thread that generates the rollouts of an iteration, if the collector is closed before the rollouts
    are complete.
    """


class _Order:
    """A lock for threads that generate one iteration each. The threads acquire the lock in the order of the iterations,
    whatever the timing, for example to take problems from a shared prompt reader.
    """

    def __init__(self) -> None:
        self._change, self._next, self._closed = threading.Condition(), 0, False

    @contextlib.contextmanager
    def turn(self, place: int) -> Iterator[None]:
        """Context manager whose block runs after the blocks of all earlier iterations have ended. `place`: number of
        iterations that were begun before this iteration. If the block raises an error, the threads of later iterations
        wait until `close`, because their rollouts cannot be used. Raises CollectorClosed after `close`.
        """
        with self._change:
            self._change.wait_for(lambda: self._next >= place or self._closed)
            if self._closed:
                raise CollectorClosed
        yield
        with self._change:
            self._next = max(self._next, place + 1)
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


class Collector:
    """Provides the rollouts of each iteration to the training loop, on the driver (rank 0). `upcoming` yields every
    iteration in order, beginning at the run's current position.

    If `max_staleness` is 0, the rollouts of an iteration are generated in the caller's thread when the iteration is
    due. Otherwise max_staleness + 1 iterations are generated at once, each in a separate thread. Three things happen
    in the order of the iterations, whatever the timing: an iteration takes its first problems, is credited (its
    advantages are computed), and is written to disk. An iteration is credited in its thread, unless the recipe needs
    scores from the trainer.
    """

    def __init__(
        self, maker: IterationMaker, credit: CreditStage, upcoming: Iterator[Iteration], store: IterationStore, *,
        max_staleness: int, watch: Stopwatch | None = None, idle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Creates a collector.

        `credit`: the credit stage, with the recipe's states at the run's current position.
        `watch`: measures how long `take` waits for the other threads.
        `idle`: callback that `take` calls about every LOOK_S seconds while it waits, for work that involves all ranks.
        """
        self._maker, self._credit, self._upcoming, self._store = maker, credit, upcoming, store
        self._max, self._watch, self._idle = max_staleness, watch or Stopwatch(), idle
        # state of the recipe and the prompt readers after the last iteration that `take` returned
        self._state = {"recipe": credit.states, "data": maker.positions()}
        self._taken: Collected | None = None  # the iteration that `take` returned last
        # numbers of iterations begun and trained since the collector started
        self._begun, self._trained = 0, 0
        # iterations that are begun and that `take` has not returned yet
        self._flights: deque[tuple[Iteration, Future[_CollectedIteration]]] = deque()
        self._takes, self._credits = _Order(), _Order()
        self._sessions = OpenSessions()  # engine sessions of an evaluation that runs beside training
        self._disk = threading.Lock()  # lock that is held while the store reads or writes files
        self._closed = False

    @named_range("rollouts")
    def take(self, iteration: Iteration, meanwhile: Callable[[], None] = lambda: None) -> Collected:
        """Returns the rollouts of the iteration that is due, and waits for them if necessary. If the rollouts have no
        advantages yet (see CreditStage.after_scores), call `credit` with the scored rollouts. `meanwhile`: called every
        LOOK_S seconds while it waits.

        Raises any error that occurred while the rollouts were generated, and ValueError if `iteration` is not the next
        one of the schedule.
        """
        if self._max:
            self._begin()
        else:
            self._begin_one()
        if not self._flights:
            raise ValueError(f"{iteration} is due, but the schedule has no further iteration")
        begun, done = self._flights[0]  # removed when it is written, see wait_until_written
        if begun != iteration:
            raise ValueError(
                f"{iteration} is due, but rollouts were collected for {begun}: "
                "the recipe's `schedule` must depend only on the recipe's arguments"
            )
        with self._watch("wait") if self._max else contextlib.nullcontext():
            while not wait([done], LOOK_S).done:
                self._idle()
                meanwhile()
        self._flights.popleft()
        self._state, self._taken = done.result().state, done.result().collected
        return self._taken

    def wait_until_written(self, number: int) -> None:
        """Waits until the rollouts of all iterations with indices up to `number` are written and stored, if they have
        begun. Raises any error that occurred while they were generated.
        """
        for iteration, done in [*self._flights]:
            if iteration.number <= number:
                while not wait([done], LOOK_S).done:
                    self._idle()
                done.result()

    def credit(self, iteration: Iteration, scored: Collected) -> Collected:
        """Computes the advantages of the iteration last returned by `take`. The rollouts in `scored` have the scores
        that the recipe requests. Returns the rollouts to train on, and their metrics.

        The stored file of an iteration that is kept permanently is replaced, so that it shows the advantages of the
        rollouts. Raises RolloutError if the rollouts cannot be trained on.
        """
        credited = self._credit.apply(iteration, scored)
        self._state = {**self._state, "recipe": self._credit.states}
        if self._store.keeps(iteration.number):
            assert self._taken is not None, "`take` returned the iteration"
            with self._disk:
                self._store.put(iteration, self._taken, self._state["data"], credited=credited)
        return credited

    def beside(
        self, context: RolloutContext, number: int, evaluate: Callable[[RolloutContext], T], served: Callable[[], bool]
    ) -> Callable[[], T | None]:  # fmt: skip
        """Calls `evaluate` in a new thread, while rollouts are generated and policies are updated. Returns a function
        that waits until the evaluation is complete and returns its result. The function cancels the evaluation and
        returns None if some role had no engine with the evaluated weights for UNSERVED_S seconds. Waiting longer would
        not help, because the trainer has newer weights and cannot send the evaluated weights again.

        `context`: the context for `evaluate`. `number`: number of an iteration. Engines serve the requests of the
            evaluation after the requests that this iteration has sent already, and before those of later iterations.
        `served`: returns whether each role has an engine with the evaluated weights.
        """
        done, priority, sessions = Future[T](), number + 1, OpenSessions()
        self._sessions = sessions
        engines = {name: IterationEngine(one, priority, sessions) for name, one in context.engines.items()}
        own = replace(context, engines=engines, metrics={}, watch=Stopwatch(context.watch.beat))

        @functools.cache
        def result() -> T | None:
            seen = time.monotonic()  # last time at which every role had an engine with the evaluated weights
            while not wait([done], LOOK_S).done:
                seen = time.monotonic() if served() else seen
                if time.monotonic() - seen > UNSERVED_S:
                    sessions.close()
                    return None
            for name, seconds in own.watch.take().items():
                self._watch.add(name.removeprefix(SECONDS), seconds)
            return done.result()

        def run() -> None:
            try:
                done.set_result(evaluate(own))
            except BaseException as error:  # the function `result` raises this error when it is called
                done.set_exception(error)

        threading.Thread(target=run, name=f"evaluation {number}", daemon=True).start()
        return result

    def trained(self) -> None:
        """Reports that the iteration last returned by `take` has been trained and the engines have the new weights, so
        that the rollouts of one more iteration may be generated.
        """
        self._trained += 1
        if self._max:
            self._begin()

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
        """Cancels the iterations that are still being generated. If an iteration is being written to disk, waits until
        the file is complete.
        """
        self._closed = True
        self._sessions.close()
        self._takes.close()
        self._credits.close()
        self._maker.close()
        with self._disk:
            pass

    def _begin(self) -> None:
        """Begins every iteration that may begin now, each in a new thread. The first call is at the first `take`, so
        that the evaluation at the start of the run is not disturbed.
        """
        while self._begun - self._trained <= self._max and not self._closed and self._begin_one():
            pass

    def _begin_one(self) -> bool:
        """Begins the next iteration: generates its rollouts, in a new thread if they are generated ahead of training.
        Returns False if there are no more iterations.
        """
        iteration = next(self._upcoming, None)
        if iteration is None:
            return False
        done, place = Future[_CollectedIteration](), self._begun

        def collect() -> None:
            try:
                done.set_result(self._collect(iteration, place))
            except BaseException as error:  # `take` raises the error again
                done.set_exception(error)

        self._begun += 1
        self._flights.append((iteration, done))
        if self._max:
            threading.Thread(target=collect, name=f"rollouts {iteration.number}", daemon=True).start()
        else:
            collect()
        return True

    def _collect(self, iteration: Iteration, place: int) -> _CollectedIteration:
        """Returns an iteration with its rollouts: read from the store if a previous, killed process of the run stored
        the iteration, otherwise newly generated. `place`: number of iterations begun before this iteration.
        """
        positions: State = {}

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            with self._takes.turn(place):
                yield
                positions.update({} if positions else self._maker.positions())

        with self._disk:
            kept = self._store.get(iteration)
        made, recorded = kept or self._maker.make(iteration, self._credit.state_for(iteration.number), turn)
        if recorded is not None:  # by another process or run
            with turn():
                self._maker.restore(recorded)
        with self._credits.turn(place):
            credited = None if self._credit.after_scores else self._credit.apply(iteration, made)
            state = {"recipe": self._credit.states, "data": positions}
            with self._disk:
                # `close` waits for this lock, so the process does not exit before the file is complete
                if kept is None and not self._closed:
                    self._store.put(iteration, made, positions, credited=credited)
        return _CollectedIteration(made if credited is None else credited, state)


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
