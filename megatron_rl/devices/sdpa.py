"""torch's scaled_dot_product_attention for grouped heads, with a GPU kernel that does not materialise the attention
scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WIDEST_HEAD = 256  # maximum head size that flash attention supports


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention: query [S, H, L, d], key [S, KV, M, d], value [S, KV, M, v] -> [S, H, L, v]. The attention is
    causal if `mask` is None.

    `mask`: broadcasts to [S, H, L, M], True where a query attends to a key.
    `scale`: factor on the scores; None means 1 / sqrt(d).
    `sinks`: attention sinks, one additional softmax logit per head, whose value vector is zero: [H], or [H * L] if the
        caller put queries of several heads into the L dimension. None means that there are no sinks.

    Keys and values are repeated for every query head if torch would otherwise materialise the scores [S, H, L, M].
    """
    if sinks is not None:
        width, factor = value.shape[-1], scale or query.shape[-1] ** -0.5
        products = (sinks / factor).view(query.shape[1], -1)

        def attended(query: Tensor, key: Tensor, value: Tensor, products: Tensor) -> Tensor:
            return attend(*_with_sinks(query, key, value, mask, products), scale=factor)[..., :width]

        if not torch.is_grad_enabled():
            return attended(query, key, value, products)
        # Without checkpointing, each layer would store a mask of the squared sequence length for the backward pass.
        return checkpoint(attended, query, key, value, products, use_reentrant=False, preserve_rng_state=False)
    grouped = query.shape[1] != key.shape[1]
    if grouped and not _takes_groups(query, value, mask):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, products: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prepends one key to the keys and a zero vector to the values. The dot product of a query with this key is
    `products` [H, L or 1].

    For this purpose, one element is appended to the head dimension: it holds `products` in the queries, 1 in the
    new key and 0 in all other keys. The head dimension grows by 8 elements, because GPU kernels need multiples of 8.
    """
    seen: Tensor = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril() if mask is None else mask
    last = products.to(query.dtype).expand(query.shape[:-1])[..., None]
    query = F.pad(torch.cat([query, last], dim=-1), (0, 7))
    first = (torch.arange(query.shape[-1], device=key.device) == key.shape[-1]).to(key.dtype)
    key = torch.cat([first.expand(*key.shape[:2], 1, -1), F.pad(key, (0, 8))], dim=-2)
    return query, key, F.pad(value, (0, 8, 1, 0)), F.pad(seen, (1, 0), value=seen.dtype == torch.bool)


def _takes_groups(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Returns whether torch can use grouped heads (fewer key heads than query heads) without materialising the scores.
    Also returns True on a CPU, where all kernels materialise the scores, so that repeating the keys would not help.

    On a GPU, only flash attention supports grouped heads without materialised scores. Flash attention does not support
    masks, float32, heads larger than WIDEST_HEAD, and values of another width than the keys. The memory-efficient
    kernel supports all of these, but not grouped heads (sdp_utils.cpp, torch 2.10 to 2.13).
    """
    if not query.is_cuda:
        return True
    equal = value.shape[-1] == query.shape[-1] <= WIDEST_HEAD
    return mask is None and query.dtype == torch.bfloat16 and equal
