"""Puts a role to sleep between its iterations: frees gradient buffers, and moves the optimizer's state to host memory;
the weights too where engines take the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.megatron import optimizer as optim

ALIGNMENT = 512  # bytes: where a copy begins in a block of pinned memory
BLOCK = 1 << 28  # bytes for which such a block has room, at least


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies in host memory, in order: pinned, and not yet complete, of tensors on a GPU.

    torch takes pinned memory in blocks of 2^n bytes (ATen/core/CachingHostAllocator.h). Many copies share each block;
    one by one those of a 7B model's weights would take nearly twice their size.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    places, blocks = _packed(sizes)
    locked = any(tensor.is_cuda for tensor in tensors)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=locked) for size in blocks]
    copies = []
    for tensor, (block, start) in zip(tensors, places, strict=True):
        own = memory[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(own.copy_(tensor.detach(), non_blocking=True))
    return copies


def _packed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Places pieces of these sizes into blocks -> the block and the start of each, and the bytes in each block.

    Each goes into the first block with room, the largest first. A block has room for the largest, and for BLOCK bytes.
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
    """What a policy holds on its device: gradients, the optimizer's state and the weights, which can leave the device
    for host memory.

    The tensors of the weights stay the same objects, without storage while they are away, so that views of them are
    valid again afterwards. `optimizer`: None for a policy that is not trained, which has weights alone.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self.asleep = self.away = False  # without gradients and optimizer; without weights
        self._held: list[Tensor] = []  # the tensors that own the storage; filled by the first `sleep`, as all lists
        self._pieces: list[Tensor] = []  # of them, flat, of BLOCK bytes at most
        self._host: list[Tensor] = []  # the pieces' copies. Kept: pinned memory is slow to get

    def sleep(self, *, weights: bool = False) -> None:
        """Frees gradients and moves the optimizer's state to host memory until `wake`; the `weights` too if asked.

        While the weights are there, forward passes, exports and checkpoints still work. A second call does nothing.
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
                self._pieces = [piece for one in flat for piece in one.split(BLOCK // one.element_size())]
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
        """Undoes `sleep`: weights come back bit for bit, gradients as zeros."""
        self._bring_weights()
        if self.asleep:
            for buffer in _gradient_buffers(self._chunks):
                buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
                buffer.zero_()
            _move_state(self._optimizer, next(self._chunks[0].parameters()).device)
            self.asleep = False

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Has the weights on the device in the block; they leave again where they were away."""
        away = self.away
        self._bring_weights()
        try:
            yield
        finally:
            if away:
                self.sleep(weights=True)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Wakes a sleeping policy for the block."""
        asleep = self.asleep
        if asleep:
            self.wake()
        yield
        if asleep:
            self.sleep()

    def check_present(self) -> None:
        """Raises RuntimeError while the weights are away."""
        if self.away:
            raise RuntimeError("the weights of this policy are in host memory: call wake(), or use present()")

    def weight_bytes(self) -> int:
        """Returns the bytes that the weights hold on their device now."""
        return 0 if self.away else sum(t.untyped_storage().size() for t in _weight_tensors(self._chunks))

    def _bring_weights(self) -> None:
        """Gives the weights storage again and copies them back, bit for bit."""
        if self.away:
            with torch.no_grad():
                for tensor in self._held:
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                for piece, host in zip(self._pieces, self._host, strict=True):
                    piece.copy_(host, non_blocking=True)
            self.away = False


def _wait_for_copies() -> None:
    """Waits for copies to host memory, which do not wait themselves."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@contextlib.contextmanager
def swapped(parameters: Sequence[torch.nn.Parameter], others: Sequence[Tensor]) -> Iterator[None]:
    """Exchanges the values of parameters and of tensors in host memory for the block; all come back bit for bit, also
    when memory runs out in it: what the exchange takes besides, BLOCK bytes at most, is there before it begins.
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


def _exchange(parameter: torch.nn.Parameter, other: Tensor, scratch: Tensor) -> None:
    """Exchanges the values piece by piece. On a GPU it does not wait: all copies are in one stream's order."""
    elements = max(1, scratch.nbytes // parameter.element_size())
    with torch.no_grad():
        pieces = parameter.detach().view(-1).split(elements), other.view(-1).split(elements)
        for own, kept in zip(*pieces, strict=True):
            held = scratch[: own.nbytes].view(own.dtype)
            held.copy_(own)
            own.copy_(kept, non_blocking=True)
            kept.copy_(held, non_blocking=True)


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
    states, masters = [], []
    for part in optim.parts(optimizer):
        for state in part.optimizer.state.values():
            states += [(state, name) for name, value in state.items() if torch.is_tensor(value)]
        masters += [master for group in part.shard_fp32_from_float16_groups for master in group if master is not None]
    moved = iter(_moved([*(state[name] for state, name in states), *(master.data for master in masters)], device))
    for state, name in states:
        state[name] = next(moved)
    for master in masters:
        master.data = next(moved)


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns tensors on another device, to or from pinned memory; those that are there already as they are."""
    if device.type != "cpu":
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    copies = iter(host_copies([tensor for tensor in tensors if tensor.device != device]))
    return [tensor if tensor.device == device else next(copies) for tensor in tensors]
