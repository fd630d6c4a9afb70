"""Lossless delta encoding: encodes the elements that differ between two messages of the same layout.

At the learning rates of reinforcement learning, most bfloat16 weights are unchanged after an optimizer step, because
the update is lost in rounding. An encoded message is a header [kind, count] of two int64, followed by one of three
bodies: all values (FULL); one bit per element and the changed values (MASK); or the indices of the changed elements
(int32) and their values (POSITIONS).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

HEADER = 16  # size of the header in bytes
FULL, MASK, POSITIONS = range(3)


def encode(new: Tensor, old: Tensor | None, encoded: Tensor) -> int:
    """Encodes the difference of `new` from `old` into `encoded` and returns the number of bytes written.

    Chooses the encoding with the smallest result among the three encodings of this module. If `old` is None, writes all
    of `new`.

    `new`, `old`: integers [n]. `encoded`: uint8, at least HEADER bytes longer than `new`. `new` may be a view of
    encoded[HEADER:].
    """
    size, width = new.numel(), new.element_size()
    kind, count, body = FULL, size, None
    if old is not None:
        # On a CPU, numpy is several times faster than torch.
        changed = new != old if new.is_cuda else torch.from_numpy(np.not_equal(new.numpy(), old.numpy()))
        count = int(torch.count_nonzero(changed)) if changed.is_cuda else int(np.count_nonzero(changed.numpy()))
        costs = {FULL: size * width, MASK: (size + 7) // 8 + count * width, POSITIONS: count * (4 + width)}
        kind = min(costs, key=lambda k: costs[k])
        if kind == FULL:
            count = size  # the encoding FULL stores all values, including the unchanged values
        else:
            values, positions = _pick(new, changed)
            marks = (
                positions.int()
                if kind == POSITIONS
                else torch.from_numpy(np.packbits(changed.cpu().numpy())).to(new.device)
            )
            body = torch.cat([_bytes(marks), _bytes(values)])
    encoded[:HEADER].copy_(torch.tensor([kind, count], dtype=torch.int64).view(torch.uint8))
    body = _bytes(new) if body is None else body
    if encoded[HEADER:].data_ptr() != body.data_ptr():
        encoded[HEADER : HEADER + len(body)].copy_(body)
    return HEADER + len(body)


def decode(message: Tensor, current: Tensor) -> Tensor:
    """Applies an encoded message to the receiver's current values and returns the new values, integers [n].

    `message`: uint8 [bytes]; bytes after the end of the encoded message are ignored. `current`: integers [n]. If the
    message is a delta, `current` is changed in place and returned. If the message holds all values, the result is a
    view of `message` if the alignment allows it. Raises ValueError if the message was encoded for another number of
    values than `current` has, or is malformed.
    """
    size, width = current.numel(), current.element_size()
    kind, count = message[:HEADER].cpu().view(torch.int64).tolist()
    body = message[HEADER:]
    positions = {FULL: 0, MASK: (size + 7) // 8, POSITIONS: count * 4}.get(kind)
    if positions is None or not 0 <= count <= size or len(body) < positions + count * width:
        raise ValueError(
            f"a delta of kind {kind}, {count} values and {len(body)} bytes does not fit a message of {size} elements"
        )
    values = _as_numbers(body[positions : positions + count * width], current.dtype)
    if kind == FULL:
        return values
    if kind == MASK:
        bits = np.unpackbits(body[:positions].cpu().numpy(), count=size)
        where = torch.from_numpy(np.flatnonzero(bits)).to(current.device)
    else:
        where = _as_numbers(body[:positions], torch.int32).long()
    if len(where) != count or (count and int(where.max()) >= size):
        raise ValueError(
            f"a delta of {count} values names {len(where)} positions, or one that is beyond {size} elements"
        )
    current[where] = values
    return current


def _pick(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (the values selected by the mask, their indices). On a CPU, uses numpy, which is several times faster
    than torch.
    """
    if values.is_cuda:
        positions = mask.nonzero()[:, 0]
        return values[positions], positions
    indices = np.flatnonzero(mask.numpy())
    return torch.from_numpy(values.numpy()[indices]), torch.from_numpy(indices)


def _bytes(values: Tensor) -> Tensor:
    """Returns the memory of `values` as uint8 [bytes]."""
    if not len(values):  # torch cannot view an empty tensor as a dtype of another width
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    return values.contiguous().view(torch.uint8)


def _as_numbers(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bytes in `part` (uint8) as numbers of `dtype`: a view, or a copy if the bytes are not aligned for
    `dtype`.
    """
    if not len(part):
        return torch.empty(0, dtype=dtype, device=part.device)
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)
