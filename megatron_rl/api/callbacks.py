"""Callbacks that a program receives during a training run, and with which it can stop the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.run.metrics import EVAL


@dataclass(kw_only=True)
class RunState:
    """The progress of a run. Callbacks read the attributes; the only change that they may make is to call `stop`."""

    run: Path  # the run's directory
    iterations: int  # number of iterations of the whole run
    iteration: int = 0  # number of completed iterations
    # Index of the cycle of the newest metrics line (a cycle is one item of the recipe's schedule). If the line is from
    # an evaluation, this is instead the number of cycles that had begun before the evaluation.
    cycle: int = 0
    # Metrics lines since this start of the run, in the format of `TrainResult.history`.
    # A line has the keys iteration, cycle and scope (a role, eval or preflight), and the name of each metric.
    history: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, dict[str, float]] = field(default_factory=dict)  # {scope: newest metrics of the scope}
    saved: int | None = None  # iterations in the newest complete checkpoint since this start; None if there is none
    stopping: bool = False  # whether a callback has called `stop`

    def stop(self) -> None:
        """Asks the run to save and exit after the current iteration or evaluation.

        The trained models are saved as at the end of a run. Another call of `train()` continues the run; if the run was
        stopped in an evaluation, the evaluation is repeated.
        """
        self.stopping = True


class Callback:
    """Base class of callbacks, in which each method does nothing.

    Callbacks are called in the program that called `train()`, between iterations, while the run waits. If a callback
    raises an exception, the run saves and exits, and `train()` raises the exception.
    """

    def on_train_begin(self, state: RunState) -> None:
        """Is called before the first iteration. If the run is continued from a checkpoint, `state.iteration` is the
        number of iterations done."""

    def on_iteration_end(self, state: RunState) -> None:
        """Is called after every iteration, including its update. `state.last` has the iteration's metrics."""

    def on_log(self, state: RunState) -> None:
        """Is called after every line of metrics. A line has the metrics of one role in an iteration, of an evaluation,
        or of the preflight (the checks before training). `state.history[-1]` is the line."""

    def on_save(self, state: RunState) -> None:
        """Is called when a checkpoint is complete. `state.saved` is the number of iterations in it; the checkpoint is
        state.run/checkpoints/iteration_000012 for 12 iterations."""

    def on_evaluate(self, state: RunState) -> None:
        """Is called after every evaluation. `state.last["eval"]` has its metrics."""

    def on_train_end(self, state: RunState) -> None:
        """Is called when the run has ended without an error: it finished, or a callback stopped it."""


def take_event(state: RunState, event: dict[str, Any], callbacks: Sequence[Callback]) -> None:
    """Updates the state with an event of the run (see session.parent_events), and calls the callbacks."""
    match event["event"]:
        case "begin":
            state.iterations, state.iteration = event["iterations"], event["iteration"]
            for callback in callbacks:
                callback.on_train_begin(state)
        case "metrics":
            metrics, is_evaluation = event["metrics"], event["scope"] == EVAL  # see metrics.MetricsRow.place
            iteration, cycle = event["iteration"] - is_evaluation, event["cycle"] - is_evaluation
            state.cycle, state.last[event["scope"]] = event["cycle"], metrics
            state.history.append({"iteration": iteration, "cycle": cycle, "scope": event["scope"]} | metrics)
            for callback in callbacks:
                callback.on_log(state)
                if is_evaluation:
                    callback.on_evaluate(state)
        case "save":
            state.saved = event["iteration"]
            for callback in callbacks:
                callback.on_save(state)
        case "iteration":
            state.iteration = event["iteration"]
            for callback in callbacks:
                callback.on_iteration_end(state)
