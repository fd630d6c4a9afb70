"""The output layer's gradient on a CPU: products of joined chunks, and the sum over one rank that copies nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.megatron import platform, vocab_statistics

ROWS, WIDTH, CHUNKS = 24, 8, 5


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def summed(dtype: torch.dtype, *, rows: int, real: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the products of chunks of 16 hidden states, and the same in float64."""
    draw = torch.Generator().manual_seed(0)
    steps = torch.randn(rows, real, generator=draw).to(dtype)
    hidden = torch.randn(rows, WIDTH, generator=draw).to(dtype)
    weight = torch.zeros(real + padding, WIDTH, dtype=dtype)
    chunks = [slice(a, min(a + 16, rows)) for a in range(0, rows, 16)] or [slice(0, 0)]
    products = vocab_statistics._Products(hidden, weight, real, chunks)
    for chunk in chunks:
        assert torch.equal(products.add(steps[chunk].float(), chunk), steps[chunk])
    exact = torch.zeros(real + padding, WIDTH, dtype=torch.float64)
    exact[:real] = steps.double().T @ hidden.double()
    return products.total(), exact


@pytest.mark.parametrize("joined", [1, 2 * 16 * ROWS, 1 << 26])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("rows", [16 * CHUNKS, 16 * CHUNKS - 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_joined_without_one_lost(monkeypatch, dtype, rows, padding, joined):
    """One product for each chunk, for two, with a rest, and for all of them."""
    monkeypatch.setattr(vocab_statistics, "JOINED_ELEMENTS", joined)
    total, exact = summed(dtype, rows=rows, real=ROWS, padding=padding)
    assert total.dtype == dtype and total.shape == exact.shape
    assert (total - exact).abs().max() < (1e-6 if dtype == torch.float32 else 2**-7) * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "real", "padding"), [(0, ROWS, 0), (16, 0, 5), (0, 0, 5)])
def test_without_hidden_states_or_rows_of_its_own_a_rank_has_no_gradient(dtype, rows, real, padding):
    total, exact = summed(dtype, rows=rows, real=real, padding=padding)
    assert total.shape == exact.shape and not total.any()


@pytest.mark.parametrize(("vocab", "rows"), [(512, 4096), (8192, 256), (49152, 128), (152064, 48), (1 << 22, 32)])
def test_a_chunk_has_rows_for_fast_products_and_a_bounded_size(vocab, rows):
    weight, hidden = torch.empty(vocab, 1, device="meta"), torch.empty(5000, 1)
    head = vocab_statistics._Head(0, vocab, vocab, 1.0, None, ("logprobs",), True, False)
    [first, *_] = vocab_statistics._chunks(hidden, weight, head)
    assert first == slice(0, rows)


class OnGpu:
    """The size and the place of a tensor [rows, 1] on a GPU, without its memory."""

    device = torch.device("cuda", 0)

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.shape, self.element_size = (rows, 1), lambda: dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]


@pytest.mark.parametrize(
    ("vocab", "dtype", "triton", "rows"),
    [
        *(
            (151936, torch.bfloat16, True, 3456),
            (151936, torch.float32, True, 1664),
            (151936, torch.bfloat16, False, 768),
        ),
        (1 << 22, torch.bfloat16, False, 128),
    ],
)
def test_a_gpus_chunks_are_tiles_of_a_product(vocab, dtype, triton, rows):
    """With Triton kernels a chunk has at most 1 GiB of logits."""
    hidden, weight = (OnGpu(n, dtype) for n in (16384, vocab))
    head = vocab_statistics._Head(0, vocab, vocab, 1.0, None, ("logprobs",), True, triton)
    chunks = vocab_statistics._chunks(hidden, weight, head)  # type: ignore[arg-type]
    assert chunks[0] == slice(0, rows) and chunks[-1].stop == 16384
    assert not triton or rows * vocab * weight.element_size() <= 1 << 30


@pytest.mark.parametrize(("free", "cached", "kept"), [(9, 0, False), (10, 0, True), (4, 6, True), (4, 5, False)])
def test_a_gpu_keeps_logits_that_take_half_of_its_free_memory(monkeypatch, free, cached, kept):
    """5 GB of logits, with `free` GB of the device and `cached` GB of torch's allocator unused."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (20 + cached) * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * 10**9)
    hidden: Any = OnGpu(25_000, torch.bfloat16)
    assert vocab_statistics._keeps_logits(hidden, 100_000, triton=True) == kept
    assert not vocab_statistics._keeps_logits(hidden, 100_000, triton=False)


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


def test_clipped_gradients_are_scaled_in_place_to_the_same_bits():
    """megatron-core passes the gradients as sources and as targets, and multiplies one tensor at a time."""
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=draw) for shape in ((5,), (2, 3), (0,))]
    expected = [one * 0.3 for one in gradients]
    platform._scale_all(65536, torch.zeros(1), [gradients, gradients], 0.3)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
