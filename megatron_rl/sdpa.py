"""torch's scaled_dot_product_attention for grouped heads, on a GPU by a kernel that keeps no scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WIDEST_HEAD = 256  # elements: flash attention takes no wider heads


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attends: query [S, H, L, d], key [S, KV, M, d], value [S, KV, M, v] -> [S, H, L, v]. Causal without a mask.

    `mask` broadcasts to [S, H, L, M], True where a query sees a key. `scale` multiplies the scores; None: 1 / sqrt(d).
    Keys and values are repeated for every query head where torch would otherwise keep all scores [S, H, L, M].
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and not _takes_groups(query, value, mask):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _takes_groups(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Says whether torch has a kernel for grouped heads here that keeps no scores, or none in any case (on a CPU).

    On a GPU this is flash attention alone, which refuses masks, float32, heads of more than WIDEST_HEAD elements, and
    values of another width than the keys'. The memory-efficient kernel takes all of these, but not grouped heads
    (sdp_utils.cpp, torch 2.10 to 2.13).
    """
    if not query.is_cuda:
        return True
    equal = value.shape[-1] == query.shape[-1] <= WIDEST_HEAD
    return mask is None and query.dtype == torch.bfloat16 and equal
