"""Measures how long an iteration takes, and how long the trainer and the engines are idle in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.run.metrics import SPEED, Stopwatch


class Clock:
    """Measures an iteration on the driver, from the creation of the clock. The time does not include checkpoints. It
    includes an evaluation only if the evaluation runs during the iteration.

    `watch`: measures the seconds of each stage.
    """

    def __init__(self, watch: Stopwatch, occupied_s: Callable[[], float | None]) -> None:
        """`occupied_s`: see Fleet.occupied_s."""
        self.watch, self._occupied_s, self._waited_s = watch, occupied_s, 0.0
        self._start, self._occupied_at_start = time.perf_counter(), occupied_s()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager whose seconds count as idle time of the trainer."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    def speed(self) -> dict[str, float]:
        """Returns metrics: seconds since the iteration began, and the idle shares of the trainer and the engines."""
        seconds, occupied_s = time.perf_counter() - self._start, self._occupied_s()
        speed = {f"{SPEED}iteration_seconds": seconds, f"{SPEED}trainer_idle": self._waited_s / seconds}
        if occupied_s is not None and self._occupied_at_start is not None:
            speed[f"{SPEED}engines_idle"] = 1 - (occupied_s - self._occupied_at_start) / seconds
        return speed
