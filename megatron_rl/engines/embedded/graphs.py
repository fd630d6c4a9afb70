"""Replays a decoding step as one CUDA graph, so that a GPU does not wait for the host to start hundreds of kernels.

A graph knows addresses and shapes. So a step works on memory that stays where it is: the first rows of a batch's state,
of which there are only certain numbers, and all columns of its cache, which grows by 64 at a time. Rows and columns
beyond those in use are computed too, and looked at by nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.engines.base import Sampling
from megatron_rl.engines.embedded import sampling as drawing
from megatron_rl.engines.embedded.model import Decoder

_log = logging.getLogger(__name__)
ROW_UNIT = 8  # numbers of rows are 1, 2, 4 and the multiples of this
# A step -> what does the same with what is there then; None where the step is to be run as it is.
Recorder = Callable[[Callable[[], None]], Callable[[], None] | None]


def padded_rows(rows: int) -> int:
    """Returns the number of rows that a step for `rows` rows has, were there as many slots."""
    return next((few for few in (1, 2, 4) if rows <= few), -(-rows // ROW_UNIT) * ROW_UNIT)


class GraphRecorder:
    """A recorder whose CUDA graphs share one pool of memory: they are replayed one after the other, and what they draw
    is copied out of it.

    Where a step cannot be captured, it says so once, and this step and all later ones are run without a graph.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._refused = False

    def __call__(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Captures a step that has run before, without running it. Returns the graph's replay, or None."""
        if self._refused:
            return None
        try:
            self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                step()
        except RuntimeError as error:  # as torch raises for a wait, for memory that is not there, and otherwise
            self._refused = True
            _log.warning("decoding goes on without CUDA graphs (engine.cuda_graphs): a step is not captured: %s", error)
            return None
        return graph.replay


class Step:
    """A decoding step of `rows` rows over memory that stays where it is. A call reads the rows' newest tokens, and
    draws the next ones in place.

    `state` [3, rows]: newest tokens, their positions, keys of the random streams; `layers`: a cache as
    `Decoder.new_layer_cache` has it, with at least as many rows. What is drawn is in `state`, `logprobs` and
    `model_logprobs` until the next call. The first call runs the step as it is, which also makes what libraries keep
    for themselves; the second one has it recorded.
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
        if self._calls == 1:
            self._replay = self._recorder(self.run)
        self._calls += 1
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
