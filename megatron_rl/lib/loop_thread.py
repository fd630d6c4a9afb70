"""Runs an asyncio event loop in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a daemon thread until `close`. It can be used while the caller's thread has a running
    event loop (as in a notebook)."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine in the loop. Returns the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and returns its result."""
        return self.start(work).result()

    def close(self) -> None:
        """Cancels the running coroutines, waits for the coroutines and for the threads that the loop has started, and
        ends the loop's thread. Later calls of `close` are no-ops."""
        if not self._thread.is_alive():  # already closed, or this is a forked child, which has no copy of the thread
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        self.loop.run_forever()
        # Futures raise the errors of coroutines that are cancelled now. asyncio must not log these errors, too.
        self.loop.set_exception_handler(lambda loop, context: None)
        # Cancels all tasks, and ends asynchronous generators (used by connections) and threads (used by DNS look-ups).
        self._runner.close()
