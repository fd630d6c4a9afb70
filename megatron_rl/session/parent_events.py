"""Reports the events of a run to the parent program, which started the run. The program's replies can stop the run."""

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
    """The connection of the driver (rank 0) to the parent program, over a Unix socket.

    If the parent program has exited, the run saves a checkpoint and exits."""

    connection: Connection
    # True if the parent program asked the run to stop; the run then ends as if all iterations were done
    stopped: bool = False
    gone: bool = False  # True if the connection to the parent program is lost
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def at(cls, address: str) -> Listener:
        """Connects to the Unix socket at `address`. Raises OSError if no process listens there."""
        return cls(connection=Client(address, "AF_UNIX"))  # type: ignore[arg-type]

    def tell(self, event: str, **values: Any) -> None:
        """Sends an event to the parent program and waits for the reply. Sets `stopped` if the reply asks to stop, and
        `gone` if the connection is lost.

        The events and their values are "begin" (iterations, iteration), "metrics" (iteration, cycle, scope, metrics),
        "iteration" (iteration), "save" (iteration) and "error" (type, message). The value `iterations` is the number of
        iterations of the run, and `iteration` is the number of iterations done.
        """
        with self._lock:
            try:
                self.connection.send_bytes(json.dumps({"event": event, **values}).encode())
                self.stopped = bool(json.loads(self.connection.recv_bytes())["stop"])
            except (OSError, EOFError):
                self.gone = True


def listening(hooks: Hooks, listener: Listener, progress: Progress, iterations: int) -> Hooks:
    """Returns the hooks (callbacks) of the training loop, extended to report each event to `listener`. Used on the
    driver (rank 0).

    After the last iteration, a stop request of the parent program has no effect. `iterations`: number of iterations of
    the run."""

    def log(cycle: int, scope: str, metrics: Mapping[str, float], *, iteration: int) -> None:
        hooks.log(cycle, scope, metrics, iteration=iteration)
        plain = {name: float(value) for name, value in metrics.items()}
        listener.tell("metrics", iteration=iteration, cycle=cycle, scope=scope, metrics=plain)

    def should_stop() -> bool:
        asked = progress.number < iterations and (listener.stopped or listener.gone)
        return hooks.should_stop() or asked

    def iteration_done(number: int) -> None:
        listener.tell("iteration", iteration=number)

    def saved(number: int | None) -> int | None:
        if number is not None:
            listener.tell("save", iteration=number)
        return number

    return replace(
        hooks, log=log, iteration_done=iteration_done, should_stop=should_stop,
        save=lambda number: saved(hooks.save(number)), settle=lambda wait: saved(hooks.settle(wait)),
    )  # fmt: skip
