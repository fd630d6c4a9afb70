"""The embedded engine: batched generation with a key/value cache inside the trainer's process, for CPU and one GPU per rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.engines.base import Completion, Sampling
from megatron_rl.engines.embedded_model import Decoder, gather_weights
from megatron_rl.engines.sampler import draw, stream_key
from megatron_rl.types import Stop
from megatron_rl.weights import hf

Row = tuple[Sequence[int], int, int]  # prompt tokens, prompt index, sample index
STOP_WINDOW = 24  # tokens decoded again each step to look for stop strings
COMPACT_BELOW = 0.75  # share of living rows under which the cache is packed together
GROWTH = 64  # cache columns added at once


@dataclass
class _Sequence:
    """One completion in the making."""

    request: int  # its place in the answer
    prompt: Sequence[int]
    key: int
    budget: int  # tokens it may still draw in all
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)

    def completion(self, stop: Stop) -> Completion:
        return Completion(tokens=self.tokens, logprobs=self.logprobs, model_logprobs=self.model_logprobs, stop=stop)


class EmbeddedEngine:
    """Generates on this rank with a copy of the weights. Implements engines.base.Engine for a world of one rank.

    `tokenizer` is needed for stop strings alone. Greedy output equals transformers' `generate`.
    """

    def __init__(
        self, model_dir: str | Path, *, max_batch: int = 256, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
        tokenizer: Any = None,
    ) -> None:  # fmt: skip
        self.version = -1
        self.directory = hf.local_directory(model_dir)
        self.arch = hf.read_architecture(self.directory)
        self._tokenizer, self._max_batch, self._dtype = tokenizer, max_batch, dtype
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._eos = hf.eos_tokens(self.directory, self.arch)
        self._decoder: Decoder | None = None

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Takes a whole weight stream; on any error the old weights and version stay."""
        self._decoder = Decoder(self.arch, gather_weights(weights, self.arch, self._dtype, self._device))
        self.version = version

    def load_pretrained(self) -> None:
        """Loads the model directory's own weights, as version 0."""
        self.load(hf.read_tensors(self.directory), version=0)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """[P] prompts -> [P][n] completions, in order."""
        rows = [(prompt, i, j) for i, prompt in enumerate(prompts) for j in range(sampling.n)]
        flat = self.generate_rows(rows, sampling)
        return [flat[i * sampling.n : (i + 1) * sampling.n] for i in range(len(prompts))]

    @torch.inference_mode()
    def generate_rows(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]:
        """One completion per row, in order; a row's draw depends on its indices and the seed, not on its neighbours.

        Raises RuntimeError before the first load, ValueError for an empty prompt and for stop strings without a tokenizer.
        """
        if self._decoder is None:
            raise RuntimeError("the engine has no weights yet: call load (or load_pretrained) first")
        if sampling.stop_strings and self._tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: give one to EmbeddedEngine")
        if any(not prompt for prompt, _, _ in rows):
            raise ValueError("an empty prompt cannot be continued: give at least one token")
        if not rows:
            return []
        return _Batch(self._decoder, rows, sampling, self).run()

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Model log-probability of every token given those before it; 0.0 for the first. [S][T] -> [S][T]."""
        if self._decoder is None:
            raise RuntimeError("the engine has no weights yet: call load (or load_pretrained) first")
        out = []
        for tokens in sequences:
            row = torch.tensor([list(tokens)], device=self._device)
            logprobs = self._decoder.logits(self._decoder.prefill(row)[0])[0].float().log_softmax(dim=-1)
            out.append([0.0, *logprobs[:-1].gather(1, row[0, 1:, None])[:, 0].tolist()])
        return out

    def stop_of(self, sequence: _Sequence, sampling: Sampling) -> Stop | None:
        """Why `sequence` ends after its last token, or None."""
        last = sequence.tokens[-1]
        if last in self._eos:
            return Stop.EOS
        if last in sampling.stop_tokens:
            return Stop.STOP
        if sampling.stop_strings:
            tail = self._tokenizer.decode(sequence.tokens[-STOP_WINDOW:], skip_special_tokens=False)
            if any(text in tail for text in sampling.stop_strings):
                return Stop.STOP
        return Stop.LENGTH if len(sequence.tokens) >= sequence.budget else None

    @property
    def max_batch(self) -> int:
        return self._max_batch


class _Batch:
    """Continuous batching of one call: rows that end leave their slot, waiting ones take it."""

    def __init__(self, decoder: Decoder, rows: Sequence[Row], sampling: Sampling, engine: EmbeddedEngine) -> None:
        self.decoder, self.sampling, self.engine = decoder, sampling, engine
        arch, self.device = decoder.arch, decoder.weights.norm.device
        limit = arch.config.max_position_embeddings
        sequences = [
            _Sequence(i, prompt, stream_key(sampling.seed, p, j), min(sampling.max_tokens, limit - len(prompt)))
            for i, (prompt, p, j) in enumerate(rows)
        ]
        self.done: list[Completion | None] = [s.completion(Stop.LENGTH) if s.budget < 1 else None for s in sequences]
        # Long prompts first: rows of similar length live together, and the cache is at its width from the start.
        self.waiting = deque(sorted((s for s in sequences if s.budget >= 1), key=lambda s: (-len(s.prompt), s.request)))
        self.slots: list[_Sequence | None] = []
        empty = torch.zeros(0, arch.kv_heads, 0, arch.head_dim, dtype=decoder.weights.norm.dtype, device=self.device)
        self.cache = [(empty, empty) for _ in range(arch.num_layers)]
        self.tokens = torch.zeros(0, dtype=torch.int64, device=self.device)  # [slots] last token of each row
        self.positions = torch.zeros(0, dtype=torch.int64, device=self.device)  # [slots] where it stands
        self.keys = torch.zeros(0, dtype=torch.int64, device=self.device)

    def run(self) -> list[Completion]:
        while self.waiting or any(self.slots):
            free = self.engine.max_batch - sum(s is not None for s in self.slots)
            if self.waiting and (free >= min(len(self.waiting), max(1, self.engine.max_batch // 4)) or not any(self.slots)):
                self._admit(free)
                continue
            self._compact()
            self._step()
        return [c for c in self.done if c is not None]

    def _admit(self, free: int) -> None:
        """Prefills the next `free` rows, each distinct prompt once, and draws their first tokens."""
        new = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        distinct = list(dict.fromkeys(tuple(s.prompt) for s in new))
        number = {prompt: i for i, prompt in enumerate(distinct)}
        width = max(map(len, distinct))
        padded = torch.zeros(len(distinct), width, dtype=torch.int64)
        for i, prompt in enumerate(distinct):
            padded[i, : len(prompt)] = torch.tensor(prompt)
        hidden, fresh = self.decoder.prefill(padded.to(self.device))
        source = torch.tensor([number[tuple(s.prompt)] for s in new], device=self.device)
        lengths = torch.tensor([len(s.prompt) for s in new], device=self.device)
        logits = self.decoder.logits(hidden[source, lengths - 1])
        keys = torch.tensor([s.key for s in new], device=self.device)
        living = [i for i, s in enumerate(self.slots) if s is not None]
        self._keep(living)
        self._reserve(width + 1)
        self._append(new, [(k[source], v[source]) for k, v in fresh])
        self.keys = torch.cat([self.keys, keys])
        tokens = self._draw(logits, keys, lengths, range(len(living), len(self.slots)))
        self.tokens = torch.cat([self.tokens, tokens])
        self.positions = torch.cat([self.positions, lengths])

    def _append(self, new: list[_Sequence], fresh: list[tuple[Tensor, Tensor]]) -> None:
        self.slots = [*self.slots, *new]
        width = self.cache[0][0].shape[2]

        def widened(part: Tensor) -> Tensor:
            grown = part.new_zeros(*part.shape[:2], width, part.shape[3])
            grown[:, :, : part.shape[2]] = part
            return grown

        self.cache = [
            (torch.cat([k, widened(nk)]), torch.cat([v, widened(nv)])) for (k, v), (nk, nv) in zip(self.cache, fresh, strict=True)
        ]  # fmt: skip

    def _step(self) -> None:
        window = int(self.positions.max()) + 1
        self._reserve(window)
        hidden = self.decoder.decode(self.tokens, self.positions, self.cache, window)
        self.positions = self.positions + 1
        self.tokens = self._draw(self.decoder.logits(hidden), self.keys, self.positions, range(len(self.slots)))

    def _draw(self, logits: Tensor, keys: Tensor, positions: Tensor, slots: range) -> Tensor:
        """Draws one token per row, records it, and empties the slots of rows that end. -> tokens [rows]."""
        tokens, logprobs, model_logprobs = draw(logits, self.sampling, keys, positions)
        for slot, token, logprob, model_logprob in zip(slots, tokens.tolist(), logprobs.tolist(), model_logprobs.tolist(), strict=True):
            sequence = self.slots[slot]
            if sequence is None:
                continue
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.model_logprobs.append(model_logprob)
            stop = self.engine.stop_of(sequence, self.sampling)
            if stop is not None:
                self.done[sequence.request] = sequence.completion(stop)
                self.slots[slot] = None
        return tokens

    def _compact(self) -> None:
        living = [i for i, s in enumerate(self.slots) if s is not None]
        if len(living) < COMPACT_BELOW * len(self.slots):
            self._keep(living)

    def _keep(self, living: list[int]) -> None:
        if len(living) == len(self.slots):
            return
        index = torch.tensor(living, dtype=torch.int64, device=self.device)
        self.slots = [self.slots[i] for i in living]
        self.cache = [(k[index], v[index]) for k, v in self.cache]
        self.tokens, self.positions, self.keys = self.tokens[index], self.positions[index], self.keys[index]

    def _reserve(self, width: int) -> None:
        """Makes the cache at least `width` columns wide."""
        held = self.cache[0][0].shape[2]
        if width <= held:
            return
        grown = -(-width // GROWTH) * GROWTH

        def wider(part: Tensor) -> Tensor:
            return torch.cat([part, part.new_zeros(*part.shape[:2], grown - held, part.shape[3])], dim=2)

        self.cache = [(wider(k), wider(v)) for k, v in self.cache]
