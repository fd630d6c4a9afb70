"""A thread that runs functions one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class TaskThread:
    """A daemon thread that runs functions in the order in which they are submitted. Unlike a thread pool, it does not
    keep the process alive if a function never returns.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queues a call of `function`. Returns the Future of its result, or of the error that the function raised."""
        future: Future[Any] = Future()
        self._tasks.put((future, function))
        return future

    def end(self, join_s: float | None = 0.0) -> None:
        """Ends the thread after it has run the submitted functions. Waits up to `join_s` seconds for the thread to end,
        or without a limit if `join_s` is None.
        """
        self._tasks.put(None)
        self._thread.join(join_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            try:
                future.set_result(function())
            except BaseException as error:  # the Future raises the error in the thread that waits for the result
                future.set_exception(error)
            del task, future, function  # so that an idle thread does not keep the last message in memory
