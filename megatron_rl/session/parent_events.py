"""Tells the program that started a run what happens in it, and hears from each answer whether to go on."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection
from typing import Any

from megatron_rl.training.loop import Hooks, Progress


@dataclass(kw_only=True)
class Listener:
    """The program at the other end of a Unix socket, on the driver. Where it is gone, the run saves and leaves."""

    connection: Connection
    stopped: bool = False  # it asked to stop, and the run is to end as a whole one
    gone: bool = False  # nobody answers
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def at(cls, address: str) -> Listener:
        """Connects to the socket. Raises OSError when nobody listens there."""
        return cls(connection=Client(address, "AF_UNIX"))  # type: ignore[arg-type]

    def begin(self, *, iterations: int, iteration: int) -> None:
        """Tells that the run begins with `iteration` of `iterations` iterations done."""
        self._ask({"event": "begin", "iterations": iterations, "iteration": iteration})

    def log(self, cycle: int, scope: str, metrics: Mapping[str, float], *, iteration: int) -> None:
        """Tells a line of metrics."""
        metrics = {name: float(value) for name, value in metrics.items()}
        self._ask({"event": "metrics", "iteration": iteration, "cycle": cycle, "scope": scope, "metrics": metrics})

    def iteration_done(self, iteration: int) -> None:
        """Tells that `iteration` iterations are done."""
        self._ask({"event": "iteration", "iteration": iteration})

    def failed(self, error: BaseException, why: str) -> None:
        """Tells why the run ended."""
        self._ask({"event": "error", "type": type(error).__name__, "message": why})

    def _ask(self, event: Mapping[str, Any]) -> None:
        """Sends an event, and takes from the answer whether the run is to stop."""
        with self._lock:
            try:
                self.connection.send_bytes(json.dumps(event).encode())
                self.stopped = bool(json.loads(self.connection.recv_bytes())["stop"])
            except (OSError, EOFError):
                self.gone = True


def listening(hooks: Hooks, listener: Listener, progress: Progress, iterations: int) -> Hooks:
    """Returns the hooks with the listener told of what they do, for the driver. A stop that is asked for after the last
    of `iterations` iterations changes nothing: the run is done."""

    def log(cycle: int, scope: str, metrics: Mapping[str, float], *, iteration: int) -> None:
        hooks.log(cycle, scope, metrics, iteration=iteration)
        listener.log(cycle, scope, metrics, iteration=iteration)

    def should_stop() -> bool:
        asked = progress.number < iterations and (listener.stopped or listener.gone)
        return hooks.should_stop() or asked

    return replace(hooks, log=log, iteration_done=listener.iteration_done, should_stop=should_stop)
