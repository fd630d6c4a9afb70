"""Attention of all sequences of a packed row in one call, by torch's flash attention for variable lengths.

A call takes lengths on the device, so that it needs no grid, no padding and no mask, and the host waits for nothing.
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

from megatron_rl.host_to_device import upload
from megatron_rl.sdpa import WIDEST_HEAD

AMPERE = (8, 0)  # the lowest compute capability that torch's flash attention has kernels for
HEAD_UNIT = 8  # it refuses heads whose elements are no multiple of this, or more than WIDEST_HEAD
# Arguments of torch's function that older versions of torch do not have: the first, which is needed, comes with 2.11,
# the second with 2.12. There it must be told that heads are grouped; 2.11 passes any heads on to the same kernel.
WINDOW, GROUPED = "window_size", "enable_gqa"


@dataclass(frozen=True)
class Segments:
    """Runs of queries that lie end to end in a packed row, each with the keys that it sees.

    A run's last query sees all keys of its run, the query before it all but the last, and so on: kernels call this
    alignment causal at the bottom right. A whole sequence is a run whose keys are its own. A run behind a shared
    prompt, or behind earlier chunks of its sequence, has more keys than queries.
    """

    query_ends: Tensor  # [S + 1] int32, from 0
    key_ends: Tensor  # [S + 1] int32, from 0
    most_queries: int  # of a run
    most_keys: int  # of a run
    keys: Tensor | None = None  # [sum of all runs' keys] their rows; a row may be in several runs. None: all, in order


def segments(counts: Sequence[int], keys: Sequence[Tensor] | None, device: torch.device) -> Segments:
    """Returns the segments of runs of `counts` [S] queries. `keys[s]` are the rows of run s; None: its queries' own."""
    seen = counts if keys is None else [len(rows) for rows in keys]
    queries, known = (upload(torch.tensor([0, *numbers]).cumsum(0).int(), device) for numbers in (counts, seen))
    rows = None if keys is None else upload(torch.cat([*keys]), device)
    return Segments(queries, known, max(counts), max(seen), rows)


def attend(
    query: Tensor, key: Tensor, value: Tensor, runs: Segments, *, scale: float | None, window: int | None
) -> Tensor:
    """Returns [N, H * v], the attention of queries [N, H, d] to keys [M, KV, d] with values [M, KV, v], v up to d.

    `scale` multiplies the scores; None: 1 / sqrt(d). With a `window` a query sees so many keys, its own among them.
    """
    if runs.keys is not None:
        key, value = (_Taken.apply(x, runs.keys) for x in (key, value))
    width = value.shape[-1]
    if width < key.shape[-1]:  # the kernel has one width for both
        value = F.pad(value, (0, key.shape[-1] - width))
    function, arguments = _torch_function()
    grouped = {GROUPED: query.shape[1] != key.shape[1]} if GROUPED in arguments else {}
    out: Any = function(
        query,
        key,
        value,
        runs.query_ends,
        runs.key_ends,
        runs.most_queries,
        runs.most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # keys before a query's own, and behind it
        **grouped,
    )
    return out[..., :width].flatten(1)


def obstacle(head_dim: int, dtype: str) -> str | None:
    """Returns what keeps a model from this attention on this machine, or None. `dtype`: the name of its weights'."""
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
    """Returns torch's function and the names of its arguments."""
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn  # torch has it from 2.10
    return function, inspect.signature(function).parameters


class _Taken(torch.autograd.Function):
    """Takes rows of a tensor, some of them several times. The sums of their gradients are float32."""

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
