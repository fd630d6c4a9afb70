"""Coordinates servers of several roles that share GPUs: only the servers of one role work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedGpus:
    """A lock for GPUs that servers of several roles share: only the servers of one role at a time have requests in
    progress. The pools of these roles share one instance. Thread-safe.

    Two processes on a GPU get time slices of milliseconds, scheduled separately on each GPU. A rank of a multi-GPU
    server would wait in a collective for another rank whose GPU currently runs the other server, and a decoding step
    has dozens of collectives. A role waits until no request of the other role is in progress, even if requests of the
    other role keep arriving. This wait ends, because no request depends on the response to a request of another role.
    (Source: NVIDIA's documentation of time slicing and of MPS; not measured.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        # {role: callback that makes the role's waiting requests look for a server}
        self._looks: dict[str, Callable[[], None]] = {}
        self._waiting: dict[str, None] = {}  # roles that were refused, in order
        self._role, self._under_way = "", 0

    def add(self, role: str, look: Callable[[], None]) -> None:
        """Adds a role. `look`: callback that is called, from any thread, when the role's requests may start. It must
        not block.
        """
        self._looks[role] = look

    def enter(self, role: str) -> bool:
        """Returns whether a request of the role may start now. Each request that starts must call `leave` when it
        ends.
        """
        with self._lock:
            if self._under_way and self._role != role:
                self._waiting[role] = None
                return False
            self._role = role
            self._under_way += 1
            self._waiting.pop(role, None)
            return True

    def leave(self) -> None:
        """Records that a request has ended. If no request is in progress any more, the other roles may use the GPUs."""
        with self._lock:
            self._under_way -= 1
            waiting = [] if self._under_way else [self._looks[role] for role in self._waiting]
        for look in waiting:
            look()
