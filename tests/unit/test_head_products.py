"""The output layer's gradient on a CPU: products of joined chunks, and the sum over one rank that copies nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_rl.megatron import forward, platform

ROWS, WIDTH, CHUNKS = 24, 8, 5


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("joined", [1, 2 * 16 * ROWS, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_joined_without_one_lost(monkeypatch, dtype, joined):
    """One product for each chunk, for two, with a rest, and for all of them."""
    monkeypatch.setattr(forward, "JOINED_ELEMENTS", joined)
    draw = torch.Generator().manual_seed(0)
    steps, hidden = (
        [torch.randn(16, n, generator=draw).to(dtype) for _ in range(CHUNKS)] for n in (ROWS, WIDTH)
    )  # fmt: skip
    total = torch.ones(ROWS, WIDTH)
    products = forward._Products(total)
    for step, own in zip(steps, hidden, strict=True):
        products.add(step, own)
    products.finish()
    products.finish()  # nothing is left
    exact = 1 + torch.cat(steps).double().T @ torch.cat(hidden).double()
    assert (total - exact).abs().max() < (1e-5 if dtype == torch.float32 else 2**-7) * exact.abs().max()


def test_no_product_of_a_rank_without_rows():
    products = forward._Products(torch.ones(0, WIDTH))
    products.add(torch.ones(16, 0, dtype=torch.bfloat16), torch.ones(16, WIDTH, dtype=torch.bfloat16))
    products.finish()


@pytest.mark.parametrize(("vocab", "rows"), [(512, 4096), (8192, 256), (49152, 128), (152064, 48), (1 << 22, 32)])
def test_a_chunk_has_rows_for_fast_products_and_a_bounded_size(vocab, rows):
    weight, hidden = torch.empty(vocab, 1, device="meta"), torch.empty(5000, 1)
    head = forward._Head(0, vocab, vocab, 1.0, None, ("logprobs",), True, False)
    [first, *_] = forward._chunks(hidden, weight, head)
    assert first == slice(0, rows)


def test_one_rank_sums_its_gradients_without_a_copy(alone):
    calls = []

    def summed(part: torch.Tensor, whole: torch.Tensor, **rest: object) -> None:
        calls.append(rest)
        dist.reduce_scatter_tensor(part, whole, group=alone)

    reduce_scatter = platform._sum_of_several(summed)
    whole = torch.arange(4.0)
    reduce_scatter(whole[:], whole, op=dist.ReduceOp.SUM, group=alone, async_op=False)
    assert not calls and whole.tolist() == [0, 1, 2, 3]
    part = torch.zeros(4)  # memory of its own
    reduce_scatter(part, whole, op=dist.ReduceOp.SUM, group=alone, async_op=False)
    assert len(calls) == 1 and part.tolist() == [0, 1, 2, 3]
