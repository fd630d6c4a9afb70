"""Computes checksums of the values that a refit moves: on the host, or on a GPU.

A GPU's are sums of weighted elements, so that the host waits for none of them, and no value leaves the GPU. Values that
lie in the host's memory go up to it, piece by piece. A rank compares all checksums of a message at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

import torch
import xxhash
from torch import Tensor

Place = Literal["host", "device"]  # where all ranks of a refit compute checksums

# By the bytes of an element: the type that reads its bits as a number.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20  # elements that are weighted at once: 8 MiB for each of two temporary tensors
_MIX = -7046029254386353131  # 2^64 divided by the golden ratio, odd, as a signed number


def place_for(device: torch.device) -> Place:
    """Returns the place that suits a trainer on `device`."""
    return "device" if device.type == "cuda" else "host"


def checksums(slices: Iterable[Tensor], dtype: torch.dtype, sums_on: Place, device: torch.device) -> Tensor:
    """Returns the checksums of slices, at least one, whose values count as `dtype`, int64 [slices].

    They are on this rank's `device` where `sums_on` says so, wherever the slices lie, and else on the CPU.
    """
    whole = INTEGERS[dtype.itemsize]
    each = (value.detach().to(dtype).contiguous().view(-1).view(whole) for value in slices)  # one at a time in memory
    if sums_on == "device":
        return torch.stack([_weighted(values, device) for values in each])
    return torch.tensor([_digest(values) for values in each], dtype=torch.int64)


def _digest(values: Tensor) -> int:
    """Returns XXH3 of the bytes of `values`: 64 bits as a signed number."""
    number = xxhash.xxh3_64_intdigest(values.view(torch.uint8).cpu().numpy().data)
    return number - (1 << 64) if number >> 63 else number


def _weighted(values: Tensor, device: torch.device) -> Tensor:
    """Returns a sum of `values` [n] modulo 2^64, int64 [] on `device`, each with a factor of its place. The factors are
    odd: one wrong value always changes the sum."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK].to(device, non_blocking=True).to(torch.int64)
        total = total * _MIX + (part * _factors(device)[: len(part)]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Returns the factors of a chunk's elements, int64 [CHUNK], odd numbers without a pattern."""
    mixed = (torch.arange(CHUNK, dtype=torch.int64, device=device) + 1) * _MIX
    return (mixed ^ (mixed >> 29)) | 1
