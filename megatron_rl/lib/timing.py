"""Measures how long the parts of a training step take. Uses CUDA events (without synchronisation) on a GPU and the host
clock on a CPU. Also names the parts in profiler traces.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from megatron_rl.lib.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """A context manager that names the `with` block in traces of torch's profiler and, on a GPU, of Nsight Systems."""
    on_gpu = torch.backends.cuda.is_built() and torch.cuda.is_available()
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if on_gpu else nullcontext():
        yield


class Timer:
    """Measures how many seconds named parts of a training step take on one rank: `with timer("optimizer"): ...`.

    The time of a nested part is not included in the surrounding part. Repeated parts are summed. On a GPU, a part
    starts and ends with an event in the current stream, so its time is device time, including idle time. Recording does
    not block host or device.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        self._cuda = cuda
        self._open: list[str] = []
        # (name of the part, name of the surrounding part, start mark, end mark)
        self._marks: list[tuple[str, str | None, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        around, begin = self._open[-1] if self._open else None, self._mark()
        self._open.append(name)
        try:
            with named_range(name):
                yield
        finally:
            self._open.pop()
            self._marks.append((name, around, begin, self._mark()))

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a wrapper of `function` whose calls are measured as the part `name`."""

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return function(*args, **kwargs)

        return measured

    def clear(self) -> None:
        self._marks.clear()

    def take(self) -> dict[str, float]:
        """Returns the seconds of each part since the last call of `take`, and discards the measurements.

        Call it when the results of the last part have been copied to the host. The call does not block then, because
        all CUDA events are complete. On a rank that copies no results, the call waits for the last event.
        """
        if self._marks and self._cuda and not self._marks[-1][3].query():
            self._marks[-1][3].synchronize()
        seconds_of: dict[str, float] = {}
        for name, around, begin, end in self._marks:
            seconds = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
            seconds_of[name] = seconds_of.get(name, 0.0) + seconds
            if around is not None:
                seconds_of[around] = seconds_of.get(around, 0.0) - seconds
        self.clear()
        return seconds_of

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
