"""Defines what a refit is made of: parameters that are read and written in parts, transports, deadlines, errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

WORD_BYTES = 8
RECHECK_S = 0.5  # a wait checks this often whether it is still worth waiting


class RefitError(RuntimeError):
    """Raised when a refit did not bring an engine to the new version.

    The message names the rank, and the bucket where there is one.
    """


class TransportError(RefitError):
    """Raised when a message did not get through: the other side is dead, too slow, or takes part in another refit."""


class Mismatch(RefitError):
    """Raised when an engine holds other values than the trainer sent.

    The message names the parameter. Only a bug or broken memory can cause it.
    """


class ParameterPart(NamedTuple):
    """A rectangle of a parameter.

    A 1-D parameter counts as [n, 1]. A parameter of more than two dimensions has all of them but the last joined to
    rows.
    """

    row: int
    column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class Readable(Protocol):
    """Parameters of a rank that can be read part by part."""

    def read(self, name: str, part: ParameterPart) -> Tensor:
        """Returns the values of the part, [rows, columns]; a view where that is possible."""
        ...


class Parameters(Readable, Protocol):
    """Parameters of a rank that can be read and written part by part."""

    def write(self, name: str, part: ParameterPart, values: Tensor) -> None:
        """Writes [rows, columns] `values` to the part, cast to the parameter's dtype."""
        ...

    def carried(self, names: Collection[str], dtype: torch.dtype) -> Self:
        """Returns the same parameters, in which those called `names`, of n float32 each, are seen as their bits.

        These are [n, 4 / width] numbers of a `dtype` of that width, so that they travel with others of it and lose
        nothing.
        """
        ...


@runtime_checkable
class Reachable(Protocol):
    """Parameters whose own memory a transport may read, or may write into in place of calling `write`."""

    def memory(self, name: str, part: ParameterPart, dtype: torch.dtype) -> Tensor | None:
        """Returns the memory of the part as uint8 [bytes].

        Returns None unless the part lies in one piece, on a CPU, and has this dtype.
        """
        ...


class Tensors:
    """Parameters that lie in plain tensors, found by name. Implements Parameters and Reachable."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._given = tensors
        self._tensors = {
            name: t.detach().view(-1, t.shape[-1]) if t.dim() > 1 else t.detach()[:, None]
            for name, t in tensors.items()
        }
        self._words = {name: as_words(t) for name, t in self._tensors.items()}
        self._cut: dict[
            tuple[str, ParameterPart, torch.dtype], np.ndarray | None
        ] = {}  # every refit asks for the same parts
        self._whole: dict[tuple[str, ParameterPart, torch.dtype], Tensor | None] = {}

    def read(self, name: str, part: ParameterPart) -> Tensor:
        return self._tensors[name][part.row : part.row + part.rows, part.column : part.column + part.columns]

    def write(self, name: str, part: ParameterPart, values: Tensor) -> None:
        target = self.words(name, part, values.dtype)
        source = None if target is None else as_words(values)
        if target is not None and source is not None:
            target[...] = source
        else:
            self.read(name, part).copy_(values)

    def carried(self, names: Collection[str], dtype: torch.dtype) -> Tensors:
        return Tensors({
            name: float32_bits(name, t.detach(), dtype) if name in names else t for name, t in self._given.items()
        })  # fmt: skip

    def memory(self, name: str, part: ParameterPart, dtype: torch.dtype) -> Tensor | None:
        key = name, part, dtype
        if key not in self._whole:
            found = self.read(name, part)
            lies = found.is_contiguous() and found.dtype == dtype and found.device.type == "cpu"
            self._whole[key] = found.view(-1).view(torch.uint8) if lies else None
        return self._whole[key]

    def words(self, name: str, part: ParameterPart, dtype: torch.dtype) -> np.ndarray | None:
        """Returns the part's own memory as 64-bit words, [rows, words].

        Returns None where the part is not made of whole words, does not lie on a CPU, or has another dtype.
        """
        found, width, key = self._words[name], dtype.itemsize, (name, part, dtype)
        if found is None or self._tensors[name].dtype != dtype:
            return None
        if key not in self._cut:
            first, last = part.column * width, (part.column + part.columns) * width
            whole = first % WORD_BYTES == 0 and last % WORD_BYTES == 0
            self._cut[key] = (
                found[part.row : part.row + part.rows, first // WORD_BYTES : last // WORD_BYTES] if whole else None
            )
        return self._cut[key]


# Returns what is to be added to a part of a parameter, [rows, columns] float32; None: nothing.
Added = Callable[[str, ParameterPart], Tensor | None]


class Sums:
    """Parameters to whose parts something is added when they are read. Implements Readable.

    The sum is made in float32 and rounded to the parameter's dtype; no sum is kept.
    """

    def __init__(self, tensors: Readable, added: Added) -> None:
        self._tensors, self._added = tensors, added

    def read(self, name: str, part: ParameterPart) -> Tensor:
        values, more = self._tensors.read(name, part), self._added(name, part)
        return values if more is None else more.add_(values).to(values.dtype)


def float32_bits(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the memory of a float32 tensor [n] as numbers of another dtype, [n, 4 / width].

    Raises ValueError for a tensor of another dtype.
    """
    if tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {tensor.dtype}: it must be float32, whatever the model's dtype is")
    return tensor.view(-1, 1).view(dtype)


def as_words(tensor: Tensor) -> np.ndarray | None:
    """Returns the memory of a [rows, columns] tensor as 64-bit words, or None where that is not possible.

    The tensor must be on a CPU, and its rows must be whole words. For short rows of two-byte numbers numpy copies words
    in half the time that torch takes. The tensor cannot be resized any more.
    """
    whole = all(
        n * tensor.element_size() % WORD_BYTES == 0
        for n in (tensor.shape[1], tensor.stride(0), tensor.storage_offset())
    )
    return tensor.view(torch.int64).numpy() if tensor.device.type == "cpu" and tensor.stride(1) == 1 and whole else None


@dataclass(frozen=True)
class Deadline:
    """The limits of time within one refit: for the whole of it, and for the wait for one message."""

    end: float  # when the whole refit must be is_over, as time.monotonic() counts
    message_s: float  # how long one message may take
    # Called now and then during a wait; true once the refit has ended without this side.
    is_over: Callable[[], bool] = lambda: False
    # Returns a value that changes while the other side is itself waiting for others, and so is not lost. The wait then
    # goes on.
    pulse: Callable[[], Any] = lambda: None

    @classmethod
    def start(cls, total_s: float, message_s: float, is_over: Callable[[], bool] = lambda: False) -> Deadline:
        """Returns the deadline of a refit that begins now."""
        return cls(time.monotonic() + total_s, message_s, is_over)

    def wait_s(self) -> float:
        """Returns the seconds that one wait may take from now, at least 0.01."""
        return max(0.01, min(self.message_s, self.end - time.monotonic()))

    def until(self, done: Callable[[float], bool]) -> str | None:
        """Calls `done` with the seconds that it may wait, until it returns true.

        Returns None, or a text that says why it did not come to that.
        """
        allowed = self.wait_s()
        end, pulse = time.monotonic() + allowed, self.pulse()
        while not done(max(0.01, min(RECHECK_S, end - time.monotonic()))):
            if self.is_over():
                return "the refit ended without it"
            if time.monotonic() >= end:
                before, pulse = pulse, self.pulse()
                if pulse == before or time.monotonic() >= self.end:
                    return f"no answer within {allowed:.1f} s"
                end = time.monotonic() + self.wait_s()
        return None


class Handle(Protocol):
    """A message on its way."""

    def wait(self, deadline: Deadline) -> Tensor:
        """Waits until the message is sent or has come. Returns it, uint8 [size]. Raises TransportError."""
        ...

    def release(self) -> None:
        """Says that the memory of the message may be used again. Called after the last use of a received message."""
        ...


class Transport(Protocol):
    """Carries messages between numbered peers.

    Messages from one peer to another arrive in the order in which they were sent.
    """

    @property
    def takes_pieces(self) -> bool:
        """Says whether this transport sends straight from any memory.

        If so, long slices are not copied into the message: both sides then give them as `pieces`.
        """
        ...

    @property
    def streams(self) -> bool:
        """Says whether the receiver may take several of the sender's pieces as one."""
        ...

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """Returns uint8 [size] to write a message into, for `send` to take."""
        ...

    def send(
        self, peer: int, label: str, message: Tensor, *, size_known: bool, pieces: Iterable[Tensor] = ()
    ) -> Handle:
        """Starts to send a message that was written to what `buffer` returned, or to the first bytes of that.

        `size_known`: the receiver knows the size of the message. `pieces`: further bytes that follow the message, each
        piece sent by itself as soon as the iterable yields it. Nobody may change them before the wait is over.
        """
        ...

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> Handle:
        """Starts to receive a message.

        `size`: its bytes, or None where the sender tells them. `pieces`: where the sender's pieces go, in order. A
        tensor is the memory to fill; a number stands for that many of the last bytes of `size`. After a wait that
        failed nothing is written to that memory any more.
        """
        ...

    def close(self) -> None:
        """Closes all connections and frees all buffers."""
        ...
