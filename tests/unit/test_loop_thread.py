"""A thread with an event loop: what becomes of its coroutines when it is closed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from megatron_rl.lib.loop_thread import LoopThread


def test_an_error_of_a_coroutine_that_is_cancelled_is_in_its_future_and_not_in_the_log(caplog):
    """A run that ended logged a traceback for each request under way."""

    async def request(begun: asyncio.Event) -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise ValueError("the pool was closed")

    thread, begun = LoopThread("test"), asyncio.Event()
    future = thread.start(request(begun))
    thread.run(begun.wait())
    thread.close()
    thread.close()
    with pytest.raises(ValueError, match="the pool was closed"):
        future.result(timeout=0)
    assert caplog.text == ""
