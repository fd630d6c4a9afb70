"""Replays a decoding step as one CUDA graph, so that a GPU does not wait for the host to start hundreds of kernels.

A graph knows addresses and shapes. So a step works on memory that stays where it is: the first rows of a batch's state,
of which there are only certain numbers, and all columns of its cache, which grows by 64 at a time. Rows and columns
beyond those in use are computed too, and looked at by nobody.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.engines.embedded import token_sampling as drawing
from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.protocol import Sampling

_log = logging.getLogger(__name__)
ROW_UNIT = 8  # numbers of rows are 1, 2, 4 and the multiples of this


class Recorder(Protocol):
    """Records steps: functions that do the same, whenever they are called, with what their memory holds then."""

    def rehearse(self, step: Callable[[], None]) -> None:
        """Runs a step for the first time. This also makes what libraries keep for themselves."""
        ...

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Records a step that was rehearsed, without running it. Returns its replay; None: run the step as it is."""
        ...


def padded_rows(rows: int) -> int:
    """Returns the number of rows that a step for `rows` rows has, were there as many slots."""
    return next((few for few in (1, 2, 4) if rows <= few), -(-rows // ROW_UNIT) * ROW_UNIT)


class GraphRecorder:
    """A recorder of CUDA graphs, which share a stream and a pool of memory: they are replayed one after the other, and
    what they draw is copied out of the pool.

    Where a step cannot be captured, it says so once, and this step and all later ones are run without a graph.
    """

    def __init__(self) -> None:
        self._stream: Any = None  # on which steps are rehearsed and captured
        self._pool: Any = None  # of the graphs that are alive
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # those alive: each is held by its step
        self._refused = False
        # The graph that was not captured, and one that mended what it left, kept while others live: from torch 2.12 a
        # graph that ends frees cuBLAS's memory for its stream, which the others still use (pytorch issue 193402).
        self._failed: tuple[torch.cuda.CUDAGraph, ...] = ()

    def rehearse(self, step: Callable[[], None]) -> None:
        """Runs a step for the first time, on the stream of the captures: the memory that cuBLAS keeps for this stream
        then lies outside of the graphs' pool, which could not be freed with it (until torch 2.11)."""
        if self._refused:
            self._failed = self._failed if self._graphs else ()
            step()
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                step()
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Captures a step that was rehearsed, without running it. Returns the graph's replay, or None.

        Raises RuntimeError when the step cannot be captured and the GPU cannot be used after that.
        """
        if self._refused:
            return None
        if not self._graphs:  # torch refuses a pool whose graphs have all ended, but has not been freed
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            _capture(graph, step, pool=self._pool, stream=self._stream)
        except RuntimeError as error:  # as torch raises for a wait, for memory that is not there, and otherwise
            self._refused, self._failed = True, (graph,)
            self._failed = graph, _mend_generator()
            _log.warning("decoding goes on without CUDA graphs (engine.cuda_graphs): a step is not captured: %s", error)
            return None
        self._graphs.add(graph)
        return graph.replay


def _capture(graph: torch.cuda.CUDAGraph, step: Callable[[], None], *, pool: Any, stream: Any) -> None:
    """Captures a step. Raises RuntimeError where it cannot be; the current stream, and where tensors are allocated on
    the GPU, are then as before."""
    current = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            step()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # it was done, or had not begun
            # CUDAGraph.capture_end does this behind the call that fails; without it empty_cache fails from then on.
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise
    finally:
        # torch.cuda.graph leaves its stream in this place where a capture fails to begin or to end.
        torch.cuda.set_stream(current)


def _mend_generator() -> torch.cuda.CUDAGraph:
    """Makes random numbers on the GPU drawable again after a capture that failed. What is drawn next is the same.
    Returns the graph that did it.

    As a capture begins, torch until 2.11 marks the state of the default generator as capturing, and takes the mark off
    at the capture's very end alone. Another draw then raises "Offset increment outside graph capture encountered
    unexpectedly". A small capture that succeeds takes the mark off, also for the graphs that are alive and know this
    state. Where it fails, too, a copy of the state, which has no mark, takes the state's place.

    Raises RuntimeError when random numbers, memory or the GPU itself cannot be used all the same.
    """
    try:
        small, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with contextlib.suppress(RuntimeError):
            _capture(small, _small_step, pool=pool, stream=torch.cuda.Stream())
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        state = generator.get_state()
        torch.rand(1, device="cuda")
        generator.set_state(state)
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return small
    except RuntimeError as error:
        raise RuntimeError(
            "a decoding step was not captured as a CUDA graph, and the GPU cannot be used after that: "
            "start again with engine.cuda_graphs = false"
        ) from error


def _small_step() -> None:
    torch.zeros(1, device="cuda")


class Step:
    """A decoding step of `rows` rows over memory that stays where it is. A call reads the rows' newest tokens, and
    draws the next ones in place.

    `state` [3, rows]: newest tokens, their positions, keys of the random streams; `layers`: a cache as
    `Decoder.new_layer_cache` has it, with at least as many rows. What is drawn is in `state`, `logprobs` and
    `model_logprobs` until the next call. The first call has the step rehearsed, the second one has it recorded.
    """

    def __init__(
        self, decoder: Decoder, layers: Sequence[Tensor], state: Tensor, sampling: Sampling, recorder: Recorder
    ) -> None:
        self._decoder, self._layers, self._state, self._sampling = decoder, list(layers), state, sampling
        self._window = layers[0].shape[3]
        self.logprobs, self.model_logprobs = torch.zeros(2, state.shape[1], device=state.device)  # [rows] each
        self._held = decoder.turns_up_to(self._window)  # a graph reads this table, though the decoder may make a longer
        self._recorder, self._calls = recorder, 0
        self._replay: Callable[[], None] | None = None  # not `run`: a step that held itself would outlive its use

    def __call__(self) -> None:
        self._calls += 1
        if self._calls == 1:
            self._recorder.rehearse(self.run)
            return
        if self._calls == 2:
            self._replay = self._recorder.record(self.run)
        if self._replay is None:
            self.run()
        else:
            self._replay()

    def run(self) -> None:
        """Does the step: no wait for the device, no shape that depends on values, no result at a new address."""
        tokens, positions, keys = self._state
        # A row that has ended, or that nobody uses, goes on being counted: it must stay within the window.
        inside = positions.clamp(max=self._window - 1)
        hidden, _ = self._decoder.decode(tokens, inside, self._layers, self._window)
        positions.add_(1)
        drawn = drawing.draw(self._decoder.logits(hidden), self._sampling, keys, positions)
        for held, fresh in zip((tokens, self.logprobs, self.model_logprobs), drawn, strict=True):
            held.copy_(fresh)


class Steps:
    """The steps of one batch by their number of rows, for as long as its cache stays where it is."""

    def __init__(self, decoder: Decoder, state: Tensor, sampling: Sampling, recorder: Recorder) -> None:
        self._decoder, self._state, self._sampling, self._recorder = decoder, state, sampling, recorder
        self._width, self._steps = 0, dict[int, Step]()

    def clear(self) -> None:
        """Forgets all steps, which hold the cache's layers."""
        self._steps.clear()

    def draw(self, layers: Sequence[Tensor], rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Decodes one token of the first `rows` rows. -> their tokens, log-probs, and the model's log-probs, [rows]
        each, in memory of their own."""
        if layers[0].shape[3] != self._width:  # the cache has grown: it lies elsewhere now
            self._width = layers[0].shape[3]
            self.clear()
        padded = min(padded_rows(rows), layers[0].shape[1])
        if padded not in self._steps:
            own = self._state[:, :padded]
            self._steps[padded] = Step(self._decoder, layers, own, self._sampling, self._recorder)
        step = self._steps[padded]
        step()
        return self._state[0, :rows].clone(), step.logprobs[:rows].clone(), step.model_logprobs[:rows].clone()
