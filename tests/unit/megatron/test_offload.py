"""Copies in host memory: what pinned memory they take, and that weights come back as they were."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megatron_rl.megatron import offload
from megatron_rl.planning import memory

MIB = 1 << 20
# elements of the weights of one of two tensor ranks of Qwen2.5-7B: embedding, output layer, 28 layers
LAYER = [3584, 3584, 2304, 2304 * 3584, 3584 * 1792, 18944 * 3584, 9472 * 3584]
WEIGHTS = [76032 * 3584, 76032 * 3584, 3584, *LAYER * 28]


def taken(sizes: list[int]) -> int:
    """The bytes that torch takes for pinned blocks of these sizes."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


@pytest.mark.parametrize("width", [2, 4])
def test_pinned_copies_of_a_7b_model_take_little_more_than_its_size(width):
    sizes = [width * elements for elements in WEIGHTS]
    places, blocks = offload._packed(sizes)
    assert taken(sizes) > 1.5 * sum(sizes), "one by one"
    assert taken(blocks) < 1.1 * sum(sizes)
    spans = sorted((block, start, start + size) for (block, start), size in zip(places, sizes, strict=True))
    assert all(end <= blocks[block] for block, _, end in spans)
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(spans)), "two copies in one place"


@pytest.mark.parametrize("elements", [5 * (1 << 27) + 3, (1 << 29) + 1])
def test_one_large_buffer_is_copied_in_pieces(elements):
    """As a buffer of all weights is: in one piece it would take up to twice its size."""
    pieces = torch.empty(elements, dtype=torch.bfloat16, device="meta").split(offload.BLOCK // 2)
    _, blocks = offload._packed([piece.nbytes for piece in pieces])
    assert memory.EXCHANGE == offload.BLOCK, "which a plan counts"
    assert taken([2 * elements]) > 1.5 * 2 * elements and taken(blocks) < 2 * elements + 2 * MIB


def test_copies_have_the_values_and_types_of_theirs():
    torch.manual_seed(0)
    made = [
        torch.randn(3, 5), torch.randn(7).bfloat16(), torch.arange(4), torch.empty(0), torch.tensor(2.5),
        torch.randn(300, 2)[::2],
    ]  # fmt: skip
    copies = offload.host_copies(made)
    assert [(c.dtype, c.shape) for c in copies] == [(m.dtype, m.shape) for m in made]
    assert all(torch.equal(c, m) for c, m in zip(copies, made, strict=True))
    made[0].zero_()
    assert copies[0].abs().sum() > 0 and offload.host_copies([]) == []


def test_swapped_weights_are_exchanged_and_come_back_after_an_error():
    torch.manual_seed(1)
    live, others = ([torch.randn(4, 3).bfloat16(), torch.randn(5)] for _ in range(2))
    parameters = [torch.nn.Parameter(own.clone()) for own in live]
    kept = offload.host_copies(others)
    with pytest.raises(KeyError), offload.swapped(parameters, kept):
        assert all(torch.equal(p, other) for p, other in zip(parameters, others, strict=True))
        raise KeyError
    assert all(torch.equal(p, own) for p, own in zip(parameters, live, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(kept, others, strict=True))


@pytest.fixture
def three():
    """Three parameters, their values, the tensors that take their place, and the values of these."""
    live, others = ([torch.full((2, 3), base + n) for n in range(3)] for base in (0.0, 10.0))
    return [torch.nn.Parameter(own.clone()) for own in live], live, offload.host_copies(others), others


def unchanged(three) -> bool:
    parameters, live, kept, others = three
    return all(map(torch.equal, parameters, live)) and all(map(torch.equal, kept, others))


def test_weights_come_back_when_the_exchange_stops_halfway(three, monkeypatch):
    parameters, _, kept, _ = three
    whole = offload._exchange

    def stops(parameter, *rest):
        if parameter is parameters[2]:
            raise RuntimeError
        whole(parameter, *rest)

    monkeypatch.setattr(offload, "_exchange", stops)
    with pytest.raises(RuntimeError), offload.swapped(parameters, kept):
        raise AssertionError("the block began all the same")
    assert unchanged(three)


def test_weights_come_back_when_memory_runs_out_in_the_block(three, monkeypatch):
    def refuses(*_args, **_options):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError), offload.swapped(three[0], three[2]):
        for name in ("clone", "new_empty", "to"):
            monkeypatch.setattr(torch.Tensor, name, refuses)
        for name in ("empty", "empty_like", "zeros"):
            monkeypatch.setattr(torch, name, refuses)
        three[0][0].clone()
    monkeypatch.undo()
    assert unchanged(three)


@pytest.mark.parametrize("block", [4, 8, 12, 1 << 20])
def test_weights_are_exchanged_in_pieces_of_a_block_at_most(three, monkeypatch, block):
    parameters, _, kept, others = three
    monkeypatch.setattr(offload, "BLOCK", block)
    with offload.swapped([*parameters, torch.nn.Parameter(torch.empty(0))], [*kept, torch.empty(0)]):
        assert all(map(torch.equal, parameters, others))
    assert unchanged(three)


def test_a_parameter_that_comes_twice_gets_its_values_back(three):
    parameters, _, kept, _ = three
    with offload.swapped([parameters[0], parameters[0]], kept[:2]):
        pass
    assert unchanged(three)
