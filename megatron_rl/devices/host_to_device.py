"""Asynchronous copies from the host to a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is not imported at run time, so that batches can be created without torch
    import torch
    from torch import Tensor


def upload(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a CPU tensor to `device` and converts it to `dtype` there. Copies to a GPU use pinned memory and are
    asynchronous.

    A copy from unpinned memory would block the host until all previously launched work is done.
    """
    if device.type != "cuda":
        return tensor.to(device, dtype)
    moved = tensor.contiguous().pin_memory().to(device, non_blocking=True)  # an expanded tensor cannot be pinned
    return moved if dtype is None else moved.to(dtype)
