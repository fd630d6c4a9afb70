"""Computes checksums of the weights that a refit transfers, on the host or on a GPU.

A checksum on a GPU is a weighted sum of the elements of a slice. Computing it needs no synchronization with the host,
and no parameter leaves the GPU. Parameters in host memory are copied to the GPU chunk by chunk. A rank compares all
checksums of a message at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

import torch
import xxhash
from torch import Tensor

Place = Literal["host", "device"]  # where the ranks compute checksums; the same on all ranks

# Element size in bytes -> integer dtype of the same size, to view the bits of an element as an integer.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20  # number of elements summed at once, which takes two temporary int64 tensors of 8 MiB each
# multiplier that generates the pseudo-random factors: 2^64 / golden ratio, rounded to an odd number, as signed int64
_MIX = -7046029254386353131


def place_for(device: torch.device) -> Place:
    """Returns where a trainer on `device` computes checksums: "device" for a CUDA device, otherwise "host"."""
    return "device" if device.type == "cuda" else "host"


def checksums(slices: Iterable[Tensor], dtype: torch.dtype, sums_on: Place, device: torch.device) -> Tensor:
    """Returns one checksum per slice (a 2-D block of a parameter), int64 [slices]. The slices are cast to `dtype`
    first; at least one slice is required.

    If `sums_on` is "device", the returned tensor is on this rank's `device`, wherever the slices are. Otherwise the
    returned tensor is on the CPU.
    """
    kind = INTEGERS[dtype.itemsize]
    # a generator, so that one slice at a time is in memory
    integers = (value.detach().to(dtype).contiguous().view(-1).view(kind) for value in slices)
    if sums_on == "device":
        return torch.stack([_weighted(values, device) for values in integers])
    return torch.tensor([_digest(values) for values in integers], dtype=torch.int64)


def _digest(values: Tensor) -> int:
    """Returns the 64-bit XXH3 hash of the bytes of `values` as a signed integer."""
    number = xxhash.xxh3_64_intdigest(values.view(torch.uint8).cpu().numpy().data)
    return number - (1 << 64) if number >> 63 else number


def _weighted(values: Tensor, device: torch.device) -> Tensor:
    """Returns a sum of `values` [n], each multiplied by a factor, modulo 2^64, as int64 [] on `device`.

    The factor of an element depends on the element's position. All factors are odd, so a single wrong value always
    changes the sum."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK].to(device, non_blocking=True).to(torch.int64)
        total = total * _MIX + (part * _factors(device)[: len(part)]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Returns the factors by which a checksum multiplies the elements of a chunk: pseudo-random odd int64 [CHUNK]."""
    mixed = (torch.arange(CHUNK, dtype=torch.int64, device=device) + 1) * _MIX
    return (mixed ^ (mixed >> 29)) | 1
