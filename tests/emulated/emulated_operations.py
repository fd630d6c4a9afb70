"""Operations that torch has for CUDA alone, for a CPU's tensors: flash attention for variable lengths, by plain
softmax, and products of bfloat16 factors that are added to a float32 sum.

The attention refuses what CUDA's refuses (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, torch 2.13),
and computes what its documentation says: a window counts keys on either side of a query's own, queries stand at the end
of their keys, and heads of keys serve neighbouring heads of queries.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Gives torch's operations a kernel for CPUs."""
    _library.impl("addmm.dtype_out", _add_product, "CPU")
    _library.impl("_flash_attention_forward", _forward, "CPU")
    _library.impl("_flash_attention_backward", _backward, "CPU")


def _add_product(
    total: Any, left: Any, right: Any, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Any
) -> Any:
    """Adds a product of bfloat16 factors to a sum in float32, as cuBLAS does."""
    assert total.dtype == out.dtype == out_dtype == torch.float32 and left.dtype == right.dtype == torch.bfloat16
    return out.copy_(beta * total + alpha * (left.float() @ right.float()))


def _check(query: Any, key: Any, value: Any, ends: tuple[Any, Any], most: tuple[int, int]) -> None:
    """Raises RuntimeError for what the kernels of a GPU refuse, or read wrongly."""
    width = query.shape[2]
    if any(x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != query.dtype for x in (query, key, value)):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if width % 8 or width > 256 or key.shape != value.shape or key.shape[2] != width or query.shape[1] % key.shape[1]:
        raise RuntimeError(f"heads {query.shape[1:]}, {key.shape[1:]}, {value.shape[1:]}")
    for own, longest, x in zip(ends, most, (query, key), strict=True):
        counts = own.diff()
        if own.dtype != torch.int32 or int(own[0]) or int(own[-1]) != len(x) or int(counts.max()) > longest:
            raise RuntimeError(f"cu_seqlens {own}, at most {longest}, of {len(x)} rows")
        if int(counts.min()) < 1:
            raise RuntimeError(f"an empty sequence in {own}")


def _sides(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """Returns how many keys before and behind its own a query sees, -1 for all."""
    return -1 if left is None else left, 0 if causal else -1 if right is None else right


def _seen(queries: int, keys: int, left: int, right: int) -> torch.Tensor:
    """Returns which keys each query sees, [queries, keys]. Negative `left` or `right`: all on that side."""
    own = (torch.arange(queries) + keys - queries)[:, None]
    places = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= places >= own - left
    if right >= 0:
        seen &= places <= own + right
    return seen


def _attend(query: Any, key: Any, value: Any, ends: tuple[Any, Any], scale: float, sides: tuple[int, int]) -> Any:
    """Returns the output [N, H, d] and the logarithms of the softmax's sums, [H, N], of float32 inputs."""
    group, outs, sums = query.shape[1] // key.shape[1], [], []
    bounds = [own.tolist() for own in ends]
    for a, b, c, d in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        keys, values = (x[c:d].repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
        scores = scale * (query[a:b].transpose(0, 1) @ keys.transpose(1, 2))
        scores = scores.masked_fill(~_seen(b - a, d - c, *sides), -torch.inf)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


def _forward(
    query: Any, key: Any, value: Any, query_ends: Any, key_ends: Any, most_queries: int, most_keys: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **unused: Any,
) -> Any:  # fmt: skip
    assert not dropout and not debug
    ends = query_ends, key_ends
    _check(query, key, value, ends, (most_queries, most_keys))
    sides = _sides(causal, window_size_left, window_size_right)
    wide = (x.float() for x in (query, key, value))
    out, sums = _attend(*wide, ends, scale or query.shape[-1] ** -0.5, sides)
    state, nothing = torch.zeros(2, dtype=torch.uint64), torch.zeros(0)
    return out.to(query.dtype), sums, state, nothing, nothing.clone()


def _backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, query_ends: Any, key_ends: Any,
    most_queries: int, most_keys: int, dropout: float, causal: bool, state: Any, unused: Any, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> Any:  # fmt: skip
    ends = query_ends, key_ends
    _check(query, key, value, ends, (most_queries, most_keys))
    if grad.stride(-1) != 1 or grad.shape != query.shape or grad.dtype != query.dtype:
        raise RuntimeError("dout tensor must have contiguous last dimension")
    sides = _sides(causal, window_size_left, window_size_right)
    wide = [x.float() for x in (query, key, value, out, grad)]
    found = _differentiate(*wide, sums, ends, scale or query.shape[-1] ** -0.5, sides)
    return tuple(x.to(query.dtype) for x in found)


def _differentiate(
    query: Any, key: Any, value: Any, out: Any, grad: Any, sums: Any, ends: tuple[Any, Any], scale: float,
    sides: tuple[int, int],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Returns the gradients of queries, keys and values by the formulas of the flash attention paper, in float32.

    Autograd cannot be asked below an operation of torch.
    """
    group, back = query.shape[1] // key.shape[1], ([], [], [])
    bounds = [own.tolist() for own in ends]
    for a, b, c, d in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        q, o, g = (x[a:b].transpose(0, 1) for x in (query, out, grad))
        k, v = (x[c:d].repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
        scores = (scale * (q @ k.transpose(1, 2))).masked_fill(~_seen(b - a, d - c, *sides), -torch.inf)
        shares = (scores - sums[:, a:b, None]).exp()
        slopes = scale * shares * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True))
        made = slopes @ k, slopes.transpose(1, 2) @ q, shares.transpose(1, 2) @ g
        for parts, one, heads in zip(back, made, (1, group, group), strict=True):
            parts.append(one.unflatten(0, (-1, heads)).sum(1).transpose(0, 1))
    return tuple(torch.cat(parts) for parts in back)
