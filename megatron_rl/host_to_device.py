"""Copies from the host to a GPU that the host does not wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # batches are made without torch
    import torch
    from torch import Tensor


def upload(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a CPU tensor on `device`, there as `dtype`. To a GPU it goes through pinned memory.

    A copy from other memory would hold the host until all that was started before is done.
    """
    if device.type != "cuda":
        return tensor.to(device, dtype)
    moved = tensor.pin_memory().to(device, non_blocking=True)
    return moved if dtype is None else moved.to(dtype)
