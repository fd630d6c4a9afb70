"""Attention to bfloat16 on a CPU is as exact in float32, where few keys make that faster, as in bfloat16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.megatron import attention

HEADS, GROUPS, SIZE = 4, 2, 16


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow values"])
@pytest.mark.parametrize("keys", [attention.WIDENED - 4, attention.WIDENED + 4])
def test_attention_to_bfloat16_is_near_that_in_float64(monkeypatch, keys, narrow, masked):
    draw = torch.Generator().manual_seed(0)
    width = SIZE // 2 if narrow else SIZE
    shapes = ((2, HEADS, keys, SIZE), (2, GROUPS, keys, SIZE), (2, GROUPS, keys, width))
    inputs = [torch.randn(shape, generator=draw).to(torch.bfloat16).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = torch.ones(keys, keys, dtype=torch.bool).tril(-3) | torch.eye(keys, dtype=torch.bool) if masked else None
    seen = []

    def attend(query: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(query.dtype)
        return plain(query, *rest, **options)  # type: ignore[arg-type]

    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", attend)
    layer = SimpleNamespace(scale=0.2, softmax_offset=None)
    found, wanted = (attention.SDPAttention._attend(layer, *own, mask) for own in (inputs, exact))
    assert seen[0] == (torch.float32 if keys < attention.WIDENED else torch.bfloat16)
    assert found.dtype == torch.bfloat16 and found.shape == (2, HEADS, keys, width)
    change = torch.randn(found.shape, generator=draw)
    found.backward(change.to(torch.bfloat16))
    wanted.backward(change.to(torch.bfloat16).double())
    for ours, theirs in ((found, wanted), *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True))):
        assert ours is not None and theirs is not None
        assert (ours - theirs).abs().max() < 2**-5 * theirs.abs().max()
