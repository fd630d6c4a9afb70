"""Replays a decoding step as one CUDA graph, so that the GPU does not wait for the host to launch hundreds of kernels.

A graph has fixed addresses and shapes, so a step works on memory that does not move. A step uses the first rows of a
batch's state, and all columns of the batch's KV cache. The row count is padded to one of a few values, and the cache
grows by GROWTH columns at a time. Unused rows and columns are computed too, and the results are ignored.

A graph is recorded for each padded row count and each width of the cache. A recording costs about two steps without a
graph, so graphs pay off if each one is replayed often. Therefore only few row counts and widths are used, although
padding costs some computation.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.engines.embedded import token_sampling as drawing
from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.protocol import Sampling

_log = logging.getLogger(__name__)
ROW_UNIT = 8  # above 4, padded row counts are multiples of at least this number
GROWTH = 256  # number of columns (tokens) by which the KV cache of recorded steps grows


def padded_rows(rows: int) -> int:
    """Returns the padded row count of a decoding step that needs at least `rows` rows: 1, 2, 4, or a multiple of an
    eighth of the next power of two (at least ROW_UNIT), for example 160, 192, 224 or 256 for 129 to 256 rows. The
    caller limits the result to the number of slots of the KV cache.
    """
    next_power = 1 << (rows - 1).bit_length()
    if next_power <= 4:
        return next_power
    unit = max(ROW_UNIT, next_power // 8)
    return -(-rows // unit) * unit


class GraphRecorder:
    """A recorder that captures steps as CUDA graphs. All graphs share one stream and one memory pool, because they are
    replayed one after the other and their results are copied out of the pool.

    If a step cannot be captured, this step and all later steps run without a graph, and one warning is logged.
    """

    def __init__(self) -> None:
        self._stream: Any = None  # CUDA stream on which steps run for the first time and are captured
        self._pool: Any = None  # memory pool that all existing graphs share
        # Weak references to the graphs that still exist. Each step holds a strong reference to its graph.
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._refused = False
        # The graph whose capture failed, and the graph that repaired the random generator. These two graphs are kept
        # until all other graphs are destroyed, because destroying a graph frees cuBLAS's workspace for its stream (from
        # torch 2.12), and all graphs share one stream and this workspace (pytorch issue 193402).
        self._failed: tuple[torch.cuda.CUDAGraph, ...] = ()

    @property
    def growth(self) -> int:
        """Number of columns by which the KV cache of recorded steps grows."""
        return GROWTH

    def rehearse(self, step: Callable[[], None]) -> None:
        """Runs a step for the first time, on the capture stream. cuBLAS then allocates its workspace for this stream
        outside the graphs' memory pool; otherwise the pool could not be freed (until torch 2.11).
        """
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

    def steps(self, decoder: Decoder, state: Tensor, sampling: Sampling) -> Steps:
        """Returns the decoding steps of one batch, which this recorder captures."""
        return Steps(decoder, state, sampling, self)

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Captures a step that `rehearse` has run before, without running the step again. Returns the graph's replay
        function, or None if the step cannot be captured.

        Raises RuntimeError if the capture failed and the GPU cannot be used afterwards.
        """
        if self._refused:
            return None
        # torch refuses to reuse a memory pool if all its graphs have ended but its memory has not been freed
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            _capture(graph, step, pool=self._pool, stream=self._stream)
        # A capture fails, for example, if the step synchronizes with the device or memory runs out.
        except RuntimeError as error:
            self._refused, self._failed = True, (graph,)
            self._failed = graph, _mend_generator()
            _log.warning("decoding goes on without CUDA graphs (engine.cuda_graphs): a step is not captured: %s", error)
            return None
        self._graphs.add(graph)
        return graph.replay


def _capture(graph: torch.cuda.CUDAGraph, step: Callable[[], object], *, pool: Any, stream: Any) -> None:
    """Captures a step as a CUDA graph. If the capture fails, raises RuntimeError after it has restored the current
    stream and the GPU memory allocator's pool.
    """
    current = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            step()
    except RuntimeError:
        # the calls below raise RuntimeError if the pool was released already or allocation in it had not begun
        with contextlib.suppress(RuntimeError):
            # CUDAGraph.capture_end skips the two calls below if an earlier call in capture_end fails.
            # Without the two calls, every later torch.cuda.empty_cache fails.
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise
    finally:
        # torch.cuda.graph does not restore the current stream if a capture fails to begin or to end.
        torch.cuda.set_stream(current)


def _mend_generator() -> torch.cuda.CUDAGraph:
    """Repairs the GPU's random generator after a failed capture. The sequence of random numbers does not change.
    Returns the graph that repaired the generator.

    At the beginning of a capture, torch until 2.11 marks the state of the default generator as capturing, and removes
    the mark only at the very end of the capture. After a failed capture the mark remains, so the next sampling raises
    "Offset increment outside graph capture encountered unexpectedly". A small successful capture removes the mark, also
    for the live graphs that share this state. If this capture fails too, the state is replaced by a copy without the
    mark.

    Raises RuntimeError if random numbers, memory or the GPU itself are still unusable.
    """
    try:
        small, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with contextlib.suppress(RuntimeError):
            _capture(small, lambda: torch.zeros(1, device="cuda"), pool=pool, stream=torch.cuda.Stream())
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


class Step:
    """One decoding step of `rows` rows (sequences) that always uses the same memory, so that it can be replayed as a
    CUDA graph. A call replaces the newest token of each row by the next sampled token.

    `state`: [3, rows], the newest tokens, their positions, and the keys of the random streams.
    `layers`: a cache in the format of `Decoder.new_layer_cache`, with at least `rows` rows.

    Results are in `state` and `drawn` until the next call. The first call rehearses the step with
    the recorder, the second call records it, and later calls replay it.
    """

    def __init__(
        self, decoder: Decoder, layers: Sequence[Tensor], state: Tensor, sampling: Sampling, recorder: GraphRecorder
    ) -> None:
        self._decoder, self._layers, self._state, self._sampling = decoder, list(layers), state, sampling
        self._window = layers[0].shape[3]
        logprobs, model_logprobs = torch.zeros(2, state.shape[1], device=state.device)
        top = torch.zeros(state.shape[1], sampling.num_top, device=state.device)
        self.drawn = drawing.Drawn(state[0], logprobs, model_logprobs, top.int(), top)
        # The graph reads this table of rotary embeddings: keep it alive even if the decoder creates a longer table.
        self._held = decoder.turns_up_to(self._window)
        self._recorder, self._calls = recorder, 0
        # None means: call `self.run`. Storing `self.run` here would be a reference cycle, which keeps the step alive.
        self._replay: Callable[[], None] | None = None

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
        """Runs the step. To be capturable as a CUDA graph, the step does not synchronize with the device, has no shapes
        that depend on values, and writes results to fixed addresses.
        """
        tokens, positions, keys = self._state
        # The position of a finished or unused row is still incremented, so clamp it to the window.
        inside = positions.clamp(max=self._window - 1)
        hidden, _ = self._decoder.decode(tokens, inside, self._layers, self._window)
        positions.add_(1)
        drawn = drawing.draw(self._decoder.logits(hidden), self._sampling, keys, positions)
        for held, fresh in zip(self.drawn, drawn, strict=True):
            held.copy_(fresh)


class Steps:
    """The decoding steps of one batch, one step for each padded row count. All steps are dropped when the KV cache is
    reallocated.
    """

    def __init__(self, decoder: Decoder, state: Tensor, sampling: Sampling, recorder: GraphRecorder) -> None:
        self._decoder, self._state, self._sampling, self._recorder = decoder, state, sampling, recorder
        self._width, self._steps = 0, dict[int, Step]()

    def clear(self) -> None:
        """Drops all steps, because each step holds references to the KV cache."""
        self._steps.clear()

    def slots(self, rows: int) -> int:
        """Returns the number of slots that a step of `rows` rows uses."""
        return min(padded_rows(rows), self._state.shape[1])

    def draw(self, layers: Sequence[Tensor], rows: int) -> drawing.Drawn:
        """Samples the next token of each of the first `rows` rows. The results are in newly allocated memory."""
        # the KV cache has grown and was reallocated, so the old steps are invalid
        if layers[0].shape[3] != self._width:
            self._width = layers[0].shape[3]
            self.clear()
        padded = min(padded_rows(rows), layers[0].shape[1])
        if padded not in self._steps:
            own = self._state[:, :padded]
            self._steps[padded] = Step(self._decoder, layers, own, self._sampling, self._recorder)
        step = self._steps[padded]
        step()
        return drawing.Drawn(*(held[:rows].clone() for held in step.drawn))
