"""Encodes what changed between two messages of equal layout, exactly, as a bit mask or as a list of positions.

After an update at the learning rates of reinforcement learning most bfloat16 weights round to what they were. An
encoded message is a header [kind, count] of two int64, and then one of three bodies: all values; a bit per element and
the changed values; or the changed positions (int32) and values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

HEADER = 16  # bytes of the header
FULL, MASK, POSITIONS = range(3)


def encode(new: Tensor, old: Tensor | None, out: Tensor) -> int:
    """Writes to `out` what turns `old` into `new` (integers [n]); without `old`, all of `new`.

    Returns the number of bytes written.

    `out` is uint8 [at least HEADER + bytes of `new`]. `new` may lie in out[HEADER:].
    """
    size, width = new.numel(), new.element_size()
    kind, count, body = FULL, size, None
    if old is not None:
        changed = _changed(new, old)
        count = int(torch.count_nonzero(changed)) if changed.is_cuda else int(np.count_nonzero(changed.numpy()))
        costs = {FULL: size * width, MASK: (size + 7) // 8 + count * width, POSITIONS: count * (4 + width)}
        kind = min(costs, key=lambda k: costs[k])
        if kind == FULL:
            count = size  # also where some values are as they were
        else:
            values, positions = _pick(new, changed)
            marks = (
                positions.int()
                if kind == POSITIONS
                else torch.from_numpy(np.packbits(changed.cpu().numpy())).to(new.device)
            )
            body = torch.cat([_bytes(marks), _bytes(values)])
    out[:HEADER].copy_(torch.tensor([kind, count], dtype=torch.int64).view(torch.uint8))
    body = _bytes(new) if body is None else body
    if out[HEADER:].data_ptr() != body.data_ptr():
        out[HEADER : HEADER + len(body)].copy_(body)
    return HEADER + len(body)


def decode(message: Tensor, current: Tensor) -> Tensor:
    """Returns the new values, from an encoded message and the receiver's present values.

    `message` is uint8 [bytes]; bytes after its end are not read. `current` is integers [n]. It is changed and returned,
    unless the message is full: then the result is a view of the message. Raises ValueError for a message that does not
    fit.
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


def _changed(new: Tensor, old: Tensor) -> Tensor:
    """Returns bool [n], true where the values differ. On a CPU numpy compares several times as fast as torch."""
    return new != old if new.is_cuda else torch.from_numpy(np.not_equal(new.numpy(), old.numpy()))


def _pick(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (the values under the mask, their positions). On a CPU numpy picks several times as fast as torch."""
    if values.is_cuda:
        positions = mask.nonzero()[:, 0]
        return values[positions], positions
    found = np.flatnonzero(mask.numpy())
    return torch.from_numpy(values.numpy()[found]), torch.from_numpy(found)


def _bytes(values: Tensor) -> Tensor:
    """Returns numbers as uint8."""
    if not len(values):  # torch cannot view an empty tensor in another width
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    return values.contiguous().view(torch.uint8)


def _as_numbers(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns bytes as numbers of `dtype`; a copy where they do not lie at a multiple of their width."""
    if not len(part):
        return torch.empty(0, dtype=dtype, device=part.device)
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)
