"""Collects the figures of one run on a GPU, and says of each figure that could not be had why not."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import common
import torch

T = TypeVar("T")


class NotMeasured(Exception):
    """A figure cannot be had here. The message says why."""


class DeviceLost(Exception):
    """Nothing more can be measured: after a measurement the device refuses the simplest operation."""


class Findings:
    """What was measured so far. It is written to the file after every part, so that a run that is cut off leaves it."""

    def __init__(
        self,
        bars: Mapping[str, float],
        *,
        limits: Mapping[str, float] | None = None,
        file: Path | None = None,
        minutes: float = 9.0,
    ) -> None:
        """`bars`: least acceptable values by figure. `limits`: greatest acceptable values.

        No part begins when `minutes` are over.
        """
        self.figures: dict[str, float] = {}
        self.unmeasured: dict[str, str] = {}
        self.more: dict[str, Any] = {}
        self._bars, self._limits, self._file, self._end = bars, limits or {}, file, time.monotonic() + 60 * minutes
        self._minutes, self._unreached = minutes, "nothing measured it"

    def take(self, name: str, measure: Callable[[], Mapping[str, float]]) -> None:
        """Adds the figures that `measure` returns, as NAME/figure, or the reason why there are none.

        An error of any kind is such a reason: the kit is there to find out what fails, and what comes next may not.
        Raises DeviceLost when the device cannot be used afterwards. As errors of a device may show late, figures are
        not taken then.
        """
        began, failed = time.monotonic(), False
        measured: Mapping[str, float] = {}
        try:
            if began > self._end:
                raise NotMeasured(f"{self._minutes:g} minutes were over before its turn came")
            measured = {f"{name}/{figure}": float(value) for figure, value in measure().items()}
        except NotMeasured as reason:
            self.lack(name, str(reason))
        except torch.cuda.OutOfMemoryError as error:
            self.lack(name, f"out of memory: {first_sentence(error)}")
        except Exception as error:
            traceback.print_exc()
            self.lack(name, f"{type(error).__name__}: {first_line(error)}")
            failed = True
        lost = device_problem() if failed or torch.cuda.is_initialized() else None
        if lost is None:
            self.figures |= measured
        else:
            if measured:
                self.lack(name, f"the device failed: {lost}")
            self._unreached = f"the device could not be used any more after {name}: {lost}"
            self.more["stopped"] = self._unreached
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        common.write_json(self._file, self.told())
        if lost is not None:
            raise DeviceLost(self._unreached)

    def lack(self, name: str, reason: str) -> None:
        """Notes why a figure, or a group of figures, was not measured. Metrics of the group that have a bar are named
        each."""
        held = [bar for bar in (*self._bars, *self._limits) if bar == name or bar.startswith(f"{name}/")]
        self.unmeasured |= dict.fromkeys(held or [name], reason)

    def told(self) -> dict[str, Any]:
        """Returns what the JSON file holds before the run has come to its end."""
        return {"metrics": self.figures, "not_measured": self.unmeasured, "complete": False, **self.more}

    def finish(self, args: Any, *, complete: bool = True) -> None:
        """Prints the table and writes the file. With --check it exits with status 1 when a bar is missed.

        `complete`: whether the run has come to its end.
        """
        for name in (*self._bars, *self._limits):
            if name not in self.figures and name not in self.unmeasured:
                self.lack(name, self._unreached)
        more = {"complete": complete, **self.more}
        common.finish(self.figures, self._bars, args, limits=self._limits, unmeasured=self.unmeasured, more=more)


def first_that_fits(tries: Sequence[tuple[str, Callable[[], T]]]) -> tuple[str, T]:
    """Returns (name, result) of the first attempt that does not run out of the device's memory.

    Raises NotMeasured when all do.
    """
    for name, attempt in tries:
        try:
            return name, attempt()
        except torch.cuda.OutOfMemoryError:
            print(f"out of memory: {name}", flush=True)
        free_memory()
    raise NotMeasured(f"out of memory with each of: {', '.join(name for name, _ in tries)}")


def free_memory() -> None:
    """Gives what nobody holds back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def device_problem() -> str | None:
    """Gives back memory, and returns the error of the simplest operation on the device, or None where there is none.

    A full memory is none: what comes next may ask for less, or be told so itself.
    """
    try:
        free_memory()
        torch.ones(1, device="cuda").add_(1).item()
    except torch.cuda.OutOfMemoryError:
        return None
    except RuntimeError as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).splitlines() or ["it has no message"])[0]


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of an error's message."""
    return first_line(error).partition(". ")[0]
