"""Rotary embedding as one operation, over padded and packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    fused: bool = True,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    start_positions: Tensor | None = None,
) -> Tensor:
    """Turns [L, S, H, d], or packed [N, H, d], by the angles [positions, 1, 1, d]."""
    assert fused and not interleaved and start_positions is None, "the stand-in knows fused rotary embedding in halves"
    if tensor_format == "sbhd":
        angles = freqs[: len(t)]
    else:
        assert tensor_format == "thd" and cu_seqlens is not None, f"Unsupported tensor_format: {tensor_format}."
        angles = freqs[_positions(cu_seqlens, cp_size, cp_rank, t.device)].squeeze(1)
        if len(angles) != len(t):
            raise RuntimeError(f"cu_seqlens speak of {len(angles)} tokens on this rank, there are {len(t)}")
    cos, sin = angles.float().cos(), angles.float().sin()
    wide, width = t.float(), angles.shape[-1]
    turned, rest = wide[..., :width], wide[..., width:]
    first, second = turned.chunk(2, dim=-1)
    made = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([made, rest], dim=-1).to(t.dtype)


def _positions(cu_seqlens: Tensor, ranks: int, rank: int, device: torch.device) -> Tensor:
    """Returns the position of every token of this rank in its sequence, as a kernel computes it on the device."""
    ends, parts = getattr(cu_seqlens, "raw", cu_seqlens).tolist(), []
    for first, last in zip(ends, ends[1:], strict=False):
        chunks = torch.arange(last - first, device=device).chunk(2 * ranks) if ranks > 1 else None
        own = (
            torch.arange(last - first, device=device)
            if chunks is None
            else torch.cat([chunks[rank], chunks[-1 - rank]])
        )
        parts.append(own)
    return torch.cat(parts)
