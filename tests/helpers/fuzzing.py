"""Counts what hostile inputs lead to, for the areas in tests/fuzz."""

from __future__ import annotations

import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

SHOWN = 5  # defects of an area whose tracebacks are kept
LIMIT_S = 2.0  # processor time that one input may take, when it is tried a second time


class Hang(BaseException):
    """An input that takes longer than LIMIT_S. Libraries that catch every Exception let it through."""


@dataclass
class Tally:
    """The outcomes of an area's inputs, by name, and the defects with the seeds that give the same input again."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: int = 0
    shown: list[str] = field(default_factory=list)  # the first defects: seed and traceback

    @property
    def inputs(self) -> int:
        """Returns the number of inputs that were tried."""
        return self.outcomes.total() + self.defects


def tally(seed: int, count: int, attempt: Callable[[random.Random], str], *, timed: bool = True) -> Tally:
    """Tries `count` inputs. `attempt` makes an input from the generator it is given, tries it, and returns the name of
    the outcome; whatever it raises is a defect, and so is an input that takes longer than LIMIT_S, unless `attempt`
    limits its time itself (`timed` false). Input i is the same in every call with the same seed.
    """
    counts = Tally()
    for i in range(count):
        try:
            outcome = _in_time(attempt, f"{seed}/{i}") if timed else attempt(random.Random(f"{seed}/{i}"))
            counts.outcomes[outcome] += 1
        except (Exception, Hang):
            counts.defects += 1
            if len(counts.shown) < SHOWN:
                counts.shown.append(f"input {i} of seed {seed}:\n{traceback.format_exc()}")
    return counts


def _in_time(attempt: Callable[[random.Random], str], seed: str) -> str:
    """Tries an input, a second time when it was slow: the first try may have imported modules."""
    try:
        with _limited():
            return attempt(random.Random(seed))
    except Hang:
        with _limited():
            return attempt(random.Random(seed))


@contextmanager
def _limited() -> Iterator[None]:
    """Raises Hang in the block once this process has used LIMIT_S of processor time."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang(f"it takes more than {LIMIT_S:g} s of processor time")

    handler = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
