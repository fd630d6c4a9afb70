"""Gives the loop its turns: played when they are due or ahead of training, or read from another run's record.

A turn is played when at most `max_staleness` turns before it are not trained yet, so that no token is written by
weights that miss more updates than that. What was played is in the store until a complete checkpoint holds it: a killed
run plays no turn twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from megatron_rl.run.metrics import SECONDS, Stopwatch
from megatron_rl.training.rollouts import measure, without_signal
from megatron_rl.training.store import State, TurnStore
from megatron_rl.training.turns import Played, Recipe, Schedule, Table, Turn
from megatron_rl.types import Prompt, Rollout, Stop

LOOK_S = 0.5  # between two calls of `idle`


class PlayError(RuntimeError):
    """A recipe returned rollouts that cannot be trained on; the message says what is wrong with which."""


class Reader(Protocol):
    """An endless stream of prompts with a place in it: data.problems.PromptReader."""

    dropped: int  # prompts so far that were too long, and left out

    def take(self, count: int) -> list[Prompt]: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TurnMaker(Protocol):
    """Plays turns, or reads them from a record. `play` is called for one turn at a time, in order."""

    def play(self, turn: Turn) -> Played: ...

    def state(self) -> State:
        """Returns what playing changes, as JSON values: where the readers stand, and what the recipe remembers."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        ...


@dataclass(frozen=True)
class ReaderSource:
    """The problems of one turn: implements turns.Source over a reader."""

    reader: Reader
    prompts_per_step: int

    def take(self, count: int | None = None) -> list[Prompt]:
        return self.reader.take(self.prompts_per_step if count is None else count)


@dataclass(frozen=True, kw_only=True)
class _Position:
    """The state that playing changes: the recipe's, and the place of the readers, by role; roles may share a reader."""

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
class TurnPlayer(_Position):
    """Plays turns with the recipe, on problems from the reader of a turn's first role and a table with fresh notes."""

    table: Table
    prompts_per_step: int
    uncredited: frozenset[str] = frozenset()  # roles whose loss reads no advantages: their rollouts may lack them
    own_watch: Stopwatch | None = None  # for turns played beside training: their times go with the turn's first role

    def play(self, turn: Turn) -> Played:
        """Returns the recipe's rollouts, and by role their figures and what the recipe noted.

        Raises PlayError for rollouts that cannot be trained on.
        """
        table = replace(self.table, notes={}, watch=self.own_watch or self.table.watch)
        reader = self.readers[turn.role]
        dropped = reader.dropped
        found = self.recipe.play(turn, ReaderSource(reader, self.prompts_per_step), table)
        if reader.dropped > dropped:
            table.note(turn.role, {"prompts_too_long": float(reader.dropped - dropped)})
        _check_roles(turn, found)
        rollouts = {role: list(found[role]) for role in turn.roles}
        for role in turn.roles:
            _check_rollouts(turn, role, rollouts[role], credited=role not in self.uncredited)
        metrics = {role: self._figures(role, rollouts[role]) for role in turn.roles}
        for role, noted in table.notes.items():  # also those of roles that the turn does not train
            metrics[role] = {**metrics.get(role, {}), **noted}
        if self.own_watch is not None:
            metrics[turn.role].update(self.own_watch.take())
        return Played(rollouts=rollouts, metrics=metrics)

    def _figures(self, role: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
        figures = measure(rollouts)
        return figures if role in self.uncredited else {**figures, "groups_without_signal": without_signal(rollouts)}


@dataclass(frozen=True, kw_only=True)
class ReplayPlayer(_Position):
    """Reads turns that another run kept. Recipe and readers move to where that run had them after the turn."""

    recorded: TurnStore

    def play(self, turn: Turn) -> Played:
        """Raises what TurnStore.read raises. The record's times are left out: they were another run's."""
        played, state = self.recorded.read(turn)
        self.restore(state)
        metrics = {
            role: {name: value for name, value in figures.items() if not name.startswith(SECONDS)}
            for role, figures in played.metrics.items()
        }
        return Played(rollouts=played.rollouts, metrics=metrics)


@dataclass(frozen=True)
class _PlayedTurn:
    """A turn that was played."""

    turn: Turn
    played: Played
    state: State  # after it


@dataclass
class _Exchange:
    """The news between the thread that plays and the one that trains. Both hold `change` while they look or write."""

    change: threading.Condition = field(default_factory=threading.Condition)
    ready: list[_PlayedTurn] = field(default_factory=list)
    failure: BaseException | None = None
    trained: int = 0  # turns done since the player began
    closed: bool = False


class Player:
    """Gives the loop its turns, on the driver. `upcoming` yields every turn from where the run stands, in order.

    With `max_staleness` 0 a turn is played in the caller's thread when it is due; else a thread plays ahead.
    """

    def __init__(
        self, maker: TurnMaker, upcoming: Iterator[Turn], store: TurnStore, *, max_staleness: int,
        watch: Stopwatch | None = None, idle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`watch` measures how long `take` waits for the thread. `idle` is called now and then meanwhile, so that what
        needs all ranks has its chance."""
        self._maker, self._upcoming, self._store, self._max = maker, upcoming, store, max_staleness
        self._watch, self._idle = watch or Stopwatch(), idle
        self._state = _as_json(maker.state())  # after the last turn that was taken
        self._exchange = _Exchange()
        self._disk = threading.Lock()  # held while the store reads or writes
        self._thread: threading.Thread | None = None

    def take(self, turn: Turn) -> Played:
        """Returns the rollouts of the turn that is due.

        Raises what playing raised, and ValueError when another turn comes next in the schedule.
        """
        if self._max > 0:
            with self._watch("wait"):
                done = self._await()
        else:
            done = self._one(self._next())
        if done.turn != turn:
            raise ValueError(
                f"{turn} is due, and {done.turn} was played: "
                "the recipe's schedule is not a function of its arguments alone"
            )
        self._state = done.state
        return done.played

    def trained(self) -> None:
        """Tells that the turn taken last is done and its engines have the new weights: one more may be played."""
        with self._exchange.change:
            self._exchange.trained += 1
            self._exchange.change.notify_all()

    def state(self) -> State:
        """Returns what a checkpoint needs: the maker's state after the last turn taken, whatever was played since."""
        return self._state

    def saved(self, number: int) -> None:
        """Tells that a complete checkpoint holds all turns before `number`."""
        self._store.drop(number)

    def close(self) -> None:
        """Ends playing ahead. It waits for a turn that is being written; one that is still being played is given up."""
        with self._exchange.change:
            self._exchange.closed = True
            self._exchange.change.notify_all()
        with self._disk:
            pass

    def _next(self) -> Turn:
        turn = next(self._upcoming, None)
        if turn is None:
            raise ValueError("a turn is due after the last one of the schedule")
        return turn

    def _await(self) -> _PlayedTurn:
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
            for offset, turn in enumerate(self._upcoming):
                with exchange.change:
                    exchange.change.wait_for(lambda at=offset: exchange.closed or at - exchange.trained <= self._max)
                    if exchange.closed:
                        return
                done = self._one(turn)
                with exchange.change:
                    exchange.ready.append(done)
                    exchange.change.notify_all()
            raise ValueError("a turn is due after the last one of the schedule")
        except BaseException as error:  # raised where the turn is taken
            with exchange.change:
                exchange.failure = error
                exchange.change.notify_all()

    def _one(self, turn: Turn) -> _PlayedTurn:
        """Plays a turn, or takes it from the store where a run that was killed left it."""
        with self._disk:
            kept = self._store.get(turn)
        if kept is not None:
            self._maker.restore(kept[1])
            return _PlayedTurn(turn, *kept)
        played = self._maker.play(turn)
        state = _as_json(self._maker.state())
        with self._disk:
            if not self._exchange.closed:  # a process that ends must not do so in the middle of a write
                self._store.put(turn, played, state)
        return _PlayedTurn(turn, played, state)


def upcoming(schedule: Schedule, progress: Mapping[str, Any]) -> Iterator[Turn]:
    """Yields every turn from a loop's progress (its state_dict) to the last step, as the loop asks for them."""
    number, done = progress["number"], dict(progress["turns"])
    for step in range(progress["step"], len(schedule)):
        first = progress["index"] if step == progress["step"] else 0
        for index in range(first, len(schedule[step])):
            roles = schedule[step][index]
            yield Turn(step=step, index=index, roles=roles, number=number, updates=dict(done))
            number += 1
            for role in roles:
                done[role] = done.get(role, 0) + 1


def _as_json(state: State) -> State:
    """Returns a copy that later play does not change, as a checkpoint will give it back."""
    return json.loads(json.dumps(state))


def _check_roles(turn: Turn, found: Mapping[str, Sequence[Rollout]]) -> None:
    if set(found) != set(turn.roles):
        raise PlayError(
            f"turn {turn.number} trains {', '.join(turn.roles)}, and the recipe returned rollouts of "
            f"{', '.join(found) or 'no role'}: return each role of the turn, with an empty list where there are none"
        )


def _check_rollouts(turn: Turn, role: str, rollouts: Sequence[Rollout], *, credited: bool) -> None:
    """Raises PlayError for the first rollout that no update could train on."""
    for place, rollout in enumerate(rollouts):
        wrong = _fault(rollout, role, credited)
        if wrong is not None:
            raise PlayError(f"turn {turn.number}, {role}: rollout {place} (group {rollout.group!r}) {wrong}")


def _fault(rollout: Rollout, role: str, credited: bool) -> str | None:
    """Returns what is wrong with a rollout, as the end of a sentence, beyond what Rollout itself checks."""
    length = len(rollout.tokens)
    if rollout.stop is Stop.ABORTED:
        return "was cut off by its engine, and is no answer: a session gives completions that are written to their end"
    if rollout.role != role:
        return f"is of role {rollout.role!r}: make it for the role that it is returned for"
    if credited and rollout.advantages is None:
        return "has no advantages: assign them (algorithms.advantages.assign_advantages) before the turn ends"
    if credited and not np.isfinite(np.asarray(rollout.advantages)).all():
        return "has advantages that are not finite: look at its rewards"
    if rollout.experts is not None and len(rollout.experts) != length - 1:
        return f"names the experts of {len(rollout.experts)} tokens; an engine tells those of all {length} but the last"
    for label, marks in rollout.marks.items():
        if len(marks) and (marks.ranges.min() < 0 or marks.ranges.max() > length):
            return f"has marks {label!r} outside its {length} tokens"
    return None
