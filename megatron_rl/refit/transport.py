"""Interfaces and errors of a refit: parameters that are read and written in parts, transports, and deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

WORD_BYTES = 8
RECHECK_S = 0.5  # interval in seconds at which a wait for a message checks whether the refit has ended


class RefitError(RuntimeError):
    """Raised when an engine did not receive the new weight version. The message names the rank, and the bucket (message
    of the plan) if the failure belongs to one.
    """


class TransportError(RefitError):
    """Raised when a message was not delivered: the other side is dead, too slow, or takes part in another refit."""


class Mismatch(RefitError):
    """Raised when the values in an engine differ from the values that the trainer sent.

    The message names the parameter. Only a bug or faulty memory can cause this error.
    """


class ParameterPart(NamedTuple):
    """The position and size of a 2-D block in a parameter, which is viewed as a matrix.

    A 1-D parameter is viewed as [n, 1]. For a parameter of more than two dimensions, all dimensions but the last are
    flattened into rows.
    """

    row: int
    column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class Readable(Protocol):
    """The interface for reading 2-D blocks of the parameters of one rank."""

    def read(self, name: str, part: ParameterPart) -> Tensor:
        """Returns the values of a part of the parameter `name`, [rows, columns]; a view if possible."""
        ...


class Parameters(Readable, Protocol):
    """The interface for reading and writing 2-D blocks of the parameters of one rank."""

    def write(self, name: str, part: ParameterPart, values: Tensor) -> None:
        """Writes `values` [rows, columns] to a part of the parameter `name`, cast to the dtype of the parameter."""
        ...

    def carried(self, names: Collection[str], dtype: torch.dtype) -> Self:
        """Returns a view of these parameters, in which the parameters in `names` are viewed bit for bit as `dtype`. If
        `dtype` is uint8, all parameters are viewed as uint8.

        Each parameter in `names` has n float32 values. It is viewed as [n, 4 / itemsize of `dtype`], so that it can be
        sent together with parameters of `dtype` without loss of precision.
        """
        ...


class Tensors:
    """The parameters of one rank, given as a mapping from names to tensors. Implements Parameters."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._parameters = tensors
        self._tensors = {
            name: t.detach().view(-1, t.shape[-1]) if t.dim() > 1 else t.detach()[:, None]
            for name, t in tensors.items()
        }
        self._words = {name: as_words(t) for name, t in self._tensors.items()}
        self._cut: dict[
            tuple[str, ParameterPart, torch.dtype], np.ndarray | None
        ] = {}  # a cache of parts, because every refit accesses the same parts
        self._memory: dict[tuple[str, ParameterPart, torch.dtype], Tensor | None] = {}

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
            name: bits(name, t.detach(), names, dtype) for name, t in self._parameters.items()
        })  # fmt: skip

    def memory(self, name: str, part: ParameterPart, dtype: torch.dtype) -> Tensor | None:
        """Returns the memory of a part of the parameter `name` as uint8 [bytes], which a transport may read or write
        directly.

        Returns None if the part is not contiguous, is not on a CPU, or has another dtype than `dtype`.
        """
        key = name, part, dtype
        if key not in self._memory:
            tensor = self.read(name, part)
            lies = tensor.is_contiguous() and tensor.dtype == dtype and tensor.device.type == "cpu"
            self._memory[key] = tensor.view(-1).view(torch.uint8) if lies else None
        return self._memory[key]

    def words(self, name: str, part: ParameterPart, dtype: torch.dtype) -> np.ndarray | None:
        """Returns the memory of a part of the parameter `name` as 64-bit words, [rows, words].

        Returns None if the part does not consist of whole words, is not on a CPU, or has another dtype than `dtype`.
        """
        words, width, key = self._words[name], dtype.itemsize, (name, part, dtype)
        if words is None or self._tensors[name].dtype != dtype:
            return None
        if key not in self._cut:
            first, last = part.column * width, (part.column + part.columns) * width
            aligned = first % WORD_BYTES == 0 and last % WORD_BYTES == 0
            self._cut[key] = (
                words[part.row : part.row + part.rows, first // WORD_BYTES : last // WORD_BYTES] if aligned else None
            )
        return self._cut[key]


# (parameter name, part) -> the values to add to the part, float32 [rows, columns], or None to add nothing.
Added = Callable[[str, ParameterPart], Tensor | None]


class Sums:
    """A read-only view of parameters that adds values (such as a LoRA delta) to each part that is read.

    Implements Readable. The sum is computed in float32 and rounded to the dtype of the parameter. Sums are not cached.
    """

    def __init__(self, tensors: Readable, added: Added) -> None:
        self._tensors, self._added = tensors, added

    def read(self, name: str, part: ParameterPart) -> Tensor:
        values, more = self._tensors.read(name, part), self._added(name, part)
        return values if more is None else more.add_(values).to(values.dtype)


def bits(name: str, tensor: Tensor, float32: Collection[str], dtype: torch.dtype) -> Tensor:
    """Returns the parameter `name` in the form in which it is sent in a message of elements of type `dtype`. If the
    parameter is float32, or if `dtype` is uint8, returns a bit-for-bit view as `dtype`. Otherwise, returns the tensor
    unchanged.

    A view has r times as many columns as the tensor, where r is the ratio of the old to the new element size. A 1-D
    tensor [n] counts as one column, so its view is [n, r].

    `float32`: names of the float32 parameters. Raises ValueError if one of these parameters has another dtype.
    """
    if name in float32 and tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {tensor.dtype}: it must be float32, whatever the model's dtype is")
    if name not in float32 and dtype != torch.uint8:
        return tensor
    return (tensor if tensor.dim() > 1 else tensor[:, None]).view(dtype)


def as_words(tensor: Tensor) -> np.ndarray | None:
    """Returns the memory of a [rows, columns] tensor as 64-bit words, or None if it cannot be viewed as words.

    The tensor must be on a CPU, and each row must consist of whole words. Words are used for speed: numpy copies short
    rows of two-byte numbers as words in half the time that torch takes. The tensor cannot be resized afterwards.
    """
    fits = all(
        n * tensor.element_size() % WORD_BYTES == 0
        for n in (tensor.shape[1], tensor.stride(0), tensor.storage_offset())
    )
    return tensor.view(torch.int64).numpy() if tensor.device.type == "cpu" and tensor.stride(1) == 1 and fits else None


@dataclass(frozen=True)
class Deadline:
    """The time limits of one refit: one for the whole refit, and one for each message."""

    end: float  # time.monotonic() value at which the whole refit must have ended
    message_s: float  # longest wait for one message, in seconds
    # Called every RECHECK_S seconds during a wait. Returns True if the refit has ended without this process.
    is_over: Callable[[], bool] = lambda: False
    # Returns a value that changes while the other process is alive but itself waiting for a message.
    # If the value has changed when a wait times out, the wait goes on.
    pulse: Callable[[], Any] = lambda: None

    @classmethod
    def start(cls, total_s: float, message_s: float, is_over: Callable[[], bool] = lambda: False) -> Deadline:
        """Returns the deadline of a refit that begins now and may take `total_s` seconds."""
        return cls(time.monotonic() + total_s, message_s, is_over)

    def wait_s(self) -> float:
        """Returns the longest time in seconds that one wait may take from now, at least 0.01."""
        return max(0.01, min(self.message_s, self.end - time.monotonic()))

    def until(self, done: Callable[[float], bool]) -> str | None:
        """Waits until a condition is true. `done`: function that checks the condition, and may block for the number of
        seconds that it gets as argument. It is called repeatedly.

        Returns None once `done` has returned True. Returns the reason as text if the wait timed out or the refit ended.
        """
        allowed = self.wait_s()
        end, pulse = time.monotonic() + allowed, self.pulse()
        while not done(max(0.01, min(RECHECK_S, end - time.monotonic()))):
            if self.is_over():
                return "the refit ended without it"
            if time.monotonic() >= end:
                last_pulse, pulse = pulse, self.pulse()
                if pulse == last_pulse or time.monotonic() >= self.end:
                    return f"no answer within {allowed:.1f} s"
                end = time.monotonic() + self.wait_s()
        return None


@dataclass(frozen=True)
class Handle:
    """A message whose transfer has been started, but may not be complete."""

    # Waits until the message has been sent or received, and returns the message, uint8 [size].
    # Raises TransportError if the message was not delivered before the deadline.
    wait: Callable[[Deadline], Tensor]
    # Releases the memory of the message for reuse. Called after the last use of the message.
    release: Callable[[], None] = lambda: None


class Transport(Protocol):
    """A channel that carries messages between peers, which are identified by integers.

    Messages from one peer to another arrive in the order in which they were sent.
    """

    @property
    def takes_pieces(self) -> bool:
        """Returns whether this transport can send pieces directly from any memory, in addition to the message itself.
        The receiver may then receive several consecutive pieces as a single piece.

        If True, long slices are not copied into the message. Sender and receiver pass them as `pieces` instead.
        """
        ...

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """Returns a buffer, uint8 [size]. The caller writes a message into the buffer and passes it to `send`."""
        ...

    def send(self, peer: int, label: str, message: Tensor, *, pieces: Iterable[Tensor] = ()) -> Handle:
        """Starts to send `message` to a peer.

        `message`: a tensor that `buffer` returned, or the first bytes of such a tensor.
        `label`: the name of the message in errors.
        `pieces`: further uint8 tensors to send after the message. Each piece may be sent as soon as the iterable
        yields it. The pieces must not be changed before the handle's `wait` has returned.
        """
        ...

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> Handle:
        """Starts to receive a message from a peer.

        `label`: the name of the message in errors.
        `size`: size of the message in bytes, or None if the sender sends the size along.
        `pieces`: the destinations of the sender's pieces, in order. A tensor receives the piece itself. An int is the
        size of the piece in bytes: the piece is stored in the last bytes of the returned message. After a failed wait,
        the transport does not write to any of this memory.
        """
        ...

    def close(self) -> None:
        """Closes all connections and frees all buffers."""
        ...
