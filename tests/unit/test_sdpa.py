"""Attention with grouped heads: keys and values that are repeated give what torch gives for groups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.devices import sdpa

HEADS, GROUPS, SIZE, LENGTH = 6, 2, 8, 11


def attended(masked: bool, width: int = SIZE) -> list[torch.Tensor]:
    """Returns attention to random inputs, and the gradients of queries, keys and values."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, width))
    inputs = [torch.randn(2, heads, LENGTH, size, generator=draw).requires_grad_() for heads, size in sizes]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3) if masked else None
    out = sdpa.attend(*inputs, mask=mask, scale=0.4)
    out.backward(torch.randn(out.shape, generator=draw))
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("width", [SIZE, SIZE - 2])
@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_give_what_grouped_heads_give(monkeypatch, masked, width):
    seen, plain = [], F.scaled_dot_product_attention

    def watched(query, key, value, **options):
        seen.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return plain(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found = []
    for takes in (True, False):
        monkeypatch.setattr(sdpa, "_takes_groups", lambda *inputs, takes=takes: takes)
        found.append(attended(masked, width))
    assert seen == [(GROUPS, GROUPS, True), (HEADS, HEADS, False)]
    assert len(found[0]) == 4
    for grouped, repeated in zip(*found, strict=True):
        assert grouped.shape == repeated.shape and (grouped - repeated).abs().max() < 1e-5


def test_a_cpu_repeats_nothing():
    heads = torch.zeros(1, HEADS, LENGTH, SIZE)
    assert sdpa._takes_groups(heads, heads, torch.ones(LENGTH, LENGTH, dtype=torch.bool))
