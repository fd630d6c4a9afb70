"""Patches torch and Megatron-core so that Megatron-core runs on a CPU with gloo. A few patches also apply with CUDA.

This is the only module of the project that patches other libraries.

Megatron-core hard-codes `device="cuda"` and `torch.cuda.*` in its schedules, random-number tracker, gradient buffers
and optimizer. Without a GPU, the patches redirect these calls to the CPU. They work with core 0.16.1 and 0.19.x.
"""

from __future__ import annotations

import contextlib
import functools
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
    """A stand-in for CUDA streams and events whose methods are no-ops, because CPU operations run synchronously."""

    cuda_stream = 0

    def __init__(self, *unused: Any, **ignored: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *unused: Any) -> bool:
        return False

    def elapsed_time(self, end_event: _Stream) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def synchronize(self, *unused: Any, **ignored: Any) -> None:
        return None

    wait = record = wait_stream = wait_event = synchronize

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


def is_active() -> bool:
    """Checks whether the patches of torch and Megatron-core for CPUs are needed, that is, whether no GPU is present."""
    return not torch.cuda.is_available()


def multiplies_slowly(dtype: str) -> bool:
    """Checks whether matrix products in this dtype are far slower on this machine than in float32.

    This is true for bfloat16 on CPUs without AVX-512 (measured: 40 times slower), on Arm CPUs without bfloat16, and on
    any CPU if torch has no oneDNN, which computes bfloat16 products.
    """
    if dtype != "bfloat16" or not is_active():
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def install() -> None:
    """Patches torch and Megatron-core, once per process. Call it before importing megatron.core.

    On a machine with CUDA, the function only defines names that are missing in Megatron-core and replaces the fallback
    optimizer by `FusedAdam`.
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
    """Silences Megatron-core's import-time warnings that Transformer Engine is missing, because the project itself logs
    at start-up which backend is used."""
    if is_active():
        with contextlib.redirect_stderr(io.StringIO()):  # the module prints on import that no GPU was found
            importlib.import_module("torch.utils.cpp_extension")
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    # Megatron-core's calls of torch cause these warnings.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.(c10d_logger|checkpoint)")
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex|transformer_engine|apex).*")


def _stub_triton_kernels() -> None:
    """If Triton is missing, installs a stub in place of the only module of Megatron-core 0.19.x that imports Triton
    unconditionally.

    A stub of Triton itself would break torch's inductor.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    vars(stub).update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
    sys.modules[stub.__name__] = stub


def _constant(value: Any) -> Callable[..., Any]:
    """Returns a new function that accepts any arguments and always returns `value`.

    Each patched name needs a separate function, because torch._dynamo rejects two names in torch that refer to the same
    object.
    """

    def function(*unused: Any, **ignored: Any) -> Any:
        return value

    return function


def _is_cuda(device: Any) -> bool:
    """Checks whether an argument of a function call specifies a CUDA device."""
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _patch_cuda() -> None:
    """Patches the torch.cuda functions that Megatron-core uses: they become no-ops, constants or CPU equivalents."""
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
    """Makes torch's factory functions create tensors on the CPU when a CUDA device is requested."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    # Fill torch's cache of factory functions before they are replaced. `with torch.device(...)` changes the device only
    # in calls of the cached functions, and the library transformers uses it to load models on the meta device.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_tensor() -> None:
    """Makes the methods of tensors and modules that move data to CUDA leave the data on the CPU."""
    tensor: Any = torch.Tensor
    original_to, original_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *(CPU if _is_cuda(a) else a for a in args), **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns a CUDA type name for a CPU tensor: Megatron-core's optimizer expects 'torch.cuda.FloatTensor' and the
        like."""
        return (
            original_type(self, *args, **kwargs)
            if args or kwargs
            else original_type(self).replace("torch.", "torch.cuda.", 1)
        )

    tensor.to, tensor.type = to, type_
    tensor.cuda = lambda self, *unused, **ignored: self
    torch.nn.Module.cuda = lambda self, *unused, **ignored: self  # type: ignore[method-assign]


def _patch_megatron() -> None:
    """Replaces the functions of Megatron-core that assume CUDA or NCCL."""
    with _imports():
        from megatron.core.distributed import param_and_grad_buffer as buffers
        from megatron.core.tensor_parallel import mappings
        from megatron.core.tensor_parallel import random as core_random
        from megatron.core.transformer.moe import token_dispatcher

    mappings._gather_along_first_dim = _uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    buffers.dist_reduce_scatter_func = _sum_of_several(buffers.dist_reduce_scatter_func)
    # Core's function would leave CPU tensors unchanged, but the token dispatcher needs its split sizes as numpy arrays.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    core_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _replace_torch_optimizer()


def _replace_torch_optimizer() -> None:
    """Replaces torch's Adam, which Megatron-core uses without Transformer Engine and apex, by `FusedAdam`.

    Core's distributed optimizer cannot load a checkpoint into torch's Adam. On a GPU, two fallbacks of core are
    replaced too: the gradient norm, which synchronizes with the GPU for each tensor, and gradient clipping, which
    starts two kernels for each tensor and moves twice the bytes.
    """
    with _imports():
        import megatron.core.optimizer as core_optimizer
        import megatron.core.utils as core_utils
        from megatron.core.optimizer import clip_grads, distrib_optimizer

    if not is_active() and clip_grads.l2_norm_impl is core_utils.local_multi_tensor_l2_norm:
        # Like core's function, the replacement returns (norm over all tensors, as a tensor [1] on their device; None).
        clip_grads.l2_norm_impl = lambda size, flag, tensors, *unused: (
            torch.stack(torch._foreach_norm(tensors[0])).norm().view(1),
            None,
        )
        clip_grads.multi_tensor_scale_impl = _scale_all
    if core_optimizer.USING_PYTORCH_OPTIMIZER:
        core_optimizer.Adam, core_optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
        distrib_optimizer.__dict__.update(HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True, Adam=FusedAdam)


def sum_weight_gradients() -> None:
    """Replaces apex's kernel, with which Megatron-core's linear layers add a weight gradient to its buffer, by a
    function of this project.

    Layers call it if their `gradient_accumulation_fusion` is True (core 0.16.1, tensor_parallel/layers.py:569).
    """
    from megatron.core.tensor_parallel import layers

    def add(inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
        add_product(total, gradients.t(), inputs)

    layers.__dict__["fused_weight_gradient_mlp_cuda"] = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)


def _scale_all(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Any, scale: float) -> None:
    """Multiplies the tensors in `tensor_lists[1]` by `scale` in place. Replaces the Megatron-core function that clips
    gradients by writing scaled copies of tensor_lists[0] to tensor_lists[1]. Core passes the same tensors in both."""
    torch._foreach_mul_(tensor_lists[1], scale)


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Context manager for imports of Megatron-core: silences warnings, hides the package wandb, and on a CPU replaces
    torch.compile by a function that returns functions unchanged.

    Core would import wandb for loggers that this project does not use. That takes half a second, and creates two
    temporary directories, which a killed process leaves behind. Core decorates small functions with torch.compile to
    fuse GPU kernels. On a CPU, the decorator would load torch's compiler at every start, which takes two seconds, and
    later call a C++ compiler.
    """
    wandb = {name: module for name, module in sys.modules.items() if name == "wandb"}
    sys.modules["wandb"] = None  # type: ignore[assignment]
    original = torch.compile
    if is_active():  # also as a decorator with arguments
        torch.compile = lambda model=None, **unused: model if model else lambda function: function  # type: ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = original  # type: ignore[assignment]
        del sys.modules["wandb"]
        sys.modules.update(wandb)


def _uneven_gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a replacement for Megatron-core's all-gather that supports different row counts per rank. [n_rank, ...]
    -> [sum of n, ...]. Core's own function fails on a CPU, because gloo can only gather equal row counts.

    `even`: core's function, which the replacement calls if no split sizes are given.
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
    """Returns a replacement for Megatron-core's reduce-scatter that supports different row counts per rank. [sum of n,
    ...] -> [n_rank, ...].

    Gloo can only scatter equal row counts. `even` is core's function, which is still used if no split sizes are given.
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
    """Returns a replacement for Megatron-core's reduce-scatter of gradients that is a no-op in a group of one rank.

    Core 0.16.1 calls its function in a group of one rank too (distributed/param_and_grad_buffer.py:443), and gloo would
    then copy the whole gradient buffer onto itself.
    """

    def reduce_scatter(part: torch.Tensor, gradients: torch.Tensor, *, group: Any, **rest: Any) -> Any:
        alone = group.size() == 1 and part.data_ptr() == gradients.data_ptr()
        return None if alone else summed(part, gradients, group=group, **rest)

    return reduce_scatter


def _mend_names() -> None:
    """Fixes the values of two module variables in Megatron-core.

    `te_general_gemm`: the router of core 0.16.1 checks whether `te_general_gemm` is None, but core defines the name
    only if Transformer Engine is installed; see also `_adding_bias`.
    `HAVE_TE` in core's multi-latent attention: this flag is True even if the import of Transformer Engine produced a
    placeholder, and the attention then cannot be built.
    """
    with _imports():
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils

    product = moe_utils.__dict__.setdefault("te_general_gemm", None)
    if product is not None and not hasattr(product, "__wrapped__"):
        moe_utils.__dict__["te_general_gemm"] = _adding_bias(product)
    if not isinstance(vars(multi_latent_attention).get("TELinear"), type):
        multi_latent_attention.__dict__["HAVE_TE"] = False


def _adding_bias(product: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Transformer Engine's matmul function, so that the bias is converted to the output dtype. Transformer Engine
    reads the bytes of a bias of any other dtype as if they had the output dtype (TransformerEngine issue 3562), and
    Megatron-core passes a router's bfloat16 bias to a float32 matmul."""

    @functools.wraps(product)
    def converted(a: Any, b: Any, out_dtype: Any, *, bias: torch.Tensor | None = None, **rest: Any) -> Any:
        return product(a, b, out_dtype, bias=None if bias is None else bias.to(out_dtype), **rest)

    return converted


@contextlib.contextmanager
def layout_of(ranks: range) -> Iterator[None]:
    """Makes Megatron-core's `initialize_model_parallel` create the process groups of a layout on `ranks` only.

    Inside the block, core counts `len(ranks)` ranks in the world, and its lists of ranks begin at `ranks.start`. Core
    0.16.1 passes the offset 0 to its generator of these lists (parallel_state.py:775-806); core 0.19 has the arguments
    `local_world_size` and `rank_offset`. All ranks of the world must call core's function, because torch names groups
    by a counter in each process.
    """
    from megatron.core import parallel_state

    generator, count = parallel_state.RankGenerator, torch.distributed.get_world_size

    class OffsetGenerator(generator):
        def __init__(self, *sizes: Any, rank_offset: int = 0, **named_sizes: Any) -> None:
            super().__init__(*sizes, rank_offset=ranks.start, **named_sizes)

    parallel_state.__dict__["RankGenerator"] = OffsetGenerator
    torch.distributed.get_world_size = lambda group=None: len(ranks) if group is None else count(group)
    try:
        yield
    finally:
        parallel_state.__dict__["RankGenerator"] = generator
        torch.distributed.get_world_size = count


@contextlib.contextmanager
def as_world(group: Any) -> Iterator[None]:
    """Makes a process group torch's default group inside the block, with CUDA too. All ranks of the group enter the
    block.

    Two parts of Megatron-core (0.16 to 0.19) communicate over the default group and have no argument for another one:
    the construction of an optimizer, which gathers the keys of parameter groups (optimizer/__init__.py:180), and
    checkpoints (dist_checkpointing). Inside the block, the members of `group` have the ranks 0, 1, ... of a world of
    their own, as torch's ShardedTensor requires. Other groups still count the ranks of the real world. Therefore
    `dist.get_rank(other_group)` is wrong inside the block, and a checkpoint's sharded state must be built before it.

    The change applies to all threads of the process. Another thread of rank 0 may communicate at the same time if it
    names its group in each call, because rank 0 is the first member of each group that contains it.
    """
    c10d = torch.distributed.distributed_c10d
    world = torch.distributed.group.WORLD
    if group is world:
        yield
        return
    ranks = c10d._world.pg_group_ranks[group]
    c10d._world.pg_group_ranks[group] = {place: place for place in range(len(ranks))}
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(world)
        c10d._world.pg_group_ranks[group] = ranks


def mend_saved_offsets(buffers: Iterable[Any]) -> None:
    """Corrects the offsets with which Megatron-core slices parameters out of the optimizer state that it saves (with
    CUDA too).

    When core (0.16 to 0.19) saves, it concatenates a buffer's buckets without their padding, but slices each parameter
    at its offset in the padded buffer. After a padded bucket, such as the separate bucket of a shared embedding, core
    would save shifted moments and master weights. The offsets can be changed once the optimizer is built, because from
    then on core uses them only for this slicing.
    """
    for buffer in buffers:
        shift, shifts = 0, []
        for bucket in buffer.buckets:
            shifts.append(shift)
            shift += bucket.grad_data.numel() - bucket.numel_unpadded
        places = buffer.param_index_map.items()
        buffer.param_index_map = {p: (start - shifts[b], end - shifts[b], b) for p, (start, end, b) in places}


def write_own_rows(optimizer: Any, own_rows: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Makes a distributed optimizer save the result of `own_rows(optimizer, model's sharded state)` in checkpoints,
    with CUDA too. This replaces Megatron-core's method, which gathers the state of all data-parallel ranks on the first
    of these ranks, or on each of them."""
    original = optimizer.sharded_param_state_fully_reshardable

    def state(model_state: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None) -> Any:
        return original(model_state, is_loading, metadata) if is_loading else own_rows(optimizer, model_state)

    optimizer.sharded_param_state_fully_reshardable = state
