"""Puts a role to sleep between training iterations: frees gradient buffers and moves optimizer state to host memory.

If engines need the device, the weights are moved to host memory too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.megatron import optimizer as optim

ALIGNMENT = 512  # alignment of tensor copies within a block of pinned memory, in bytes
BLOCK = 1 << 28  # minimum size of a block of pinned memory, in bytes


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of tensors in host memory, in the same order.

    Copies of GPU tensors are pinned and asynchronous: synchronize the stream before reading them. torch allocates
    pinned memory in blocks of 2^n bytes (ATen/core/CachingHostAllocator.h), so this function places many copies in one
    block. Separate allocations for the weights of a 7B model would take nearly twice the size of the weights.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    places, blocks = _packed(sizes)
    locked = any(tensor.is_cuda for tensor in tensors)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=locked) for size in blocks]
    copies = []
    for tensor, (block, start) in zip(tensors, places, strict=True):
        host_copy = memory[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(host_copy.copy_(tensor.detach(), non_blocking=True))
    return copies


def _packed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Packs pieces of the given sizes into blocks. Returns ([(block, offset) of each piece], [used bytes per block]).

    Pieces are placed first-fit, largest first. The capacity of a block is the smallest power of two that is at least
    BLOCK bytes and at least the size of the largest piece.
    """
    room = 1 << (max([BLOCK, *sizes]) - 1).bit_length()
    places, used = dict[int, tuple[int, int]](), list[int]()
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        block = next((n for n, bytes_ in enumerate(used) if bytes_ + sizes[piece] <= room), len(used))
        used += [0] if block == len(used) else []
        places[piece] = block, used[block]
        used[block] += sizes[piece]
    return [places[piece] for piece in range(len(sizes))], used


class PolicyMemory:
    """The device memory of a policy: gradients, optimizer state and weights, which can be moved to host memory.

    While the weights are in host memory, their device tensors remain the same objects without storage, so that views of
    the tensors become valid again when the weights return. `optimizer` is None for a policy that is not trained; such a
    policy has only weights.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        # `asleep`: True while gradients and optimizer state are not on the device. `away`: the same for the weights.
        self.asleep = self.away = False
        # The next three lists are filled when the weights leave the device for the first time.
        self._held: list[Tensor] = []  # tensors that own the device storage of the weights
        self._pieces: list[Tensor] = []  # flat views of `_held`, at most BLOCK bytes each
        self._host: list[Tensor] = []  # copies of `_pieces`; never freed, because pinned memory is slow to allocate

    def sleep(self, *, weights: bool = False) -> None:
        """Frees the gradients' device memory and moves the optimizer state to host memory, until `wake` is called. With
        `weights`, the weights are also moved to host memory.

        As long as the weights are on the device, forward passes, exports and checkpoints still work. Calling `sleep`
        again is a no-op.
        """
        if self._optimizer is not None and not self.asleep:
            for buffer in _gradient_buffers(self._chunks):
                buffer.untyped_storage().resize_(0)
            _move_state(self._optimizer, torch.device("cpu"))
            _wait_for_copies()
            self.asleep = True
        if weights and not self.away:
            if not self._held:
                self._held = list(_weight_tensors(self._chunks))
                flat = [tensor.detach().view(-1) for tensor in self._held]
                self._pieces = [piece for vector in flat for piece in vector.split(BLOCK // vector.element_size())]
                self._host = host_copies(self._pieces)
            else:
                for piece, host in zip(self._pieces, self._host, strict=True):
                    host.copy_(piece, non_blocking=True)
            _wait_for_copies()
            for tensor in self._held:
                tensor.untyped_storage().resize_(0)
            self.away = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undoes `sleep`: moves weights and optimizer state back to the device, bit for bit, and reallocates the
        gradients as zeros."""
        self._bring_weights()
        if self.asleep:
            for buffer in _gradient_buffers(self._chunks):
                buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
                buffer.zero_()
            _move_state(self._optimizer, next(self._chunks[0].parameters()).device)
            self.asleep = False

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Context manager that moves the weights to the device for the block. If the weights were in host memory before
        the block, they are moved back to host memory when the block ends."""
        away = self.away
        self._bring_weights()
        try:
            yield
        finally:
            if away:
                self.sleep(weights=True)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Context manager that calls `wake` before the block if the policy sleeps (its optimizer state is in host
        memory), and then `sleep` when the block ends."""
        asleep = self.asleep
        if asleep:
            self.wake()
        yield
        if asleep:
            self.sleep()

    def check_present(self) -> None:
        """Raises RuntimeError if the weights are in host memory."""
        if self.away:
            raise RuntimeError("the weights of this policy are in host memory: call wake(), or use present()")

    def held_bytes(self) -> dict[str, int]:
        """Returns the device memory that the weights, gradients and optimizer state occupy now, in bytes."""
        moments, masters = ([], []) if self._optimizer is None or self.asleep else _state(self._optimizer)
        return {
            "weights": 0 if self.away else sum(t.untyped_storage().size() for t in _weight_tensors(self._chunks)),
            "gradients": gradient_bytes(self._chunks),
            "optimizer state": sum(t.nbytes for t in [*(held[name] for held, name in moments), *masters]),
        }

    def _bring_weights(self) -> None:
        """Reallocates the device storage of the weights and copies the weights back from host memory, bit for bit.
        No-op if the weights are on the device."""
        if self.away:
            with torch.no_grad():
                for tensor in self._held:
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                for piece, host in zip(self._pieces, self._host, strict=True):
                    piece.copy_(host, non_blocking=True)
            self.away = False


def _wait_for_copies() -> None:
    """Waits until asynchronous copies to host memory have finished."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@contextlib.contextmanager
def swapped(parameters: Sequence[torch.nn.Parameter], others: Sequence[Tensor]) -> Iterator[None]:
    """Context manager that swaps the values of parameters with tensors in host memory for the block. When the block
    ends, all values are restored bit for bit, even if the block runs out of memory: the scratch buffer of at most BLOCK
    bytes is allocated beforehand.
    """
    room = max((min(parameter.nbytes, BLOCK) for parameter in parameters), default=0)
    scratch = torch.empty(room, dtype=torch.uint8, device=parameters[0].device if parameters else "cpu")
    exchanged: list[tuple[torch.nn.Parameter, Tensor]] = []
    try:
        for pair in zip(parameters, others, strict=True):
            _exchange(*pair, scratch)
            exchanged.append(pair)
        yield
    finally:
        for pair in reversed(exchanged):
            _exchange(*pair, scratch)


def _exchange(parameter: torch.nn.Parameter, swapped_in: Tensor, scratch: Tensor) -> None:
    """Swaps the values of `parameter` and `swapped_in` piece by piece. On a GPU the copies are asynchronous and run in
    the order of the CUDA stream."""
    elements = max(1, scratch.nbytes // parameter.element_size())
    with torch.no_grad():
        pieces = parameter.detach().view(-1).split(elements), swapped_in.view(-1).split(elements)
        for piece, kept in zip(*pieces, strict=True):
            held = scratch[: piece.nbytes].view(piece.dtype)
            held.copy_(piece)
            piece.copy_(kept, non_blocking=True)
            kept.copy_(held, non_blocking=True)


def gradient_bytes(chunks: list[Any]) -> int:
    """Returns the device memory that the gradient buffers occupy now, in bytes."""
    return sum(buffer.untyped_storage().size() for buffer in _gradient_buffers(chunks))


def _gradient_buffers(chunks: list[Any]) -> Iterator[Tensor]:
    """Yields the gradient buffers of all model chunks, for dense parameters and for experts."""
    for chunk in chunks:
        for buffer in _buffers(chunk):
            yield buffer.grad_data


def _buffers(chunk: Any) -> list[Any]:
    """Returns Megatron-core's buffer objects of a model chunk, for dense parameters and for experts. Each object holds
    a parameter buffer and a gradient buffer. Returns an empty list for a chunk that is not trained."""
    wrapped: Any = chunk if isinstance(chunk, DistributedDataParallel) else None
    return [] if wrapped is None else [*wrapped.buffers, *wrapped.expert_parallel_buffers]


def _weight_tensors(chunks: list[Any]) -> Iterator[Tensor]:
    """Yields one tensor for each device storage that holds weights. The tensors are Megatron-core's buffers, which
    contain the trained parameters as views, and the parameters outside of these buffers.
    """
    seen: set[int] = set()
    for chunk in chunks:
        buffer_data = [buffer.param_data for buffer in _buffers(chunk) if buffer.param_data is not None]
        for tensor in [*buffer_data, *(p.data for p in chunk.parameters())]:
            place = tensor.untyped_storage().data_ptr()
            if tensor.numel() and place not in seen:
                seen.add(place)
                yield tensor


def _state(optimizer: Any) -> tuple[list[tuple[dict[str, Tensor], str]], list[Tensor]]:
    """Returns (list of pairs, list of tensors). The pairs are (state dictionary, key of a moment of Adam in the
    dictionary). The tensors are the float32 master copies of lower-precision weights.
    """
    states, masters = list[tuple[dict[str, Tensor], str]](), list[Tensor]()
    for part in optim.parts(optimizer):
        for state in part.optimizer.state.values():
            states += [(state, name) for name, value in state.items() if torch.is_tensor(value)]
        masters += [master for group in part.shard_fp32_from_float16_groups for master in group if master is not None]
    return states, masters


def _move_state(optimizer: Any, device: torch.device) -> None:
    """Moves Adam's moments, and the float32 master copies of lower-precision weights, to `device`.

    Float32 weights have no separate master copies.
    """
    states, masters = _state(optimizer)
    tensors = [*(state[name] for state, name in states), *(master.data for master in masters)]
    if device.type == "cpu":  # to pinned memory
        copies = iter(host_copies([tensor for tensor in tensors if tensor.device != device]))
        moved = (tensor if tensor.device == device else next(copies) for tensor in tensors)
    else:
        moved = (tensor.to(device, non_blocking=True) for tensor in tensors)
    for state, name in states:
        state[name] = next(moved)
    for master in masters:
        master.data = next(moved)
