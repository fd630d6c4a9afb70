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
        buffer = torch.empty(0, dtype=torch.uint8, device=message.device).set_(message.untyped_storage())
        with self._change:
            self._free.append(buffer)

    def clear(self) -> None:
        """Drops all buffers that are not in use."""
        with self._change:
            self._free.clear()


def parts(message: Tensor, pieces: Sequence[Tensor | int]) -> list[Tensor]:
    """Returns the uint8 tensors into which a message and its separately sent pieces are received, in order of arrival.

    The first tensor is the beginning of `message`. One tensor per entry of `pieces` follows. If the entry is a tensor,
    the piece is received into this tensor. If the entry is an int, it is the size of the piece in bytes, and the piece
    is received into the end of `message`, where the pieces with int entries lie one after the other.
    """
    place = len(message) - sum(piece for piece in pieces if isinstance(piece, int))
    views = [message[:place]]
    for piece in pieces:
        if isinstance(piece, int):
            views.append(message[place : place + piece])
            place += piece
        else:
            views.append(piece)
    return views
