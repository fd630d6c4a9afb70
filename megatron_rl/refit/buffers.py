"""Keeps the memory of messages, to use it again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Buffers:
    """A pool of message buffers. Safe to use from many threads.

    Buffers grow to the largest message, and there are never more than are in use at one time.
    """

    def __init__(self) -> None:
        self._free, self._change = list[Tensor](), threading.Lock()

    def take(self, size: int, device: torch.device) -> Tensor:
        """Returns uint8 [size] on `device`."""
        with self._change:
            for i, kept in enumerate(self._free):
                if len(kept) >= size and kept.device == device:
                    return self._free.pop(i)[:size]
            if self._free:
                self._free.pop(0)  # it is too small
        return torch.empty(size, dtype=torch.uint8, device=device)

    def give_back(self, message: Tensor) -> None:
        """Takes back what `take` returned, or a part of it."""
        whole = torch.empty(0, dtype=torch.uint8, device=message.device).set_(message.untyped_storage())
        with self._change:
            self._free.append(whole)

    def clear(self) -> None:
        """Forgets all buffers that are not in use."""
        with self._change:
            self._free.clear()


def parts(message: Tensor, pieces: Sequence[Tensor | int]) -> list[Tensor]:
    """Splits a received stream into the places where it goes, in order.

    The first place is `message` without its last bytes. Then each piece has one: a tensor is a place itself, and a
    number stands for that many of the last bytes of `message`.
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
