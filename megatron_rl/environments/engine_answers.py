"""Sends requests to the engines of several roles. Each request returns a future of its completion."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

from megatron_rl.engines.protocol import Completion, Sampling, Tokens
from megatron_rl.training.iteration import RolloutContext

LOOK_S = 0.2  # seconds between two checks of the engines
T = TypeVar("T")


class EngineAnswers:
    """Sessions with the engines of several roles. Any thread may send requests inside a `with reading()` block."""

    def __init__(self, context: RolloutContext, roles: Iterable[str]) -> None:
        # The exception of the first engine that failed, or None. If an engine fails, all pending futures are cancelled.
        self.failure: BaseException | None = None
        self.over = False  # whether all further requests are cancelled
        self._context = context
        self._sessions = {role: context.session(role) for role in roles}
        self._lock = threading.Lock()  # guards the attributes below
        self._waiting: dict[tuple[str, int], Future[Completion]] = {}  # {(role, key): future of the answer}

    def ask(self, role: str, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None) -> Future[Completion]:
        """Requests one completion of the prompt `tokens` from the role's engine. `key`, `after`: see `Session.ask`.

        The returned future is cancelled if any engine fails, or when the `reading` block ends.
        """
        future: Future[Completion] = Future()
        with self._lock:
            if self.over:
                future.cancel()
                return future
            self._waiting[role, key] = future
        self._sessions[role].ask(key, tokens, sampling, after=after)
        return future

    def look_after(self, work: Future[T]) -> T:
        """Waits for the result of `work` and returns the result. Meanwhile, reports to the run's watchdog that the run
        is alive, and calls `tend` of each role's engine, which updates the engine's servers.

        Must be called in the thread that manages the servers. If an engine fails, raises the engine's exception without
        waiting for `work`.
        """
        while self.failure is None and not wait([work], LOOK_S).done:
            self._context.watch.beat()
            for role in self._sessions:
                self._context.engines[role].tend()
        if self.failure is not None:
            raise self.failure
        return work.result()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager that receives the engines' answers in one thread per role. At the end of the block, pending
        requests are cancelled and the threads are joined. The join is needed because a call of an engine may be a
        collective operation of all ranks, which must end before the caller goes on.
        """
        readers = [
            threading.Thread(target=self._read, args=(role,), name=f"answers of {role}", daemon=True)
            for role in self._sessions
        ]
        with contextlib.ExitStack() as asking:
            for session in self._sessions.values():
                asking.enter_context(session.asking())
            for reader in readers:
                reader.start()
            try:
                yield
            finally:
                self._end()
                for session in self._sessions.values():
                    session.close()
        for reader in readers:
            reader.join()

    def _read(self, role: str) -> None:
        try:
            for key, [completion] in self._sessions[role].answers():
                with self._lock:
                    future = self._waiting.pop((role, key), None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(completion)
        except BaseException as error:  # `look_after` raises it
            self.failure = self.failure or error
        finally:
            self._end()

    def _end(self) -> None:
        """Cancels the pending requests, and lets `ask` cancel all later requests."""
        with self._lock:
            self.over = True
            pending, self._waiting = list(self._waiting.values()), {}
        for future in pending:
            future.cancel()
