"""Attention of all sequences of a packed row in one call of torch's variable-length flash attention.

The call takes sequence lengths as device tensors. It needs no padded grid, no mask and no host synchronization.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.devices.host_to_device import upload
from megatron_rl.devices.sdpa import WIDEST_HEAD

AMPERE = (8, 0)  # lowest compute capability that torch's flash attention supports
HEAD_UNIT = 8  # flash attention needs a head dimension that is a multiple of this number and at most WIDEST_HEAD
# Names of arguments of torch's varlen_attn. `window_size` exists from torch 2.11 on, and this module requires it.
# `enable_gqa` exists from torch 2.12 on, where it must be True for grouped heads; torch 2.11 needs no such flag.
WINDOW, GROUPED = "window_size", "enable_gqa"


@dataclass(frozen=True)
class Segments:
    """The sequences of a variable-length flash attention call: runs of consecutive queries that are packed end to end
    in one row, each with the keys that the queries attend to.

    The last query of a run attends to all keys of the run, the query before it to all keys but the last, and so on
    (bottom-right aligned causal mask). A whole sequence is a run whose keys are the sequence's tokens. A run that
    follows a shared prompt, or earlier chunks of its sequence, has more keys than queries.
    """

    query_ends: Tensor  # [S + 1] int32 cumulative query counts, starting with 0
    key_ends: Tensor  # [S + 1] int32 cumulative key counts, starting with 0
    most_queries: int  # maximum number of queries of a run
    most_keys: int  # maximum number of keys of a run
    # [total number of keys] row indices of the runs' keys. A row may be in several runs. None: all rows, in order.
    keys: Tensor | None = None


def segments(counts: Sequence[int], keys: Sequence[Tensor] | None, device: torch.device) -> Segments:
    """Returns the Segments of S runs of queries. `counts[s]` is the number of queries of run s, and `keys[s]` has the
    row indices of the keys of run s. If `keys` is None, the keys of each run are the rows of its queries."""
    seen = counts if keys is None else [len(rows) for rows in keys]
    queries, key_ends = (upload(torch.tensor([0, *numbers]).cumsum(0).int(), device) for numbers in (counts, seen))
    rows = None if keys is None else upload(torch.cat([*keys]), device)
    return Segments(queries, key_ends, max(counts), max(seen), rows)


def attend(
    query: Tensor, key: Tensor, value: Tensor, runs: Segments, *, scale: float | None, window: int | None
) -> Tensor:
    """Computes causal attention by one call of torch's flash attention. Returns the output [N, H * v] of queries [N, H,
    d], keys [M, KV, d] and values [M, KV, v], v <= d.

    The attention scores are multiplied by `scale`; None means 1 / sqrt(d). With a `window`, a query attends to the last
    `window` keys, including the query's own position.
    """
    if runs.keys is not None:
        key, value = (_Taken.apply(x, runs.keys) for x in (key, value))
    width = value.shape[-1]
    if width < key.shape[-1]:  # the kernel needs the same head dimension for keys and values
        value = F.pad(value, (0, key.shape[-1] - width))
    function, arguments = _torch_function()
    grouped = {GROUPED: query.shape[1] != key.shape[1]} if GROUPED in arguments else {}
    attended: Any = function(
        query,
        key,
        value,
        runs.query_ends,
        runs.key_ends,
        runs.most_queries,
        runs.most_keys,
        scale=scale,
        # how many keys before and after its own position a query attends to; -1: all keys
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return attended[..., :width].flatten(1)


def obstacle(head_dim: int, dtype: str) -> str | None:
    """Returns the reason why a model with this head dimension and dtype cannot use flash attention on this machine, or
    None if there is no such reason. `dtype` is the name of the weights' dtype, for example "bfloat16"."""
    if dtype != "bfloat16":
        return f"torch has no such attention in {dtype}"
    if head_dim % HEAD_UNIT or head_dim > WIDEST_HEAD:
        return f"heads of {head_dim} elements are no multiple of {HEAD_UNIT} up to {WIDEST_HEAD}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < AMPERE:
        return "there is no GPU of compute capability 8.0 or more"
    if WINDOW not in _torch_function()[1]:
        return f"torch {torch.__version__} has no varlen_attn with {WINDOW}, which comes with torch 2.11"
    return None


def _torch_function() -> tuple[Any, Collection[str]]:
    """Returns (torch's function varlen_attn, names of the arguments of the function)."""
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn  # exists from torch 2.10 on
    return function, inspect.signature(function).parameters


class _Taken(torch.autograd.Function):
    """Autograd function that gathers rows of a tensor. A row may be gathered several times. The backward pass sums the
    gradients of repeated rows in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows)
        ctx.size = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        back = grad.new_zeros(ctx.size, *grad.shape[1:], dtype=torch.float32)
        return back.index_add_(0, rows, grad.float()).to(grad.dtype), None
