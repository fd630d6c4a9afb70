"""What a program that trains is told while the run goes on, and how it asks the run to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.run.metrics import EVAL


@dataclass(kw_only=True)
class RunState:
    """The place that a run has reached. Callbacks read it; `stop` is all that they change."""

    run: Path  # the run's directory
    turns: int  # turns of the whole run
    turn: int = 0  # turns that are done
    step: int = 0  # step of the recipe that the last line belongs to; after an evaluation, steps that are done
    # Lines since this start as `TrainResult.history` has them: turn, step, scope, and each figure by its name.
    history: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, dict[str, float]] = field(default_factory=dict)  # the newest figures by scope
    stopping: bool = False  # a callback has asked to stop

    def stop(self) -> None:
        """Asks the run to save and leave at once: after this turn, or after this evaluation and before the next turn.
        The trained models are written as at the end; another `train()` goes on from there, with that evaluation once
        more."""
        self.stopping = True


class Callback:
    """The base of callbacks: each method does nothing. They run in the program that called `train()`, between turns,
    while the run waits. What one raises ends the run, which saves before it leaves, and is raised by `train()`."""

    def on_train_begin(self, state: RunState) -> None:
        """Is called before the first turn; of a run that goes on, `state.turn` turns are done."""

    def on_turn_end(self, state: RunState) -> None:
        """Is called after every turn and its update, with the turn's figures in `state.last`."""

    def on_evaluate(self, state: RunState) -> None:
        """Is called after every evaluation, with its figures in `state.last["eval"]`."""

    def on_train_end(self, state: RunState) -> None:
        """Is called once the run has ended in order: finished, or stopped by a callback."""


def take_event(state: RunState, event: dict[str, Any], callbacks: Sequence[Callback]) -> None:
    """Brings the state up to date with what the run told (session.listening), and calls the callbacks."""
    match event["event"]:
        case "begin":
            state.turns, state.turn = event["turns"], event["turn"]
            for one in callbacks:
                one.on_train_begin(state)
        case "metrics":
            figures, before = event["metrics"], event["scope"] == EVAL  # see metrics.MetricsRow.place
            turn, step = event["turn"] - before, event["step"] - before
            state.step, state.last[event["scope"]] = event["step"], figures
            state.history.append({"turn": turn, "step": step, "scope": event["scope"]} | figures)
            if before:
                for one in callbacks:
                    one.on_evaluate(state)
        case "turn":
            state.turn = event["turn"]
            for one in callbacks:
                one.on_turn_end(state)
