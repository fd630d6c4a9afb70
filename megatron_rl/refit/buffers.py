"""A pool of reusable message buffers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Buffers:
    """A thread-safe pool of message buffers.

    The pool replaces buffers that are too small, and never holds more buffers than were in use at the same time.
    """

    def __init__(self) -> None:
        self._free, self._change = list[Tensor](), threading.Lock()

    def take(self, size: int, device: torch.device) -> Tensor:
        """Returns a uint8 buffer [size] on `device`: a buffer of the pool if a large enough one is free, otherwise a
        new buffer.
        """
        with self._change:
            for i, kept in enumerate(self._free):
                if len(kept) >= size and kept.device == device:
                    return self._free.pop(i)[:size]
            if self._free:
                self._free.pop(0)  # drops a free buffer that is too small or on another device
        return torch.empty(size, dtype=torch.uint8, device=device)

    def give_back(self, message: Tensor) -> None:
        """Returns a buffer to the pool. `message` is a tensor that `take` returned, or a view of a part of it."""
        whole = torch.empty(0, dtype=torch.uint8, device=message.device).set_(message.untyped_storage())
        with self._change:
            self._free.append(whole)

    def clear(self) -> None:
        """Drops all buffers that are not in use."""
        with self._change:
            self._free.clear()


def parts(message: Tensor, pieces: Sequence[Tensor | int]) -> list[Tensor]:
    """Returns the list of uint8 tensors to receive a message and its pieces into, in the order in which they arrive.

    The first tensor is the start of `message`. It is followed by one tensor per entry of `pieces`. If a piece is a
    tensor, it is filled itself. If a piece is an int, it is a number of bytes, and the piece is received into that many
    bytes at the end of `message`; the bytes of all such pieces are consecutive.
    """
    place = len(message) - sum(piece for piece in pieces if isinstance(piece, int))
    out = [message[:place]]
    for piece in pieces:
        if isinstance(piece, int):
            out.append(message[place : place + piece])
            place += piece
        else:
            out.append(piece)
    return out
