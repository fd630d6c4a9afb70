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
    iterations: int  # iterations of the whole run
    iteration: int = 0  # iterations that are done
    cycle: int = 0  # cycle of the recipe that the last line belongs to; after an evaluation, cycles that have begun
    # Lines since this start as `TrainResult.history` has them: iteration, cycle, scope, and each metric by its name.
    history: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, dict[str, float]] = field(default_factory=dict)  # the newest metrics by scope
    stopping: bool = False  # a callback has asked to stop

    def stop(self) -> None:
        """Asks the run to save and leave at once: after this iteration, or after this evaluation and before the next
        iteration. The trained models are written as at the end; another `train()` goes on from there, with that
        evaluation once more."""
        self.stopping = True


class Callback:
    """The base of callbacks: each method does nothing. They run in the program that called `train()`, between
    iterations, while the run waits. What one raises ends the run, which saves before it leaves, and is raised by
    `train()`."""

    def on_train_begin(self, state: RunState) -> None:
        """Is called before the first iteration; of a run that goes on, `state.iteration` iterations are done."""

    def on_iteration_end(self, state: RunState) -> None:
        """Is called after every iteration and its update, with the iteration's metrics in `state.last`."""

    def on_evaluate(self, state: RunState) -> None:
        """Is called after every evaluation, with its metrics in `state.last["eval"]`."""

    def on_train_end(self, state: RunState) -> None:
        """Is called once the run has ended in order: finished, or stopped by a callback."""


def take_event(state: RunState, event: dict[str, Any], callbacks: Sequence[Callback]) -> None:
    """Brings the state up to date with what the run told (session.parent_events), and calls the callbacks."""
    match event["event"]:
        case "begin":
            state.iterations, state.iteration = event["iterations"], event["iteration"]
            for one in callbacks:
                one.on_train_begin(state)
        case "metrics":
            metrics, before = event["metrics"], event["scope"] == EVAL  # see metrics.MetricsRow.place
            iteration, cycle = event["iteration"] - before, event["cycle"] - before
            state.cycle, state.last[event["scope"]] = event["cycle"], metrics
            state.history.append({"iteration": iteration, "cycle": cycle, "scope": event["scope"]} | metrics)
            if before:
                for one in callbacks:
                    one.on_evaluate(state)
        case "iteration":
            state.iteration = event["iteration"]
            for one in callbacks:
                one.on_iteration_end(state)
