"""Reports the events of a run to the parent program, which started the run. The program's replies can stop the run."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from typing import Any

from megatron_rl.training.events import Event, Finished, Measured, Observer, Saved


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


def listening(observe: Observer, listener: Listener) -> Observer:
    """Returns an observer that calls `observe` and then reports the event to `listener`. Used on the driver."""

    def observe_and_tell(event: Event) -> None:
        observe(event)
        match event:
            case Measured():
                metrics = {name: float(value) for name, value in event.metrics.items()}
                listener.tell(
                    "metrics", iteration=event.iteration, cycle=event.cycle, scope=event.scope, metrics=metrics
                )
            case Finished():
                listener.tell("iteration", iteration=event.iterations)
            case Saved():
                listener.tell("save", iteration=event.iterations)

    return observe_and_tell
