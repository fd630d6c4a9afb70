"""Captures of decoding steps over a stand-in for CUDA that keeps pools, streams and the generator as torch 2.11
does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda_graphs import CUBLAS, FakeCuda

from megatron_rl.engines.embedded.cuda_graphs import GraphRecorder, Steps
from megatron_rl.engines.protocol import Sampling

GREEDY = Sampling(max_tokens=8, temperature=0.0)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    return made


class Decoding:
    """Steps of one batch, whose decoder does nothing but a product and, when told, a wait."""

    def __init__(self, cuda: FakeCuda, recorder: GraphRecorder) -> None:
        self.cuda, self.waits, self.runs = cuda, False, 0
        decoder: Any = SimpleNamespace(turns_up_to=lambda window: (), decode=self.decode, logits=lambda hidden: hidden)
        self.steps = Steps(decoder, torch.ones(3, 8, dtype=torch.int64), GREEDY, recorder)

    def decode(self, tokens: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, None]:
        self.runs += self.cuda.capturing is None
        self.cuda.product()
        if self.waits:
            self.cuda.wait()
        return torch.ones(len(tokens), 5), None

    def draw(self, times: int, *, rows: int = 8, width: int = 64) -> None:
        for _ in range(times):
            self.steps.draw([torch.empty(2, 8, 1, width, 1)], rows)


def unharmed(cuda: FakeCuda) -> bool:
    """Says whether the current stream is the default one, memory can be freed, and the next random number is that which
    it would have been."""
    torch.cuda.empty_cache()
    offset = cuda.generator.state["offset"]
    torch.rand(1, device="cuda")
    return cuda.current is cuda.default and offset == 8


def test_graphs_were_lost_when_the_cache_had_grown_once(cuda):
    """Every growth ends all graphs. A pool without graphs that cannot be freed is refused by torch 2.11, and from then
    on no step was captured."""
    batch = Decoding(cuda, GraphRecorder())
    for width in (64, 128, 192):
        batch.draw(5, width=width)
    other = Decoding(cuda, batch.steps._recorder)
    batch.steps.clear()
    other.draw(5)
    assert cuda.replays == 4 * 4 and batch.runs == 3 and other.runs == 1
    assert unharmed(cuda)


def test_graphs_that_live_together_share_a_pool(cuda):
    batch = Decoding(cuda, GraphRecorder())
    for rows in (1, 2, 4, 8):
        batch.draw(3, rows=rows)
    (pool,) = cuda.pools.values()
    assert pool.uses == 4 and cuda.handles == 1
    batch.draw(3, width=128)
    (pool,) = cuda.pools.values()
    assert pool.uses == 1 and cuda.handles == 2


def test_cublas_had_its_memory_for_the_captures_stream_in_the_graphs_pool(cuda):
    batch = Decoding(cuda, GraphRecorder())
    batch.draw(5)
    (stream, pool), *others = cuda.workspaces.items()
    assert pool is None and not others and stream is not cuda.default
    assert not any(CUBLAS in pool.held for pool in cuda.pools.values())
    batch.steps.clear()
    torch.cuda.empty_cache()
    assert not cuda.pools


def test_the_first_run_is_ordered_with_the_current_stream_both_ways(cuda):
    Decoding(cuda, GraphRecorder()).draw(1)
    wait, product, back = cuda.order
    assert wait == ("wait", product[1], cuda.default) and back == ("wait", cuda.default, product[1])
    assert cuda.current is cuda.default and product[1] is not cuda.default


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_capture_that_failed_left_its_stream_and_the_generator_behind(cuda, caplog, where):
    """torch.cuda.graph does not restore the stream when a capture fails to begin or to end; the allocator went on to
    record, and the default generator to be marked."""
    batch = Decoding(cuda, GraphRecorder())
    batch.draw(3, rows=4)
    cuda.fails_to_begin, batch.waits = int(where == "begin"), where == "end"
    batch.draw(3, rows=8)
    batch.waits = False
    assert cuda.current is cuda.default
    assert unharmed(cuda) and batch.runs == 1 + 3
    batch.draw(2, rows=4)  # whose graph is alive
    assert cuda.replays == 2 + 2
    batch.draw(3, rows=2)
    assert batch.runs == 1 + 3 + 3
    batch.steps.clear()
    batch.draw(1, width=128)  # nothing keeps the graph that failed, and its pool, any longer
    torch.cuda.empty_cache()
    assert not cuda.pools and caplog.text.count("decoding goes on without CUDA graphs") == 1


def test_where_nothing_can_be_captured_decoding_goes_on(cuda, caplog):
    cuda.fails_to_begin = 2  # the step's and the small one that would mend the generator
    batch = Decoding(cuda, GraphRecorder())
    batch.draw(5)
    assert unharmed(cuda) and batch.runs == 5 and not cuda.pools
    assert caplog.text.count("decoding goes on without CUDA graphs") == 1


def test_a_gpu_that_cannot_be_used_after_a_capture_ends_the_run(cuda):
    batch = Decoding(cuda, GraphRecorder())
    batch.draw(1)
    cuda.broken = True
    with pytest.raises(RuntimeError, match="start again with engine.cuda_graphs = false"):
        batch.draw(1)
    assert cuda.current is cuda.default
