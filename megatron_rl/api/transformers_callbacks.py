"""Calls callbacks that were written for the Trainer of Transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from megatron_rl.api.callbacks import Callback, RunState
from megatron_rl.config.base import ConfigError
from megatron_rl.run.metrics import EVAL

# methods of a Transformers callback that are called
EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


class TransformersCallback(Callback):
    """A callback that calls a `transformers.TrainerCallback`. One step of Transformers is one iteration of the run.

    The callback's `args` have output_dir (the run's directory) and max_steps. Its `state` has global_step, max_steps
    and log_history. If the callback sets `control.should_training_stop`, the run stops.
    """

    def __init__(self, callback: TrainerCallback) -> None:
        """Raises ConfigError if the callback has a method that would never be called."""
        kind, base = type(callback), TrainerCallback
        events = [
            name for name in dir(base) if name.startswith("on_") and getattr(kind, name) is not getattr(base, name)
        ]
        if unknown := [name for name in events if name not in EVENTS]:
            event_names = ", ".join(EVENTS)
            raise ConfigError(f"callbacks: {kind.__name__}.{unknown[0]} is never called; there are {event_names}")
        self._callback, self._control = callback, TrainerControl()

    def _call(self, event: str, state: RunState, **others: Any) -> None:
        args = SimpleNamespace(output_dir=str(state.run), max_steps=state.iterations)
        trainer_state = TrainerState(global_step=state.iteration, max_steps=state.iterations, log_history=state.history)
        getattr(self._callback, event)(args, trainer_state, self._control, **others)
        if self._control.should_training_stop:
            state.stop()

    def on_train_begin(self, state: RunState) -> None:
        self._call("on_train_begin", state)

    def on_iteration_end(self, state: RunState) -> None:
        self._call("on_step_end", state)

    def on_log(self, state: RunState) -> None:
        self._call("on_log", state, logs=state.history[-1])

    def on_evaluate(self, state: RunState) -> None:
        self._call("on_evaluate", state, metrics=state.last[EVAL])

    def on_save(self, state: RunState) -> None:
        self._call("on_save", state)

    def on_train_end(self, state: RunState) -> None:
        self._call("on_train_end", state)
