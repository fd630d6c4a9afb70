"""Puts a role to sleep between its turns: frees gradient buffers, and moves the optimizer's state to host memory; the
weights too where engines take the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
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


class Weights:
    """The weights of a policy's chunks, which can leave the device for host memory. Their tensors stay the same ones,
    without storage while they are away, so that views of them are good again afterwards.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks, self.away = chunks, False
        self._held: list[Tensor] = []  # the tensors that own the storage; filled by the first `sleep`, as is `_host`
        self._host: list[Tensor] = []  # kept: pinned memory is slow to get

    def sleep(self) -> None:
        """Moves the weights to host memory and frees their storage. A second call does nothing."""
        if self.away:
            return
        if not self._held:
            self._held = list(_weight_tensors(self._chunks))
            self._host = [host_copy(tensor) for tensor in self._held]
        else:
            for tensor, host in zip(self._held, self._host, strict=True):
                host.copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        for tensor in self._held:
            tensor.untyped_storage().resize_(0)
        self.away = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Gives the weights storage again and moves them back, bit for bit. A second call does nothing."""
        if not self.away:
            return
        with torch.no_grad():
            for tensor, host in zip(self._held, self._host, strict=True):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                tensor.copy_(host, non_blocking=True)
        self.away = False

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Has the weights on the device in the block; they leave again where they were away."""
        away = self.away
        self.wake()
        try:
            yield
        finally:
            if away:
                self.sleep()

    def check(self) -> None:
        """Raises RuntimeError while the weights are away."""
        if self.away:
            raise RuntimeError("the weights of this policy are in host memory: call wake(), or use present()")

    def num_bytes(self) -> int:
        """Returns the bytes that the weights hold on their device now."""
        return 0 if self.away else sum(t.untyped_storage().size() for t in _weight_tensors(self._chunks))


@contextlib.contextmanager
def swapped(parameters: Sequence[torch.nn.Parameter], others: Sequence[Tensor]) -> Iterator[None]:
    """Puts other values into the parameters for the block; theirs come back bit for bit."""
    live = [host_copy(p) for p in parameters]
    try:
        _copy_into(parameters, others)
        yield
    finally:
        _copy_into(parameters, live)


def _copy_into(parameters: Sequence[torch.nn.Parameter], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value, non_blocking=True)


def gradient_bytes(chunks: list[Any]) -> int:
    """Returns the bytes that the gradient buffers hold now."""
    return sum(buffer.untyped_storage().size() for buffer in _gradient_buffers(chunks))


def _gradient_buffers(chunks: list[Any]) -> Iterator[Tensor]:
    """Yields the gradient buffers of dense parameters and of experts."""
    for chunk in chunks:
        for buffer in _buffers(chunk):
            yield buffer.grad_data


def _buffers(chunk: Any) -> list[Any]:
    """Returns core's buffers of a chunk: of dense parameters and of experts; none of one that is not trained."""
    wrapped: Any = chunk if isinstance(chunk, DistributedDataParallel) else None
    return [] if wrapped is None else [*wrapped.buffers, *wrapped.expert_parallel_buffers]


def _weight_tensors(chunks: list[Any]) -> Iterator[Tensor]:
    """Yields each storage of weights once: core's buffers, of which trained parameters are views, and what parameters
    are outside of them.
    """
    seen: set[int] = set()
    for chunk in chunks:
        own = [buffer.param_data for buffer in _buffers(chunk) if buffer.param_data is not None]
        for tensor in [*own, *(p.data for p in chunk.parameters())]:
            place = tensor.untyped_storage().data_ptr()
            if tensor.numel() and place not in seen:
                seen.add(place)
                yield tensor


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
