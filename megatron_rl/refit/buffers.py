"""Memory of messages, used again and again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Buffers:
    """They grow to the largest message, and do not become more than are in use at a time. For many threads."""

    def __init__(self) -> None:
        self._free, self._change = list[Tensor](), threading.Lock()

    def take(self, size: int, device: torch.device) -> Tensor:
        """uint8 [size]"""
        with self._change:
            for i, kept in enumerate(self._free):
                if len(kept) >= size and kept.device == device:
                    return self._free.pop(i)[:size]
            if self._free:
                self._free.pop(0)  # too small
        return torch.empty(size, dtype=torch.uint8, device=device)

    def give_back(self, message: Tensor) -> None:
        """What `take` gave, or a part of it."""
        whole = torch.empty(0, dtype=torch.uint8, device=message.device).set_(message.untyped_storage())
        with self._change:
            self._free.append(whole)

    def clear(self) -> None:
        with self._change:
            self._free.clear()


def parts(message: Tensor, pieces: Sequence[Tensor | int]) -> list[Tensor]:
    """What comes after each other: the message without its last bytes, and the pieces; for a number so many of these bytes."""
    place = len(message) - sum(piece for piece in pieces if isinstance(piece, int))
    out = [message[:place]]
    for piece in pieces:
        if isinstance(piece, int):
            out.append(message[place : place + piece])
            place += piece
        else:
            out.append(piece)
    return out
