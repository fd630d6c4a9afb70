"""Rollouts ahead of training: the turns to come are played while one is trained on, and none is played twice when a run is killed.

A turn is played when at most `max_staleness` turns before it are not trained yet, so that no token is written by weights that miss more
updates than that; 0 plays each turn when it is due, in the caller's thread. What was played is kept on disk until it is in a checkpoint.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.run.checkpoint import write_text
from megatron_rl.training.rollouts import trajectories_from_jsonl, trajectories_to_jsonl
from megatron_rl.training.turns import Played, Turn

LOOK_S = 0.5  # between two calls of `idle`
State = dict[str, Any]  # JSON values


class Game(Protocol):
    """What plays turns. `play` is called for one turn after the other, never for two at once."""

    def play(self, turn: Turn) -> Played: ...

    def state(self) -> State:
        """What playing changes: where the readers stand, and what the recipe remembers."""
        ...

    def restore(self, state: State) -> None: ...


@dataclass(frozen=True)
class _Done:
    """A turn that was played."""

    turn: Turn
    played: Played
    state: State  # after it


class Shelf:
    """Played turns in a directory: turn_000012.jsonl each. `fingerprint`: of the settings they were played under; others are not read."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self._directory, self._fingerprint = directory, fingerprint

    def put(self, turn: Turn, played: Played, state: State) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        head = {"fingerprint": self._fingerprint, "role": turn.role, "metrics": played.metrics, "state": state}
        write_text(self._path(turn.number), json.dumps(head) + "\n" + trajectories_to_jsonl(played.trajectories))

    def get(self, turn: Turn) -> tuple[Played, State] | None:
        """None when there is none, or one of other settings."""
        path = self._path(turn.number)
        if not path.is_file():
            return None
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        head = json.loads(first)
        if (head["fingerprint"], head["role"]) != (self._fingerprint, turn.role):
            return None
        return Played(trajectories=trajectories_from_jsonl(rest), metrics=head["metrics"]), head["state"]

    def drop(self, before: int) -> None:
        """Turns with a smaller number are in a checkpoint."""
        for path in self._directory.glob("turn_*.jsonl"):
            if int(path.stem.removeprefix("turn_")) < before:
                path.unlink()

    def _path(self, number: int) -> Path:
        return self._directory / f"turn_{number:06d}.jsonl"


class Ahead:
    """Gives the loop its turns. Lives on the driver. `upcoming`: every turn from where the run stands, in order."""

    def __init__(
        self, game: Game, upcoming: Iterator[Turn], *, max_staleness: int, shelf: Shelf, idle: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """`idle` is called now and then while `take` waits for another thread's rollouts: what needs all ranks has its chance then."""
        self._game, self._upcoming, self._shelf, self._max, self._idle = game, upcoming, shelf, max_staleness, idle
        self._trained = 0  # turns done since then
        self._state = game.state()  # after the last turn that was taken
        self._ready: list[_Done] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def beside(self) -> bool:
        """Whether turns are played in a thread of their own."""
        return self._max > 0

    def take(self, turn: Turn) -> Played:
        """The rollouts of the turn that is due. Raises what playing raised."""
        done = self._await() if self.beside else self._one(next(self._upcoming))
        if done.turn != turn:
            raise ValueError(
                f"{turn} is due, and {done.turn} was played: the recipe's turns are not a function of the step alone"
            )
        self._state = done.state
        return done.played

    def trained(self) -> None:
        """The turn that was taken is done, its engine has the new weights: one more may be played."""
        with self._change:
            self._trained += 1
            self._change.notify_all()

    def state(self) -> State:
        """For a checkpoint: as it was after the last turn taken, whatever was played since."""
        return self._state

    def saved(self, number: int) -> None:
        """A checkpoint has all turns before `number`."""
        self._shelf.drop(number)

    def close(self) -> None:
        """Leaves the turn that is being played, at the latest when it is played."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _await(self) -> _Done:
        if self._thread is None:  # only now: what came before, like an evaluation at the start, is not disturbed
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
            for offset, turn in enumerate(self._upcoming):
                with self._change:
                    self._change.wait_for(lambda at=offset: self._closed or at - self._trained <= self._max)
                    if self._closed:
                        return
                done = self._one(turn)
                with self._change:
                    self._ready.append(done)
                    self._change.notify_all()
        except BaseException as error:  # raised where the turn is taken
            with self._change:
                self._failure = error
                self._change.notify_all()

    def _one(self, turn: Turn) -> _Done:
        """Plays a turn, or takes it from the shelf."""
        kept = self._shelf.get(turn)
        if kept is not None:
            self._game.restore(kept[1])
            return _Done(turn, *kept)
        played = self._game.play(turn)
        state = self._game.state()
        self._shelf.put(turn, played, state)
        return _Done(turn, played, state)


def schedule(turns: Callable[[int], list[str]], steps: int, progress: Mapping[str, Any]) -> Iterator[Turn]:
    """Every turn from a loop's progress (its state_dict) to the last step, as the loop will ask for them."""
    step, index, number, done = progress["step"], progress["index"], progress["number"], dict(progress["turns"])
    while step < steps:
        for role in turns(step)[index:]:
            yield Turn(step=step, index=index, role=role, number=number, update=done.get(role, 0))
            index, number, done[role] = index + 1, number + 1, done.get(role, 0) + 1
        step, index = step + 1, 0
