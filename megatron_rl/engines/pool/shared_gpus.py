"""GPUs in which servers of several roles stand: those of one role work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedGpus:
    """Lets the servers of one role at a time have requests under way. The pools of all roles in the same GPUs have it;
    any thread may call it.

    Two processes get a GPU's time in slices of milliseconds, each GPU on its own. A rank of a server of several GPUs
    would wait in a collective for another rank whose GPU works for the other server just then, and a decoding step has
    dozens of collectives. One role waits until no request of the other is under way, however long others follow: no
    answer depends on another role's answer, so that this ends. (Source: NVIDIA's documentation of time slices and of
    MPS; not measured.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._looks: dict[str, Callable[[], None]] = {}  # by role: lets what waits for its servers look around
        self._waiting: dict[str, None] = {}  # roles that were refused, the first first
        self._role, self._under_way = "", 0

    def add(self, role: str, look: Callable[[], None]) -> None:
        """Adds a role. `look` is called when its requests may go: by any thread, and must not block."""
        self._looks[role] = look

    def enter(self, role: str) -> bool:
        """Returns whether a request of the role may begin; each one that may is ended by `leave`."""
        with self._lock:
            if self._under_way and self._role != role:
                self._waiting[role] = None
                return False
            self._role = role
            self._under_way += 1
            self._waiting.pop(role, None)
            return True

    def leave(self) -> None:
        """Ends a request of the role that works. When it was the last one, other roles may have the GPUs."""
        with self._lock:
            self._under_way -= 1
            waiting = [] if self._under_way else [self._looks[role] for role in self._waiting]
        for look in waiting:
            look()
