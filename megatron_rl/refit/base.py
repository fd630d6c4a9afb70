"""What a refit is made of: parties that read and write parts of parameters, transports that carry messages, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

WORD = 8  # bytes
LOOK_S = 0.5  # a wait looks so often whether it is still worth waiting


class RefitError(RuntimeError):
    """A refit that did not bring an engine to the new version. The message names the rank, and the bucket where there is one."""


class TransportError(RefitError):
    """A message that did not get through: the other side is dead, slow, or of another refit."""


class Mismatch(RefitError):
    """What landed in an engine is not what the trainer has. The message names the parameter. Nothing but a bug or broken memory does it."""


class Part(NamedTuple):
    """A rectangle of a parameter. 1-D parameters are [n, 1]; of those with more dimensions all but the last are joined."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class Readable(Protocol):
    def read(self, name: str, part: Part) -> Tensor:
        """The values, [rows, columns]; a view where that is possible."""
        ...


class Parameters(Readable, Protocol):
    def write(self, name: str, part: Part, values: Tensor) -> None:
        """Puts [rows, columns] values there, cast to the parameter's dtype."""
        ...


@runtime_checkable
class Reachable(Protocol):
    """Parameters whose own memory a transport may read, or write into in place of `write`."""

    def memory(self, name: str, part: Part, dtype: torch.dtype) -> Tensor | None:
        """The part as it lies, uint8 [bytes]; None where it is not in one piece, on a CPU and of this dtype."""
        ...


class Tensors:
    """Parameters that lie in plain tensors, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {
            name: t.detach().view(-1, t.shape[-1]) if t.dim() > 1 else t.detach()[:, None]
            for name, t in tensors.items()
        }
        self._words = {name: words(t) for name, t in self._tensors.items()}
        self._cut: dict[tuple[str, Part, torch.dtype], np.ndarray | None] = {}  # every refit asks for the same parts
        self._whole: dict[tuple[str, Part, torch.dtype], Tensor | None] = {}

    def read(self, name: str, part: Part) -> Tensor:
        return self._tensors[name][part.row : part.row + part.rows, part.column : part.column + part.columns]

    def write(self, name: str, part: Part, values: Tensor) -> None:
        target = self.words(name, part, values.dtype)
        source = None if target is None else words(values)
        if target is not None and source is not None:
            target[...] = source
        else:
            self.read(name, part).copy_(values)

    def memory(self, name: str, part: Part, dtype: torch.dtype) -> Tensor | None:
        key = name, part, dtype
        if key not in self._whole:
            found = self.read(name, part)
            lies = found.is_contiguous() and found.dtype == dtype and found.device.type == "cpu"
            self._whole[key] = found.view(-1).view(torch.uint8) if lies else None
        return self._whole[key]

    def words(self, name: str, part: Part, dtype: torch.dtype) -> np.ndarray | None:
        """The part's own memory as 64-bit words, [rows, words]; None where it is no such thing, or of another dtype."""
        found, width, key = self._words[name], dtype.itemsize, (name, part, dtype)
        if found is None or self._tensors[name].dtype != dtype:
            return None
        if key not in self._cut:
            first, last = part.column * width, (part.column + part.columns) * width
            whole = first % WORD == 0 and last % WORD == 0
            self._cut[key] = found[part.row : part.row + part.rows, first // WORD : last // WORD] if whole else None
        return self._cut[key]


def words(tensor: Tensor) -> np.ndarray | None:
    """[rows, columns] on a CPU as 64-bit words, which numpy copies in half the time that torch takes for short rows of two bytes a number.
    None where its rows are no whole words. torch does not resize the memory any more."""
    whole = all(
        n * tensor.element_size() % WORD == 0 for n in (tensor.shape[1], tensor.stride(0), tensor.storage_offset())
    )
    return tensor.view(torch.int64).numpy() if tensor.device.type == "cpu" and tensor.stride(1) == 1 and whole else None


@dataclass(frozen=True)
class Deadline:
    """How long a refit may take in all, and how long it waits for one message."""

    end: float  # time.monotonic()
    message_s: float
    over: Callable[[], bool] = lambda: False  # asked now and then while waiting: the refit has ended without this side
    pulse: Callable[[], Any] = lambda: None  # of the other side: while it changes, that waits too and is not lost

    @classmethod
    def start(cls, total_s: float, message_s: float, over: Callable[[], bool] = lambda: False) -> Deadline:
        return cls(time.monotonic() + total_s, message_s, over)

    def wait_s(self) -> float:
        """Seconds that one wait may take from now, at least a little."""
        return max(0.01, min(self.message_s, self.end - time.monotonic()))

    def until(self, done: Callable[[float], bool]) -> str | None:
        """Calls `done` (seconds that it may wait) until it is true -> None, or why it did not come to that."""
        allowed = self.wait_s()
        end, pulse = time.monotonic() + allowed, self.pulse()
        while not done(max(0.01, min(LOOK_S, end - time.monotonic()))):
            if self.over():
                return "the refit ended without it"
            if time.monotonic() >= end:
                before, pulse = pulse, self.pulse()
                if pulse == before or time.monotonic() >= self.end:
                    return f"no answer within {allowed:.1f} s"
                end = time.monotonic() + self.wait_s()
        return None


class Handle(Protocol):
    """A message under way."""

    def wait(self, deadline: Deadline) -> Tensor:
        """Until it is sent, or has come: the message, uint8 [size]. Raises TransportError."""
        ...

    def release(self) -> None:
        """Of a received message: its memory may be used again."""
        ...


class Transport(Protocol):
    """Carries messages between numbered peers. Between two peers messages of one direction come in the order they were sent."""

    @property
    def takes_pieces(self) -> bool:
        """Whether it sends from any memory, so that long slices are better not copied into a message: both sides then give `pieces`."""
        ...

    @property
    def streams(self) -> bool:
        """Whether several of the sender's pieces may make up one of the receiver's."""
        ...

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """uint8 [size] to write a message into, which `send` then takes."""
        ...

    def send(self, peer: int, label: str, message: Tensor, *, told: bool, pieces: Iterable[Tensor] = ()) -> Handle:
        """Starts to send what `buffer` gave, or the first part of it. `told`: the receiver knows the size. `pieces` (bytes that nobody
        changes before the wait is over) go after it, each by itself, when they come."""
        ...

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> Handle:
        """Starts to receive. `size` None: the sender says. `pieces`: memory for the sender's, or so many bytes of the last of `size`.
        When the wait has failed nothing lands there any more."""
        ...

    def close(self) -> None: ...
