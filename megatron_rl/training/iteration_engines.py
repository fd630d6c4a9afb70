"""Wraps engines and the grader for one iteration: requests have the iteration's priority, finished samples are logged,
and another thread can close the sessions.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.engines.protocol import (
    Completion,
    Engine,
    EngineError,
    SampleLog,
    Sampling,
    Session,
    Tokens,
    TopScores,
)
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.training.iteration import Grade


@dataclass(frozen=True)
class OpenSessions:
    """The open engine sessions of all iterations that are being generated. Closing this object closes all sessions.
    Thread-safe.
    """

    _sessions: weakref.WeakSet[Session] = field(default_factory=weakref.WeakSet)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def add(self, session: Session) -> Session:
        """Adds a session and returns it. Raises EngineError after `close`."""
        with self._lock:
            if self._closed.is_set():
                raise EngineError("the run ends: no further rollouts are generated")
            self._sessions.add(session)
        return session

    def close(self) -> None:
        """Closes all sessions, which cancels their requests. After `close`, `add` raises EngineError."""
        with self._lock:
            self._closed.set()
            sessions = list(self._sessions)
        for session in sessions:
            session.close()


@dataclass(frozen=True)
class TimedSession:
    """Wraps a session, and measures when it generates. Implements engines.protocol.Session. `generated`: called after
    each call of `answers` with the begin of the call and the time of its last answer, both from time.monotonic().
    """

    session: Session
    generated: Callable[[float, float], None]

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        self.session.ask(key, tokens, sampling, after=after)

    def asking(self) -> contextlib.AbstractContextManager[None]:
        return self.session.asking()

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        began = ended = time.monotonic()
        for answer in self.session.answers():
            ended = time.monotonic()
            yield answer
        self.generated(began, ended)

    def close(self) -> None:
        self.session.close()


@dataclass(frozen=True)
class IterationEngine:
    """Wraps an engine for one iteration. Implements engines.protocol.Engine. New sessions get the iteration's
    `priority` and `log` of finished samples, and are added to `sessions`. Scoring requests keep the default priority 0,
    which is served first, because scoring requests are short. `generated`: see TimedSession.
    """

    engine: Engine
    priority: int
    sessions: OpenSessions
    log: SampleLog | None = None
    generated: Callable[[float, float], None] | None = None

    @property
    def version(self) -> int:
        return self.engine.version

    def session(self, priority: int = 0, log: SampleLog | None = None) -> Session:
        session = self.sessions.add(self.engine.session(priority or self.priority, log or self.log))
        return session if self.generated is None else TimedSession(session, self.generated)

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        return self.engine.score(sequences)

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        return self.engine.score_top(sequences, k)

    def tend(self) -> None:
        self.engine.tend()


class CutOffCounter:
    """A grader that counts the gradings that a response is taken to have cut off (see Graded.by_response), whichever
    code of a recipe requests them.
    """

    def __init__(self, grade: Grade) -> None:
        self._grade, self._cut_off = grade, list[Graded]()

    @property
    def count(self) -> int:
        return len(self._cut_off)

    def __call__(self, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        graded = self._grade(responses, payloads)
        self._cut_off += [one for one in graded if one.by_response]
        return graded


class GradeTurns:
    """A grader that threads share. One thread grades at a time, and the waiting thread with the lowest priority number
    is next. After `close`, a call that has not begun raises EngineError.
    """

    def __init__(self, grade: Grade) -> None:
        self._grade, self._change, self._busy, self._closed = grade, threading.Condition(), False, False
        self._waiting: list[tuple[int, int]] = []  # a heap of (priority, position in the order of arrival)
        self._numbers = itertools.count()

    def at(self, priority: int) -> Grade:
        """Returns a grader whose calls wait with this priority. Calls with a lower priority number are served first."""

        def grade(responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
            with self._change:
                heapq.heappush(self._waiting, own := (priority, next(self._numbers)))
                self._change.wait_for(lambda: self._closed or (not self._busy and self._waiting[0] == own))
                if self._closed:
                    raise EngineError("the run ends: no further answers are graded")
                heapq.heappop(self._waiting)
                self._busy = True
            try:
                return self._grade(responses, payloads)
            finally:
                with self._change:
                    self._busy = False
                    self._change.notify_all()

        return grade

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
