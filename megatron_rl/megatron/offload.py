"""Puts a role to sleep between its turns: frees gradient buffers and moves the optimizer's state to host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.megatron import optim


def sleep(chunks: list[Any], optimizer: Any) -> None:
    """Frees the gradient buffers' storage and moves the optimizer's tensors to the CPU. A second call does nothing."""
    for buffer in _gradient_buffers(chunks):
        buffer.untyped_storage().resize_(0)
    _move_state(optimizer, torch.device("cpu"))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # the copies to host memory do not wait themselves
        torch.cuda.empty_cache()


def host_copy(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory: pinned, and not yet complete, of a tensor on a GPU."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)


def wake(chunks: list[Any], optimizer: Any) -> None:
    """Gives the gradient buffers storage again (zeros) and moves the optimizer's tensors back."""
    for buffer in _gradient_buffers(chunks):
        size = buffer.numel() * buffer.element_size()
        if buffer.untyped_storage().size() < size:
            buffer.untyped_storage().resize_(size)
            buffer.zero_()
    _move_state(optimizer, _device(chunks))


def gradient_bytes(chunks: list[Any]) -> int:
    """Returns the bytes that the gradient buffers hold now."""
    return sum(buffer.untyped_storage().size() for buffer in _gradient_buffers(chunks))


def _gradient_buffers(chunks: list[Any]) -> Iterator[Tensor]:
    """Yields the gradient buffers of dense parameters and of experts."""
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer.grad_data


def _move_state(optimizer: Any, device: torch.device) -> None:
    """Moves the moments, and the float32 masters of lower-precision weights.

    Float32 weights are their own masters and stay.
    """
    for part in optim.parts(optimizer):
        for state in part.optimizer.state.values():
            for name in [n for n, value in state.items() if torch.is_tensor(value)]:
                state[name] = _moved(state[name], device)
        for group in part.shard_fp32_from_float16_groups:
            for master in group:
                if master is not None:
                    master.data = _moved(master.data, device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on another device, to or from pinned memory."""
    if tensor.device == device:
        return tensor
    return host_copy(tensor) if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _device(chunks: list[Any]) -> torch.device:
    """Returns the device of the weights."""
    return next(chunks[0].parameters()).device


def copy_into(parameters: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    """Gives parameters their values, without waiting for pinned memory."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value, non_blocking=True)
