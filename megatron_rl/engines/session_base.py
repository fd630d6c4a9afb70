"""The part that the sessions of all engines share: the keys of requests, and the threads that may send more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from megatron_rl.engines.protocol import EngineError


class SessionBase:
    """The base of engine sessions. Thread-safe."""

    def __init__(self) -> None:
        self._change = threading.Condition()  # guards the fields of the session
        self._keys: set[int] = set()  # keys of all requests so far
        self._askers = 0  # number of open `asking` blocks
        self._closed = False

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Implements `engines.protocol.Session.asking`."""
        with self._change:
            self._askers += 1
        try:
            yield
        finally:
            with self._change:
                self._askers -= 1
                self._wake()

    def _use_key(self, key: int) -> None:
        """Records the key of a new request. Raises ValueError if the key was used before, and EngineError if the
        session is closed.
        """
        if self._closed:
            raise EngineError("the session was closed: ask in a new one")
        if key in self._keys:
            raise ValueError(f"key {key} was asked before in this session: give every ask a key of its own")
        self._keys.add(key)

    def _wake(self) -> None:
        """Wakes the thread that iterates over `answers`, so that it checks whether it still has to wait."""
        self._change.notify_all()
