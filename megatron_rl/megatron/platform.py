"""Makes Megatron-core run on CPU + gloo. With CUDA it is inactive but for what core needs there too.

No other module of the project patches another library.

Megatron-core writes `device="cuda"` and `torch.cuda.*` into its schedules, random-number tracker, gradient buffers and
optimizer. Without a GPU each of these is sent to its CPU counterpart here. Works with 0.16.1 and 0.19.x.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_rl.megatron.adam import FusedAdam
from megatron_rl.megatron.kernels.products import add_product

CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "empty_like"),
    *("zeros_like", "ones_like", "as_tensor", "linspace"),
)


class _Stream:
    """A stand-in for a CUDA stream and for an event. On a CPU everything is already in order."""

    cuda_stream = 0

    def __init__(self, *unused: Any, **ignored: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *unused: Any) -> bool:
        return False

    def elapsed_time(self, other: _Stream) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def _nothing(self, *unused: Any, **ignored: Any) -> None:
        return None

    synchronize = wait = record = wait_stream = wait_event = _nothing

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


def is_active() -> bool:
    """Says whether there is no GPU, so that the patches are needed."""
    return not torch.cuda.is_available()


def multiplies_slowly(dtype: str) -> bool:
    """Says whether products of matrices of this dtype are far slower here than in float32.

    Such are CPUs without AVX-512 (40 times slower was measured), those of Arm without bfloat16, and any CPU where torch
    has no oneDNN, which computes these products.
    """
    if dtype != "bfloat16" or not is_active():
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def install() -> None:
    """Patches torch and Megatron-core, once per process. Call it before importing megatron.core.

    With CUDA it only mends names that core forgets, and the Adam that core falls back to.
    """
    _silence_warnings()
    if not is_active():
        _mend_names()
        _replace_torch_optimizer()
        return
    if getattr(torch.cuda, "megatron_rl_cpu", False):
        return
    torch.cuda.megatron_rl_cpu = True  # type: ignore[attr-defined]
    _stub_triton_kernels()
    _patch_cuda()
    _patch_factories()
    _patch_tensor()
    _patch_megatron()
    _mend_names()


def _silence_warnings() -> None:
    """Silences core's warnings at import that Transformer Engine is absent.

    The project's own start-up line says which backend is used.
    """
    if is_active():
        with contextlib.redirect_stderr(io.StringIO()):  # it says on every rank that a toolkit was found and no GPU
            importlib.import_module("torch.utils.cpp_extension")
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    # These come from calls that core makes.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.(c10d_logger|checkpoint)")
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex|transformer_engine|apex).*")


def _stub_triton_kernels() -> None:
    """Replaces the one module of core 0.19.x that imports triton unconditionally.

    A stub of triton itself would break inductor.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    vars(stub).update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
    sys.modules[stub.__name__] = stub


def _constant(value: Any) -> Callable[..., Any]:
    """Returns a function that always returns `value`. It is a new one each time.

    torch._dynamo refuses two torch names that share one object.
    """

    def function(*unused: Any, **ignored: Any) -> Any:
        return value

    return function


def _is_cuda(device: Any) -> bool:
    """Says whether a call's argument names a CUDA device."""
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _patch_cuda() -> None:
    """Replaces the functions of torch.cuda that core calls."""
    cuda: Any = torch.cuda
    cuda.current_device, cuda.device_count = _constant(CPU), _constant(1)
    nothing = ("synchronize", "empty_cache", "set_device", "manual_seed_all", "ipc_collect", "reset_peak_memory_stats")
    for name in nothing:
        setattr(cuda, name, _constant(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _constant(0))
    cuda.Stream, cuda.Event = _Stream, type("Event", (_Stream,), {})
    for name in ("current_stream", "default_stream", "stream"):
        setattr(cuda, name, _constant(_Stream()))
    cuda.is_current_stream_capturing = _constant(False)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _constant(None), _constant(None)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None


def _patch_factories() -> None:
    """Makes torch's factory functions put on the CPU what is asked for on CUDA."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    # The result is cached: `with torch.device(...)` must go on knowing the originals (transformers loads on meta).
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_tensor() -> None:
    """Makes the methods of tensors and modules that move to CUDA stay on the CPU."""
    tensor: Any = torch.Tensor
    original_to, original_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *(CPU if _is_cuda(a) else a for a in args), **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Names a CPU type as a CUDA type: the optimizer compares param.type() with 'torch.cuda.FloatTensor'."""
        return (
            original_type(self, *args, **kwargs)
            if args or kwargs
            else original_type(self).replace("torch.", "torch.cuda.", 1)
        )

    tensor.to, tensor.type = to, type_
    tensor.cuda = lambda self, *unused, **ignored: self
    torch.nn.Module.cuda = lambda self, *unused, **ignored: self  # type: ignore[method-assign]


def _patch_megatron() -> None:
    """Replaces the functions of core that assume CUDA or NCCL."""
    with _silent_imports(), _without_compiler(), _without_wandb():
        from megatron.core.distributed import param_and_grad_buffer as buffers
        from megatron.core.tensor_parallel import mappings
        from megatron.core.tensor_parallel import random as core_random
        from megatron.core.transformer.moe import token_dispatcher

    mappings._gather_along_first_dim = _uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    buffers.dist_reduce_scatter_func = _sum_of_several(buffers.dist_reduce_scatter_func)
    # Splits of the dispatcher's all-to-all become numpy arrays only where they lie on a CUDA device.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_numpy
    core_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _replace_torch_optimizer()


def _replace_torch_optimizer() -> None:
    """Puts `FusedAdam` in the place of torch's, which core takes where it finds neither Transformer Engine nor apex.

    Core's distributed optimizer cannot load a checkpoint into torch's own. Nor is core's own norm of the gradients kept
    there: on a GPU it waits for each tensor's.
    """
    with _silent_imports(), _without_compiler() if is_active() else contextlib.nullcontext(), _without_wandb():
        import megatron.core.optimizer as core_optimizer
        import megatron.core.utils as core_utils
        from megatron.core.optimizer import clip_grads, distrib_optimizer

    if not is_active() and clip_grads.l2_norm_impl is core_utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_all
    if core_optimizer.USING_PYTORCH_OPTIMIZER:
        core_optimizer.Adam, core_optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
        distrib_optimizer.__dict__.update(HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True, Adam=FusedAdam)


def sum_weight_gradients() -> None:
    """Gives core's linear layers a kernel that adds a weight's gradient to its buffer, in place of apex's.

    Layers take it where their `gradient_accumulation_fusion` is True (core 0.16.1, tensor_parallel/layers.py:569).
    """
    from megatron.core.tensor_parallel import layers

    def add(inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
        add_product(total, gradients.t(), inputs)

    layers.__dict__["fused_weight_gradient_mlp_cuda"] = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)


def _norm_of_all(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Any, per_tensor: bool, *unused: Any
) -> tuple[torch.Tensor, None]:
    """Returns the norm of all tensors together, [1], on their device; in place of core's."""
    return torch.stack(torch._foreach_norm(tensor_lists[0])).norm().view(1), None


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    """Lets core find no Weights & Biases in the block: its inference would import it, which takes half a second."""
    there = {name: module for name, module in sys.modules.items() if name == "wandb"}
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]
        sys.modules.update(there)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Makes torch.compile leave functions as they are in the block.

    Core decorates small functions with it, for kernels of GPUs. On a CPU this would load torch's compiler on every
    start, which takes two seconds, and then call a C++ compiler.
    """
    original = torch.compile
    torch.compile = _uncompiled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original  # type: ignore[assignment]


def _uncompiled(model: Any = None, **unused: Any) -> Any:
    """Stands in for torch.compile, also as a decorator with arguments."""
    return model if model is not None else lambda function: function


def _uneven_gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a gather of rows [n_rank, ...] -> [sum of n, ...] for ranks with different n, in place of core's.

    gloo only gathers equal numbers of rows.
    """

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, None, use_global_buffer)
        most = max(output_split_sizes)
        padded = input_.new_zeros(most, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def _uneven_reduce_scatter(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a sum over ranks of [sum of n, ...], of which each rank keeps its n_rank rows, in place of core's.

    gloo only cuts into equal parts.
    """

    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even(input_, group, None, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    return reduce_scatter


def _sum_of_several(summed: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a sum of gradients over ranks, of which each rank keeps its part, in place of core's.

    Core sums where there is one rank, too (0.16.1, distributed/param_and_grad_buffer.py:443), and gloo then copies the
    whole buffer of gradients onto itself.
    """

    def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, *, group: Any, **rest: Any) -> Any:
        alone = group.size() == 1 and part.data_ptr() == whole.data_ptr()
        return None if alone else summed(part, whole, group=group, **rest)

    return reduce_scatter


def _mend_names() -> None:
    """Defines `te_general_gemm`, and says in core's attention through a latent whether there is Transformer Engine.

    The router of 0.16.1 asks whether the first is None, and only has the name with Transformer Engine. That attention
    takes it to be there where its import gave a stand-in, and cannot be built then.
    """
    with _silent_imports(), _without_compiler() if is_active() else contextlib.nullcontext():
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils

    moe_utils.__dict__.setdefault("te_general_gemm", None)
    if not isinstance(vars(multi_latent_attention).get("TELinear"), type):
        multi_latent_attention.__dict__["HAVE_TE"] = False


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces core's maybe_move_tensor_to_cpu for tensors that are on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def mend_saved_offsets(buffers: Iterable[Any]) -> None:
    """Corrects the offsets by which core cuts parameters out of the optimizer state that it saves (with CUDA too).

    Core (0.16 to 0.19) joins a buffer's buckets without their padding when it saves, and then cuts every parameter out
    at its place in the padded buffer. With a padded bucket in front, such as a shared embedding's own, it saves shifted
    moments and masters. Once the optimizer is built only that cut reads these offsets.
    """
    for buffer in buffers:
        shift, shifts = 0, []
        for bucket in buffer.buckets:
            shifts.append(shift)
            shift += bucket.grad_data.numel() - bucket.numel_unpadded
        places = buffer.param_index_map.items()
        buffer.param_index_map = {p: (start - shifts[b], end - shifts[b], b) for p, (start, end, b) in places}


def write_own_rows(optimizer: Any, own_rows: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Makes a distributed optimizer give `own_rows(optimizer, model's state)` to a checkpoint (with CUDA too).

    Core's gathers the state of all data-parallel ranks on the first of them, or on each.
    """
    original = optimizer.sharded_param_state_fully_reshardable

    def state(model_state: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None) -> Any:
        return original(model_state, is_loading, metadata) if is_loading else own_rows(optimizer, model_state)

    optimizer.sharded_param_state_fully_reshardable = state


@contextlib.contextmanager
def _silent_imports() -> Iterator[None]:
    """Silences warnings inside the block, and hides wandb there.

    Core imports wandb where it is installed, for loggers that nobody here uses. That makes two temporary directories,
    which a killed process leaves behind.
    """
    hidden = {} if "wandb" in sys.modules else {"wandb": None}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in hidden:
            del sys.modules[name]
