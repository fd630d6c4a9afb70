"""Continuous batching: a row that ends frees its slot for a waiting row.

R rows of a call   B rows in use   V vocabulary   h hidden size
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.devices.host_to_device import upload
from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.batched_session import Row
from megatron_rl.engines.embedded import kv_cache
from megatron_rl.engines.embedded import token_sampling as drawing
from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.embedded.expert_choices import ExpertChoices
from megatron_rl.engines.embedded.stop_conditions import NO_TOKEN, Ends
from megatron_rl.engines.embedded.tandem_writers import Writers
from megatron_rl.engines.protocol import Completion
from megatron_rl.types import Stop

# If less than this share of the slots in use have unfinished rows, unfinished rows are moved to the first slots.
COMPACT_BELOW = 0.95
REFILL = 4  # Waiting rows are prefilled when 1 / REFILL of the slots are free, so that many rows are prefilled at once.
PREFILL_TOKENS = 2048  # maximum number of prompt tokens, including padding, in one forward pass


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A row (one completion to sample) that waits for a free slot."""

    place: int  # index of the row in the call
    tokens: np.ndarray
    prompt: bytes  # bytes of `tokens`, used as a dict key so that equal prompts are prefilled only once
    key: int  # key of the row's random stream


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """The tokens that one step sampled for B rows. Rows that have already ended may be included; their tokens are
    dropped later.
    """

    places: np.ndarray  # [B], indices of the rows in the call
    offsets: np.ndarray  # [B], index of each token in its completion
    drawn: drawing.Drawn
    authors: np.ndarray | None  # [B] bool, True for the senior; only for Tandem RL


class ContinuousBatch:
    """Samples the completions of rows that have the same sampling settings except for seed and length. Rows that end
    are replaced by waiting rows while the other rows continue.

    Every row that is being decoded has a slot in the KV cache. Slots 0 .. size - 1 are in use, by unfinished rows and
    by ended rows that were not replaced yet. The host tracks the length of each row and whether the row has ended, so
    that a step synchronizes with the device only once.

    `writers`: for Tandem RL with two decoders. Both decoders process every token, each with a separate cache; the
    logits of the next token come from the model whose turn it is.
    `tells_experts`: completions contain the experts that the first decoder chose.
    `recorder`: a cuda_graphs.GraphRecorder, which replays the steps of a single dense decoder as CUDA graphs; None runs
    steps directly.
    """

    def __init__(
        self,
        decoders: Sequence[Decoder],
        rows: Sequence[Row],
        *,
        ends: Ends,
        max_batch: int,
        writers: Writers | None = None,
        tells_experts: bool = False,
        recorder: Any = None,
    ) -> None:
        self._decoders, self._ends, self._writers = decoders, ends, writers
        self._device, self._sampling = decoders[0].device, rows[0].sampling
        context = min(decoder.arch.config.max_position_embeddings for decoder in decoders)
        self._prompt_lengths = np.array([len(row.tokens) for row in rows])  # [R]
        most = np.array([row.sampling.max_tokens for row in rows])
        # [R], maximum number of tokens of each completion; 0 or less if the prompt fills the context.
        self._limits = np.minimum(most, context - self._prompt_lengths)
        # [R], length of each finished completion; 0 before it has finished
        self._lengths = np.zeros(len(rows), np.int64)
        self._stops = [Stop.LENGTH] * len(rows)
        requests = [
            _Request(i, r.tokens, r.tokens.tobytes(), sampling_seeds.stream_key(r.sampling.seed, r.key, r.sample))
            for i, r in enumerate(rows)
            if self._limits[i] > 0
        ]
        # Long prompts first: rows of similar length are decoded together, and equal prompts are prefilled together.
        self._waiting = deque(sorted(requests, key=lambda r: (-len(r.tokens), r.prompt, r.place)))
        self._slots, self._size = min(max_batch, len(requests)), 0
        if writers is not None or decoders[0].arch.experts:
            recorder = None
        growth = kv_cache.GROWTH if recorder is None else recorder.growth
        self._caches = [kv_cache.Cache(decoder, self._slots, growth=growth) for decoder in decoders]
        state = torch.zeros(3, self._slots, dtype=torch.int64, device=self._device)
        self._state = state
        # [slots] each: newest token, position of this token, key of the random stream
        self._tokens, self._positions, self._keys = state
        self._places = np.zeros(self._slots, np.int64)  # [slots], index of the row in the call
        self._counts = np.zeros(self._slots, np.int64)  # [slots], number of sampled tokens
        self._alive = np.zeros(self._slots, bool)
        self._tails = np.full((self._slots, ends.window), NO_TOKEN, np.int64)  # last tokens of each completion
        self._drawn: list[_Draw] = []
        self._choices = ExpertChoices(len(rows)) if tells_experts else None
        self._steps = None if recorder is None else recorder.steps(decoders[0], state, self._sampling)

    def run(self) -> list[Completion]:
        """Samples all completions. Returns [R] completions in the order of the [R] rows. Raises FloatingPointError if
        log-probs are not finite.
        """
        living = 0
        while self._waiting or living:
            free = self._slots - living
            if self._waiting and (free >= min(len(self._waiting), max(1, self._slots // REFILL)) or not living):
                self._pack()
                self._admit(min(free, len(self._waiting)))
            else:
                if living < COMPACT_BELOW * self._size:
                    self._pack()
                self._step()
            living = int(self._alive.sum())
        return self._completions()

    def _admit(self, count: int) -> None:
        """Prefills the next `count` waiting rows, each distinct prompt once, and samples the first token of each
        row.
        """
        self._reserve(len(self._waiting[0].tokens) + 1)
        chunk: list[_Request] = []
        prompts: dict[bytes, int] = {}
        for request in (self._waiting.popleft() for _ in range(count)):
            if request.prompt not in prompts and chunk and (len(prompts) + 1) * len(chunk[0].tokens) > PREFILL_TOKENS:
                self._prefill(chunk, prompts)
                chunk, prompts = [], {}
            prompts.setdefault(request.prompt, len(prompts))
            chunk.append(request)
        self._prefill(chunk, prompts)

    def _prefill(self, new: list[_Request], prompts: dict[bytes, int]) -> None:
        """Prefills the `new` rows and puts them into the slots after the slots in use. `prompts`: maps the bytes of
        each distinct prompt to its index in the prefill.
        """
        part = slice(self._size, self._size + len(new))
        padded = np.zeros((len(prompts), len(new[0].tokens)), np.int64)
        for request in new:
            padded[prompts[request.prompt], : len(request.tokens)] = request.tokens
        source = upload(torch.tensor([prompts[r.prompt] for r in new]), self._device)
        last = upload(torch.tensor([len(r.tokens) - 1 for r in new]), self._device)
        read = upload(torch.from_numpy(padded), self._device)
        states, experts = [], []
        for decoder, cache in zip(self._decoders, self._caches, strict=True):
            hidden, fresh, chosen = decoder.prefill(read)
            states.append(hidden[source, last])
            experts.append(chosen)
            cache.put(part, fresh, source)
        if self._choices is not None:
            own = [(r.place, prompts[r.prompt], len(r.tokens)) for r in new]
            self._choices.read_prompts(experts[0], padded.shape[1], own)
        self._positions[part] = last
        self._keys[part] = upload(torch.tensor([r.key for r in new]), self._device)
        self._places[part] = [r.place for r in new]
        self._counts[part], self._alive[part], self._tails[part] = 0, True, NO_TOKEN
        self._size = part.stop
        self._draw(states, part)

    def _step(self) -> None:
        """Samples the next token of the row in every slot in use."""
        part = slice(0, self._size)
        lengths = self._prompt_lengths[self._places[part]] + self._counts[part]
        window = int(lengths[self._alive[part]].max())
        self._reserve(window)
        if self._steps is not None:
            self._take(part, self._steps.draw(self._caches[0].layers, self._size))
            return
        # The position of an ended row is still incremented, so clamp it to the window.
        tokens, positions = self._tokens[part], self._positions[part].clamp(max=window - 1)
        pairs = zip(self._decoders, self._caches, strict=True)
        read = [decoder.decode(tokens, positions, cache.layers, window) for decoder, cache in pairs]
        if self._choices is not None:
            self._choices.read_drawn(read[0][1], self._places[part].copy(), self._counts[part] - 1)
        self._draw([states for states, _ in read], part)

    def _draw(self, states: list[Tensor], part: slice) -> None:
        """Samples the next token of B rows. `states`: [B, h] hidden states of each decoder. `part`: the rows' slots."""
        places = self._places[part]
        logits = self._decoders[0].logits(states[0]) if self._writers is None else self._writers.logits(states, places)
        positions = self._positions[part].add_(1)
        drawn = drawing.draw(logits, self._sampling, self._keys[part], positions)
        self._tokens[part] = drawn.tokens
        self._take(part, drawn)

    def _take(self, part: slice, drawn: drawing.Drawn) -> None:
        """Stores the tokens sampled for B rows, and ends the rows that they complete. `part`: slots of the rows."""
        places, offsets = self._places[part].copy(), self._counts[part].copy()
        self._counts[part] += 1
        told = drawn.tokens.cpu().numpy()  # the step's only synchronization with the device
        ended = self._ends.table[told] | (self._counts[part] >= self._limits[places])
        by_text = np.zeros(len(places), bool)  # whether the new token completes a stop string
        if self._ends.window:
            tails, living = self._tails[part], self._alive[part]
            tails[:, :-1] = tails[:, 1:].copy()
            tails[:, -1] = told
            by_text[living] = self._ends.by_text(tails[living])
        authors = None if self._writers is None else self._writers.write(places, told)
        self._drawn.append(_Draw(places, offsets, drawn, authors))
        finished = np.flatnonzero((ended | by_text) & self._alive[part])
        if len(finished):
            self._finish(finished, part, told, by_text)

    def _finish(self, rows: np.ndarray, part: slice, tokens: np.ndarray, by_text: np.ndarray) -> None:
        """Marks rows as ended, and stores the length and the stop reason of their completions. `part`: the slots of B
        rows. `rows`: indices of the ended rows among the B rows. `tokens`: [B], the newest tokens of the B rows.
        """
        places = self._places[part][rows]
        self._lengths[places] = self._counts[part][rows]
        for row, place, last in zip(rows.tolist(), places.tolist(), tokens[rows].tolist(), strict=True):
            self._stops[place] = self._ends.reason(last, bool(by_text[row]))
        self._alive[part.start + rows] = False

    def _pack(self) -> None:
        """Moves the last unfinished rows into the slots of ended rows, so that the unfinished rows occupy the first
        slots.
        """
        living = np.flatnonzero(self._alive)
        to = np.flatnonzero(~self._alive[: len(living)])
        if len(to):
            origin = living[len(living) - len(to) :]
            for own in (self._places, self._counts, self._tails):
                own[to] = own[origin]
            there, here = upload(torch.from_numpy(to), self._device), upload(torch.from_numpy(origin), self._device)
            for cache in self._caches:
                cache.move(here, there)
            self._state[:, there] = self._state[:, here]
        self._size = len(living)
        self._alive[:] = np.arange(self._slots) < self._size

    def _reserve(self, width: int) -> None:
        """Makes the KV caches at least `width` columns wide. If a cache grows, slots that no row will use are
        dropped.
        """
        rows = self._size if self._steps is None else self._steps.slots(self._size)
        slots = self._slots if self._waiting else rows
        if self._steps is not None and width > self._caches[0].width:
            # Drop the steps first: their references would keep the old cache in memory beside the new cache.
            self._steps.clear()
        for cache in self._caches:
            cache.reserve(width, used=self._size, slots=slots)

    def _completions(self) -> list[Completion]:
        """Builds the completions from the tokens of all steps. Returns [R] completions in the order of the [R] rows."""
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        top = (starts[-1], self._sampling.num_top)
        arrays = {
            "tokens": np.zeros(starts[-1], np.int32), "logprobs": np.zeros(starts[-1], np.float32),
            "model_logprobs": np.zeros(starts[-1], np.float32), "top_ids": np.zeros(top, np.int32),
            "top_logprobs": np.zeros(top, np.float32),
        }  # fmt: skip
        authors = None if self._writers is None else np.zeros(starts[-1], bool)
        if self._drawn:
            places = np.concatenate([draw.places for draw in self._drawn])
            offsets = np.concatenate([draw.offsets for draw in self._drawn])
            kept = offsets < self._lengths[places]  # drops tokens that were sampled for a row after its end
            into = starts[places[kept]] + offsets[kept]
            for name, column in arrays.items():
                column[into] = torch.cat([getattr(draw.drawn, name) for draw in self._drawn]).cpu().numpy()[kept]
            if authors is not None:
                authors[into] = np.concatenate([d.authors for d in self._drawn if d.authors is not None])[kept]
        if not np.isfinite(arrays["model_logprobs"]).all():
            raise FloatingPointError("the model's log-probs are not finite: look for NaN or infinite weights")
        ranges = [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        experts = [None] * len(ranges) if self._choices is None else self._choices.of_rows(self._lengths)
        if not self._sampling.num_top:
            del arrays["top_ids"], arrays["top_logprobs"]
        return [
            Completion(
                **{name: array[part] for name, array in arrays.items()}, stop=stop,
                authors=None if authors is None else authors[part], experts=told,
            )
            for part, stop, told in zip(ranges, self._stops, experts, strict=True)
        ]  # fmt: skip
