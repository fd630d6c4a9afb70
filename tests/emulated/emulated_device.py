"""A pretended CUDA device for machines without one: tensors that say `cuda:0`, hold their numbers in CPU tensors, and
refuse what a GPU refuses.

A DeviceTensor cannot be mixed with a CPU tensor in one operation, cannot be read by numpy, and counts (see
emulated_ledger.py) the kernels that it starts, the places where the host waits for the device, and the copies from and
to memory that is not pinned. `install` puts it under torch's names for CUDA. It must be called before megatron-core or
this project's Megatron code is imported, in a process that does nothing else.

What it does not know: streams (everything happens at once, in order), memory that is too small, the precision and the
speed of kernels, torch.compile (functions stay as they are), Triton, inference mode (it is no_grad).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from emulated_ledger import Ledger
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class Random:
    """The state of the device's random numbers. They are drawn by the CPU's generator."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    def get_state(self) -> torch.Tensor:
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        self._state = state.clone()

    def manual_seed(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Makes torch draw from this state in the block."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(before)


RANDOM = Random()


class Backend(_DummyBackendModule):
    """The device as torch's own code knows it."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return RANDOM.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        RANDOM.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        RANDOM.manual_seed(seed)


_setup_privateuseone_for_python_backend("emulated", backend_module=Backend())

BELOW = torch.device("emulated:0")  # what torch's C++ code takes the device for
CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
LEDGER = Ledger()
aten = torch.ops.aten

# Operations whose result the host must know, by what the ledger calls them.
WAITING = {
    "_local_scalar_dense": "item",
    "is_nonzero": "item",
    "equal": "equal",
    "nonzero": "nonzero",
    "masked_select": "nonzero",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
}
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Operations that start no kernel, beside those that torch itself calls views.
WITHOUT_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "record_stream", "_local_scalar_dense"),
}
FROM_PAGEABLE, FROM_PINNED, TO_HOST = "copy from pageable memory", "blocking copy from pinned memory", "copy to host"

_pinned: list[torch.Tensor] = []  # pinned memory is never given back, so that an address stays what it was
_pinned_addresses: set[int] = set()
_living: dict[int, weakref.ref[DeviceTensor]] = {}  # every tensor on the device, by its number in Python
_peaks: list[Peak] = []  # those that are watched now


class Peak:
    """The most memory that tensors on the device have held since the block `watched_peak` began."""

    def __init__(self) -> None:
        self.bytes = allocated_bytes()


@contextlib.contextmanager
def watched_peak() -> Iterator[Peak]:
    """Looks at the memory of all tensors whenever one is made in the block, which is slow."""
    peak = Peak()
    _peaks.append(peak)
    try:
        yield peak
    finally:
        _peaks.remove(peak)


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on `cuda:0`. Its numbers lie in `raw`, a CPU tensor.

    `away`: its `data` has been set to a CPU tensor, and it says so.
    """

    raw: torch.Tensor
    away = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> DeviceTensor:
        assert not isinstance(raw, DeviceTensor), "only a CPU tensor can be put on the device"
        self = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=BELOW,
            requires_grad=requires_grad,
        )  # fmt: skip
        self.raw = raw
        number = id(self)
        _living[number] = weakref.ref(self, lambda _: _living.pop(number, None))
        for peak in _peaks:
            peak.bytes = max(peak.bytes, allocated_bytes())
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, dict(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CPU if self.away else CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not self.away

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.away

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.raw.detach() if self.away else DeviceTensor(self.raw.detach())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.away = not here(value)
        adopt(self, _raw(value))

    def cuda(self, *unused: Any, **ignored: Any) -> DeviceTensor:
        return self

    def cpu(self, *unused: Any, **ignored: Any) -> torch.Tensor:
        return self.to(CPU)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Moves or casts, as torch does; a move to the same device with the same dtype gives the tensor itself."""
        device, dtype = target_of(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name in ("non_blocking", "copy", "memory_format")}
        if self.away:
            return self.raw.to(*args, **kwargs)
        if device is None or device.type != "cpu":
            return self if dtype is None and not rest.get("copy") else super().to(dtype or self.dtype, **rest)
        return super().to(CPU, dtype or self.dtype, **rest)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *unused: Any, **ignored: Any) -> Any:
        if self.away:
            return self.raw.numpy()
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first")

    def __array__(self, *unused: Any, **ignored: Any) -> Any:
        return self.numpy()

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        return None

    def pin_memory(self, *unused: Any) -> torch.Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def is_pinned(self, *unused: Any) -> bool:
        return False

    def type(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if args or kwargs:
            return super().type(*args, **kwargs)
        return self.raw.type().replace("torch.", "torch.cuda.", 1)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DeviceTensor, (self.raw.detach().clone(), self.requires_grad)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copy = DeviceTensor(self.raw.detach().clone())
        made = torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
        memo[id(self)] = made
        return made


def here(value: Any) -> bool:
    """Says whether a value is a tensor on the device."""
    return isinstance(value, DeviceTensor) and not value.away


def adopt(tensor: DeviceTensor, raw: torch.Tensor) -> None:
    """Makes a tensor have the numbers, the shape and the dtype of `raw`."""
    torch.Tensor.data.__set__(tensor, DeviceTensor(raw))  # type: ignore[attr-defined]
    tensor.raw = raw


def target_of(args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None]:
    """Returns (device, dtype) that the arguments of `Tensor.to` name, None for what they do not."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for value in (*args, *([kwargs["other"]] if "other" in kwargs else [])):
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)) or type(value) is int:
            device = value
    if type(device) is int:
        device = CUDA
    return None if device is None else torch.device(device), dtype


def allocated_bytes() -> int:
    """Returns the bytes of all memory that tensors on the device hold."""
    storages = {}
    for reference in [*_living.values()]:
        tensor = reference()
        if tensor is not None and not tensor.away:
            storage = tensor.raw.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a CPU tensor in memory that counts as pinned.

    Raises RuntimeError for a tensor with elements at one place of memory, in torch's words.
    """
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    _pinned.append(copy)
    _pinned_addresses.add(copy.untyped_storage().data_ptr())
    return copy


def is_pinned(tensor: torch.Tensor) -> bool:
    """Says whether a CPU tensor lies in pinned memory."""
    return not here(tensor) and tensor.untyped_storage().data_ptr() in _pinned_addresses


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs one operation of torch on the numbers, with the checks and the counts of a device."""
    name = func._schema.name.partition("::")[2]
    if name == "_to_copy":
        return _to_copy(args[0], kwargs)
    if name == "copy_":
        return _copy(*args, **kwargs)
    mine, others = _tensors((args, kwargs))
    if func.namespace == "c10d":
        _check_group(name, args)
    else:
        _check_devices(name, args, mine, others)
        _count(func, name, args, kwargs)
    on_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if kwargs.get("device") is not None:
        kwargs["device"] = CPU
    kwargs.pop("pin_memory", None)
    known = {id(tensor.raw): tensor for tensor in mine}
    with RANDOM.in_use() if torch.Tag.nondeterministic_seeded in func.tags else contextlib.nullcontext():
        found = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    for tensor in mine if func._schema.is_mutable else ():
        if tensor.raw.shape != tensor.shape or tensor.raw.stride() != tensor.stride():
            adopt(tensor, tensor.raw)  # an operation has given it another shape

    def device_tensor(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        return known.get(id(value)) if id(value) in known else value if on_host or not mine else DeviceTensor(value)

    return tree_map(device_tensor, found)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, DeviceTensor) else value


def _tensors(tree: Any) -> tuple[list[DeviceTensor], list[torch.Tensor]]:
    """Returns (the tensors on the device, those on the CPU) among arguments, which may hold lists of them."""
    mine: list[DeviceTensor] = []
    others: list[torch.Tensor] = []
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if here(value):
            mine.append(value)
        elif isinstance(value, torch.Tensor):
            others.append(value)
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return mine, others


def _check_devices(name: str, args: Any, mine: list[DeviceTensor], others: list[torch.Tensor]) -> None:
    """Raises RuntimeError where CUDA refuses: for a CPU tensor among tensors of the device.

    A single number on the CPU is allowed, and so is an index into a tensor on the device, which costs a copy.
    """
    if name in INDEXING and here(args[0]):
        for index in args[1]:
            if isinstance(index, torch.Tensor) and not here(index):
                LEDGER.wait(FROM_PAGEABLE)
        others = [one for one in others if not any(one is index for index in args[1])]
    wrong = [one for one in others if one.dim() > 0 or name in ("cat", "stack")]
    if mine and wrong:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({name} got a CPU tensor of shape {tuple(wrong[0].shape)})"
        )


def _check_group(name: str, args: Any) -> None:
    """Raises RuntimeError for tensors of the device in a group that is made for the CPU alone."""
    from emulated_cuda import carries_device_tensors

    for value in args:
        if isinstance(value, torch.ScriptObject) and not carries_device_tensors(value):
            raise RuntimeError(f"{name} of CUDA tensors in a group whose backend is gloo")
    LEDGER.kernel(name)


def _count(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Counts the kernel that an operation starts, and whether the host waits for its result."""
    if name in WAITING:
        LEDGER.wait(WAITING[name])
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        LEDGER.wait("repeat_interleave")
    elif name in INDEXING and _reads_mask(name, args):
        LEDGER.wait("nonzero")
    if not func.is_view and name not in WITHOUT_KERNEL:
        LEDGER.kernel(name)


def _reads_mask(name: str, args: Any) -> bool:
    """Says whether an index is a mask, whose places must be counted. One number is put there without counting."""
    masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
    one_number = name not in ("index", "_unsafe_index") and args[2].numel() == 1
    return bool(masks) and not one_number


def _to_copy(source: Any, kwargs: dict[str, Any]) -> Any:
    """Copies between devices, or casts."""
    device, slow = kwargs.pop("device", None), not kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    to_host = device is not None and torch.device(device).type == "cpu"
    number = _raw(source)
    kind = {name: value for name, value in kwargs.items() if value is not None and name != "layout"}
    raw = aten._to_copy.default(number, **kind) if kind else number.clone()
    if to_host:
        if not slow:
            return pinned(raw)  # torch takes pinned memory for it
        if here(source) and number.numel():
            LEDGER.wait(TO_HOST)
        return raw
    if not here(source) and device is None:
        return raw
    if not here(source):
        _count_upload(number, slow)
    else:
        LEDGER.kernel("_to_copy")
    return DeviceTensor(raw)


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies into existing memory."""
    if here(source) and not here(target):
        if source.numel() and not (non_blocking and is_pinned(target)):
            LEDGER.wait(TO_HOST)
    elif here(target) and not here(source):
        if source.dim() > 0:  # one number goes with the kernel
            _count_upload(source, not non_blocking)
    elif here(target):
        LEDGER.kernel("copy_")
    _raw(target).copy_(_raw(source))
    return target


def _count_upload(source: torch.Tensor, slow: bool) -> None:
    """Counts a copy to the device, which the host need not wait for when the memory is pinned."""
    if source.numel() and not is_pinned(source):
        LEDGER.wait(FROM_PAGEABLE)
    elif source.numel() and slow:
        LEDGER.wait(FROM_PINNED)
