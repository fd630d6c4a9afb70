"""The base class of the engines' sessions: checks the keys of requests, holds the log of finished samples, and counts
the threads that may still send requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.engines.protocol import Completion, EngineError, SampleLog, Sampling


@dataclass(eq=False)
class Asked:
    """A request of a session for which some completions are not finished yet."""

    key: int
    tokens: np.ndarray  # prompt, [T] int32
    sampling: Sampling
    address: bytes  # identifies the request in the session's log (see SampleLog.known)
    found: dict[int, Completion]  # finished completions by sample index

    @property
    def missing(self) -> list[int]:
        """Returns the indices (0 to n - 1) of the request's samples that are not finished."""
        return [j for j in range(self.sampling.n) if j not in self.found]

    @property
    def completions(self) -> list[Completion]:
        """Returns the request's n completions in the order of their sample indices. Raises KeyError if a sample is not
        finished.
        """
        return [self.found[j] for j in range(self.sampling.n)]


class NoLog:
    """A log of samples that is always empty. Implements engines.protocol.SampleLog."""

    def known(self, key: int, tokens: np.ndarray, sampling: Sampling) -> tuple[bytes, dict[int, Completion]]:
        return b"", {}

    def add(self, samples: Sequence[tuple[bytes, int, Completion]]) -> None: ...


class SessionBase:
    """Base class of the sessions in which an engine answers sampling requests. Thread-safe.

    Refuses a request whose key was used before, and every request after the session was closed. `log`: a log that
    contains finished samples of an earlier process, and to which new samples are added. None disables logging.
    """

    def __init__(self, log: SampleLog | None) -> None:
        self._log = NoLog() if log is None else log
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
        """Wakes the thread that iterates over `answers`, so that the thread checks whether it still has to wait."""
        self._change.notify_all()
