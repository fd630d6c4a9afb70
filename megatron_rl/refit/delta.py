"""What changed between two messages of equal layout, exactly, in as few bytes as a bit mask or a list of places gives.

After an update at the learning rates of reinforcement learning most bfloat16 weights round to what they were. A message is a header
[kind, count] of two int64, and then: all values; or a bit per element and the changed values; or the changed places (int32) and values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

HEADER = 16  # bytes
FULL, MASK, PLACES = range(3)


def encode(new: Tensor, old: Tensor | None, out: Tensor) -> int:
    """Writes to `out` (uint8 [at least HEADER + bytes of `new`]) what turns `old` into `new` (integers [n]); without `old`, all of it.

    Returns the bytes written. `new` may lie in out[HEADER:].
    """
    size, width = new.numel(), new.element_size()
    kind, count, body = FULL, size, None
    if old is not None:
        changed = _changed(new, old)
        count = int(torch.count_nonzero(changed)) if changed.is_cuda else int(np.count_nonzero(changed.numpy()))
        costs = {FULL: size * width, MASK: (size + 7) // 8 + count * width, PLACES: count * (4 + width)}
        kind = min(costs, key=lambda k: costs[k])
        if kind != FULL:
            values, places = _taken(new, changed)
            marks = (
                places.int() if kind == PLACES else torch.from_numpy(np.packbits(changed.cpu().numpy())).to(new.device)
            )
            body = torch.cat([_bytes(marks), _bytes(values)])
    out[:HEADER].copy_(torch.tensor([kind, count], dtype=torch.int64).view(torch.uint8))
    body = _bytes(new) if body is None else body
    if out[HEADER:].data_ptr() != body.data_ptr():
        out[HEADER : HEADER + len(body)].copy_(body)
    return HEADER + len(body)


def decode(message: Tensor, current: Tensor) -> Tensor:
    """What `encode` wrote (uint8 [bytes], trailing bytes are not read), and the receiver's present values (integers [n]) -> the new values.

    Changes `current`, unless the message is full: then a view of it is returned. Raises ValueError for a message that does not fit.
    """
    size, width = current.numel(), current.element_size()
    kind, count = message[:HEADER].cpu().view(torch.int64).tolist()
    body = message[HEADER:]
    places = {FULL: 0, MASK: (size + 7) // 8, PLACES: count * 4}.get(kind)
    if places is None or not 0 <= count <= size or len(body) < places + count * width:
        raise ValueError(
            f"a delta of kind {kind} with {count} values does not fit {size} elements in {len(body)} bytes"
        )
    values = _as(body[places : places + count * width], current.dtype)
    if kind == FULL:
        return values
    if kind == MASK:
        bits = np.unpackbits(body[:places].cpu().numpy(), count=size)
        where = torch.from_numpy(np.flatnonzero(bits)).to(current.device)
    else:
        where = _as(body[:places], torch.int32).long()
    if len(where) != count or (count and int(where.max()) >= size):
        raise ValueError(f"a delta names {len(where)} places of {size} elements, and has {count} values")
    current[where] = values
    return current


def _changed(new: Tensor, old: Tensor) -> Tensor:
    """bool [n]. On CPU numpy compares and picks several times as fast as torch."""
    return new != old if new.is_cuda else torch.from_numpy(np.not_equal(new.numpy(), old.numpy()))


def _taken(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(the values under the mask, their places)."""
    if values.is_cuda:
        places = mask.nonzero()[:, 0]
        return values[places], places
    found = np.flatnonzero(mask.numpy())
    return torch.from_numpy(values.numpy()[found]), torch.from_numpy(found)


def _bytes(values: Tensor) -> Tensor:
    if not len(values):  # torch cannot look at nothing in another width
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    return values.contiguous().view(torch.uint8)


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied where they do not lie at a multiple of their width."""
    if not len(part):
        return torch.empty(0, dtype=dtype, device=part.device)
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)
