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
    `sinks`: a further score for each head, whose key has the value zero: [H], or [H * L] if the L queries of a head are
        queries of several heads. None means that there is no such score.

    Keys and values are repeated for every query head if torch would otherwise materialise the scores [S, H, L, M].
    """
    if sinks is not None:
        width, factor = value.shape[-1], scale or query.shape[-1] ** -0.5
        products = (sinks / factor).view(query.shape[1], -1)

        def attended(query: Tensor, key: Tensor, value: Tensor, products: Tensor) -> Tensor:
            return attend(*_with_sinks(query, key, value, mask, products), scale=factor)[..., :width]

        if not torch.is_grad_enabled():
            return attended(query, key, value, products)
        # The mask of every layer, of a row's length squared, would otherwise be stored for the backward pass.
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
    """Puts a key before the others that has the value zero and whose product with a query is `products` [H, L or 1].

    The product is one more element of the queries, which is 1 in this key and 0 in all others. Widths grow by 8,
    because kernels on a GPU need multiples of 8.
    """
    seen: Tensor = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril() if mask is None else mask
    last = products.to(query.dtype).expand(query.shape[:-1])[..., None]
    query = F.pad(torch.cat([query, last], dim=-1), (0, 7))
    first = (torch.arange(query.shape[-1], device=key.device) == key.shape[-1]).to(key.dtype)
    key = torch.cat([first.expand(*key.shape[:2], 1, -1), F.pad(key, (0, 8))], dim=-2)
    return query, key, F.pad(value, (0, 8, 1, 0)), F.pad(seen, (1, 0), value=seen.dtype == torch.bool)


def _takes_groups(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Returns whether torch can use grouped heads (fewer key heads than query heads) without materialising the scores.
    Also returns True on a CPU, where repeating the keys would not help because no kernel avoids this.

    On a GPU, only flash attention can do this. It does not support masks, float32, heads larger than WIDEST_HEAD, and
    values of another width than the keys. The memory-efficient kernel supports all of these, but not grouped heads
    (sdp_utils.cpp, torch 2.10 to 2.13).
    """
    if not query.is_cuda:
        return True
    equal = value.shape[-1] == query.shape[-1] <= WIDEST_HEAD
    return mask is None and query.dtype == torch.bfloat16 and equal
