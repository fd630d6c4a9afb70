"""A thread that runs functions one after another."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest

from megatron_rl.refit.task_thread import TaskThread


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_thread_does_not_keep_the_memory_of_the_last_message(fails):
    """The thread kept it until the next message; and an error kept it until Python collected reference cycles."""
    thread, message = TaskThread(), np.zeros(8)
    memory = weakref.ref(message)

    def send(message: np.ndarray = message) -> float:
        return message[9 if fails else 0]

    gc.disable()
    try:
        future = thread.submit(send)
        assert isinstance(future.exception(timeout=30.0), IndexError) == fails
        del future, send, message
        end = time.monotonic() + 30.0
        while memory() is not None:
            assert time.monotonic() < end
            time.sleep(0.001)
    finally:
        gc.enable()
        thread.end(None)
