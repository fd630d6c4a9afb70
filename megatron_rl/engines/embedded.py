"""The embedded engine: batched generation with a key/value cache inside the trainer's process, for CPU and one GPU per rank."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.authors import Pen, boundaries, resumed
from megatron_rl.config.schema import Strategy
from megatron_rl.engines import sampler
from megatron_rl.engines.base import Completion, Row, Sampling
from megatron_rl.engines.embedded_model import Decoder, Places, gather_weights, storage
from megatron_rl.types import Stop
from megatron_rl.weights import hf

COMPACT_BELOW = 0.95  # share of living rows under which the cache is packed together
GROWTH = 64  # cache columns added at once
PREFILL_TOKENS = 2048  # prompt tokens, padding included, that go through the model at once
SCORE_TOKENS = 1024  # positions whose logits are held at once
PARTIAL = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer shows for a character whose bytes are not all there


class EmbeddedEngine:
    """Generates on this rank with a copy of the weights. Implements engines.base.Engine for a world of one rank.

    Greedy output equals transformers' `generate`. A sequence ends at the end-of-sequence tokens of the model directory and of
    `tokenizer`, which stop strings need. `max_batch` rows are decoded together. `junior`: a frozen model that writes along where
    `Sampling.tandem` says so; its weights are read now, from its directory. Raises ValueError for a model that is not supported.
    """

    def __init__(
        self, model_dir: str | Path, *, max_batch: int = 256, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
        tokenizer: Any = None, junior: str | Path | None = None,
    ) -> None:  # fmt: skip
        if max_batch < 1:
            raise ValueError(f"max_batch = {max_batch}: give at least 1 row")
        self.version = -1
        self._directory = hf.local_directory(model_dir)
        self.arch = _dense(self._directory)
        self._max_batch, self._dtype, self._tokenizer = max_batch, dtype, tokenizer
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._eos = hf.eos_tokens(self._directory, self.arch)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self._eos |= {tokenizer.eos_token_id}
        self._decoder: Decoder | None = None
        self._landing: tuple[Decoder, Places] | None = None
        self._boundaries: dict[Strategy, frozenset[int]] = {}
        self._junior: Decoder | None = None
        if junior is not None:
            directory = hf.local_directory(junior)
            arch = _dense(directory)
            if arch.vocab != self.arch.vocab:
                raise ValueError(
                    f"{junior} has {arch.vocab} tokens, {model_dir} {self.arch.vocab}: a tandem needs one vocabulary"
                )
            self._junior = Decoder(arch, gather_weights(hf.read_tensors(directory), arch, dtype, self._device))

    @property
    def targets(self) -> Places:
        """Where a refit writes. The storage is made now; it serves from the first `commit_refit` on."""
        if self._landing is None:
            weights, places = storage(self.arch, self._dtype, self._device)
            self._landing = Decoder(self.arch, weights), Places(places)
        return self._landing[1]

    def begin_refit(self) -> None:
        """The weights are mixed from here on: nothing is generated until `commit_refit`."""
        self._decoder, self.version = None, -1

    def commit_refit(self, version: int) -> None:
        """What was written to `targets` is whole, and of this version."""
        assert self._landing is not None, "nothing was written"
        self._decoder, self.version = self._landing[0], version

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Takes a whole weight stream of full tensors under Hugging Face names; on any error the old weights and version stay.

        Raises ValueError for unknown, missing, repeated or misshapen tensors.
        """
        self._decoder = Decoder(self.arch, gather_weights(weights, self.arch, self._dtype, self._device))
        self.version = version

    def load_pretrained(self) -> None:
        """Loads the model directory's own weights, as version 0. Raises FileNotFoundError when it has none."""
        self.load(hf.read_tensors(self._directory), version=0)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """[P] prompts -> [P][n] completions, in order. Raises as `generate_rows` does."""
        rows = [(prompt, i, j) for i, prompt in enumerate(prompts) for j in range(sampling.n)]
        flat = self.generate_rows(rows, sampling)
        return [flat[i * sampling.n : (i + 1) * sampling.n] for i in range(len(prompts))]

    @torch.inference_mode()
    def generate_rows(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]:
        """One completion per row, in order; a row's draw depends on its indices and the seed, not on its neighbours.

        A row that fills the model's context ends with Stop.LENGTH. Raises RuntimeError before the first load; ValueError for an empty
        prompt, a token outside the vocabulary, an impossible sampling setting, stop strings without a tokenizer, and a tandem without a
        junior; FloatingPointError when the model's log-probs are not finite.
        """
        decoder = self._loaded()
        sampler.check(sampling)
        if sampling.stop_strings and self._tokenizer is None:
            raise ValueError(f"stop_strings {sampling.stop_strings} need a tokenizer: give one to EmbeddedEngine")
        for prompt, i, _ in rows:
            self._check_tokens(prompt, f"prompt {i}")
        if not rows:
            return []
        ends = _Ends(self._eos, sampling, self._tokenizer, decoder)
        pens, decoders = self._pens(rows, sampling), [decoder]
        if pens is not None and self._junior is not None:
            decoders.append(self._junior)
        return _Batch(decoders, rows, sampling, ends=ends, max_batch=self._max_batch, pens=pens).run()

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Model log-probability of every token given those before it, at temperature 1; 0.0 for the first. [S][T] -> [S][T].

        Raises as `generate_rows` does.
        """
        out = []
        for tokens in sequences:
            labels, scores = torch.tensor(tokens[1:], device=self._device)[:, None], [0.0]
            for logprobs in self.distributions(tokens):
                scores += logprobs.gather(1, labels[len(scores) - 1 :][: len(logprobs)])[:, 0].tolist()
            out.append(scores)
        return out

    @torch.inference_mode()
    def distributions(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        """Log-probabilities of every token that may come after each one but the last, at temperature 1: [T - 1, V] float32, in parts of
        some rows. Raises as `generate_rows` does."""
        decoder = self._loaded()
        self._check_tokens(tokens, "a sequence")
        hidden = decoder.prefill(torch.tensor([list(tokens)], device=self._device))[0][0, :-1]
        for part in hidden.split(SCORE_TOKENS):
            yield decoder.logits(part).float().log_softmax(dim=-1)

    def _pens(self, rows: Sequence[Row], sampling: Sampling) -> list[Pen] | None:
        """Of each row who writes next; None for the model alone."""
        if sampling.tandem is None:
            return None
        if self._junior is None:
            raise ValueError(
                "sampling.tandem: this engine has no junior; give one to EmbeddedEngine (roles.NAME.tandem)"
            )
        rule = sampling.tandem.rule
        if rule.strategy not in self._boundaries:
            if self._tokenizer is None:
                raise ValueError(
                    f"sampling.tandem with strategy {rule.strategy!r} needs a tokenizer: give one to EmbeddedEngine"
                )
            self._boundaries[rule.strategy] = boundaries(self._tokenizer, rule.strategy)
        ids, own, written = self._boundaries[rule.strategy], sampling.tandem.seed, sampling.tandem.written
        seeds = [sampler.request_seed(sampling.seed, i) + j if own is None else own for _, i, j in rows]
        return [
            resumed(rule, ids, seed, prompt[len(prompt) - written :])
            for seed, (prompt, _, _) in zip(seeds, rows, strict=True)
        ]

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError(
                "the engine has no whole weights: call load (or load_pretrained), or finish the refit first"
            )
        return self._decoder

    def _check_tokens(self, tokens: Sequence[int], name: str) -> None:
        if not tokens:
            raise ValueError(f"{name} is empty and cannot be continued: give at least one token")
        if min(tokens) < 0 or max(tokens) >= self.arch.vocab:
            worst = next(t for t in tokens if not 0 <= t < self.arch.vocab)
            raise ValueError(
                f"{name} holds token {worst}, the model's vocabulary has {self.arch.vocab}: use the model's own tokenizer"
            )


def _dense(directory: Path) -> hf.Architecture:
    arch = hf.read_architecture(directory)
    if arch.experts:
        raise ValueError(
            f"{directory}: the embedded engine runs dense models only, this {arch.family} has {arch.experts} experts"
        )
    return arch


class _Ends:
    """Where completions of one call end: by token, looked up for all rows at once, and by text."""

    def __init__(self, eos: frozenset[int], sampling: Sampling, tokenizer: Any, decoder: Decoder) -> None:
        self._eos, self._strings, self._tokenizer = eos, sampling.stop_strings, tokenizer
        table = torch.zeros(decoder.arch.vocab, dtype=torch.bool)
        table[[t for t in (*eos, *sampling.stop_tokens) if 0 <= t < decoder.arch.vocab]] = True
        self._table = table.to(decoder.device)
        self._stop_tokens = frozenset(sampling.stop_tokens)
        # A token has a byte at least, but for the edges of a window, where a character may be cut or a space dropped.
        self._window = max((len(s.encode()) for s in self._strings), default=0) + 4
        self._last_characters = {s[-1] for s in self._strings}
        self._texts: dict[int, bool] = {}  # token -> whether it could complete a stop string

    @property
    def by_text(self) -> bool:
        return bool(self._strings)

    def by_token(self, tokens: Tensor) -> Tensor:
        """[B] -> bool [B]."""
        return self._table[tokens]

    def completes_string(self, tokens: list[int]) -> bool:
        """Whether the last of `tokens` completes a stop string."""
        last = tokens[-1]
        if last not in self._texts:
            text = self._tokenizer.decode([last], skip_special_tokens=False)
            self._texts[last] = PARTIAL in text or any(c in text or c.isspace() for c in self._last_characters)
        if not self._texts[last]:
            return False
        tail = self._tokenizer.decode(tokens[-self._window :], skip_special_tokens=False)
        return any(s in tail for s in self._strings)

    def reason(self, last: int, by_text: bool) -> Stop:
        if last in self._eos:
            return Stop.EOS
        return Stop.STOP if by_text or last in self._stop_tokens else Stop.LENGTH


@dataclass(frozen=True)
class _Request:
    """One row of a call."""

    place: int  # in the answer
    prompt: tuple[int, ...]
    key: int  # of its random stream
    limit: int  # length at which it ends, prompt included


class _Batch:
    """Continuous batching of one call: rows that end leave their slot, waiting ones take it.

    Slots 0 .. size - 1 are in use, living rows and, until the next packing, dead ones. With `pens`, one per row, there are two decoders:
    both read every token, each with a cache of its own, and the one whose turn it is gives the next token's logits.
    """

    def __init__(
        self, decoders: list[Decoder], rows: Sequence[Row], sampling: Sampling, *, ends: _Ends, max_batch: int, pens: list[Pen] | None
    ) -> None:  # fmt: skip
        self._decoders, self._sampling, self._ends, self._pens = decoders, sampling, ends, pens
        self._device = decoders[0].device
        context = min(decoder.arch.config.max_position_embeddings for decoder in decoders)
        requests = [
            _Request(
                place,
                tuple(prompt),
                sampler.stream_key(sampling.seed, i, j),
                min(len(prompt) + sampling.max_tokens, context),
            )
            for place, (prompt, i, j) in enumerate(rows)
        ]
        self._prompt_lengths = [len(r.prompt) for r in requests]
        self._lengths = [0] * len(rows)  # of each completion, when it has ended
        self._stops = [Stop.LENGTH] * len(rows)
        # Long prompts first: rows of similar length live together, and samples of one prompt are prefilled together.
        fitting = [r for r in requests if len(r.prompt) < r.limit]
        self._waiting = deque(sorted(fitting, key=lambda r: (-len(r.prompt), r.prompt, r.place)))
        self._slots = min(max_batch, len(fitting))
        self._size = 0
        self._caches = [decoder.new_cache(self._slots, 0) for decoder in decoders]
        self._width = 0
        state = torch.zeros(5, self._slots, dtype=torch.int64, device=self._device)
        self._state = state
        self._tokens, self._positions, self._keys, self._limits, self._places = (
            state  # [slots] each; positions: of `tokens`
        )
        self._alive = [False] * self._slots
        self._drawn: list[
            tuple[Tensor, Tensor, Tensor, Tensor]
        ] = []  # places, tokens, log-probs, model's log-probs of each draw
        self._authors: list[list[bool]] = [[] for _ in rows]  # of each completion, with pens
        self._texts: dict[int, list[int]] = {r.place: [] for r in fitting} if ends.by_text else {}

    def run(self) -> list[Completion]:
        living = 0
        while self._waiting or living:
            free = self._slots - living
            if self._waiting and (free >= min(len(self._waiting), max(1, self._slots // 4)) or not living):
                self._pack()
                self._admit(min(free, len(self._waiting)))
            else:
                if living < COMPACT_BELOW * self._size:
                    self._pack()
                self._step()
            living = sum(self._alive)
        return self._completions()

    def _admit(self, count: int) -> None:
        """Prefills the next `count` rows, each distinct prompt once, and draws their first tokens."""
        self._reserve(len(self._waiting[0].prompt) + 1)
        chunk: list[_Request] = []
        prompts: dict[tuple[int, ...], int] = {}
        for request in (self._waiting.popleft() for _ in range(count)):
            if request.prompt not in prompts and chunk and (len(prompts) + 1) * len(chunk[0].prompt) > PREFILL_TOKENS:
                self._prefill(chunk, prompts)
                chunk, prompts = [], {}
            prompts.setdefault(request.prompt, len(prompts))
            chunk.append(request)
        self._prefill(chunk, prompts)

    def _prefill(self, new: list[_Request], prompts: dict[tuple[int, ...], int]) -> None:
        """Puts `new` rows behind those in use; `prompts` numbers their distinct prompts."""
        device, part = self._device, slice(self._size, self._size + len(new))
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(device)
        source = torch.tensor([prompts[r.prompt] for r in new], device=device)
        last = torch.tensor([len(r.prompt) - 1 for r in new], device=device)
        states = []
        for decoder, cache in zip(self._decoders, self._caches, strict=True):
            hidden, fresh = decoder.prefill(padded)
            states.append(hidden[source, last])
            for held, made in zip(cache, fresh, strict=True):
                held[:, part, :, : made.shape[3]] = made[:, source]
        self._positions[part] = last
        for state, values in (
            (self._keys, [r.key for r in new]),
            (self._limits, [r.limit for r in new]),
            (self._places, [r.place for r in new]),
        ):
            state[part] = torch.tensor(values, device=device)
        self._alive[part] = [True] * len(new)
        self._size = part.stop
        self._draw(self._logits(states, part), part)

    def _step(self) -> None:
        """Decodes one token of every row in use."""
        part = slice(0, self._size)
        window = int(self._positions[part].max()) + 1
        self._reserve(window)
        tokens, positions = self._tokens[part], self._positions[part]
        states = [
            d.decode(tokens, positions, cache, window) for d, cache in zip(self._decoders, self._caches, strict=True)
        ]
        self._draw(self._logits(states, part), part)

    def _logits(self, states: list[Tensor], part: slice) -> Tensor:
        """Of each decoder [B, h] for the rows in slots `part` -> [B, V], of the one that writes the row's next token."""
        if self._pens is None:
            return self._decoders[0].logits(states[0])
        senior = torch.tensor([self._pens[place].senior for place in self._places[part].tolist()], device=self._device)
        logits = torch.empty(len(senior), self._decoders[0].arch.vocab, dtype=states[0].dtype, device=self._device)
        for decoder, state, own in zip(self._decoders, states, (senior, ~senior), strict=True):
            logits[own] = decoder.logits(state[own])
        return logits

    def _draw(self, logits: Tensor, part: slice) -> None:
        """Draws the next token of the rows in slots `part` and ends those that it finishes."""
        positions = self._positions[part].add_(1)
        tokens, logprobs, model_logprobs = sampler.draw(logits, self._sampling, self._keys[part], positions)
        self._tokens[part] = tokens
        places = self._places[part].clone()
        self._drawn.append((places, tokens, logprobs, model_logprobs))
        if self._pens is not None:
            for row, (place, token) in enumerate(zip(places.tolist(), tokens.tolist(), strict=True)):
                if self._alive[part.start + row]:
                    self._authors[place].append(self._pens[place].write(token))
        by_text = self._ended_by_text(part, places, tokens) if self._ends.by_text else frozenset()
        ended = (self._ends.by_token(tokens) | (positions + 1 >= self._limits[part])).nonzero()[:, 0].tolist()
        for row in by_text.union(ended):
            if self._alive[part.start + row]:
                place = int(places[row])
                self._lengths[place] = int(positions[row]) + 1 - self._prompt_lengths[place]
                self._stops[place] = self._ends.reason(int(tokens[row]), row in by_text)
                self._alive[part.start + row] = False
                positions[row] = 0  # a dead row must not widen the window

    def _ended_by_text(self, part: slice, places: Tensor, tokens: Tensor) -> frozenset[int]:
        """Rows of `part` whose new token completes a stop string."""
        found = set()
        for row, (place, token) in enumerate(zip(places.tolist(), tokens.tolist(), strict=True)):
            if self._alive[part.start + row]:
                self._texts[place].append(token)
                if self._ends.completes_string(self._texts[place]):
                    found.add(row)
        return frozenset(found)

    def _pack(self) -> None:
        """Moves the last living rows into the slots of dead ones, so that the living stand in front."""
        living = [slot for slot in range(self._size) if self._alive[slot]]
        holes = [slot for slot in range(len(living)) if not self._alive[slot]]
        if holes:
            to = torch.tensor(holes, device=self._device)
            origin = torch.tensor(living[-len(holes) :], device=self._device)
            for held in itertools.chain(*self._caches):
                held[:, to] = held[:, origin]
            self._state[:, to] = self._state[:, origin]
        self._size = len(living)
        self._alive = [slot < self._size for slot in range(self._slots)]

    def _reserve(self, width: int) -> None:
        """Makes the cache at least `width` columns wide, and without slots that no row will come to."""
        if width <= self._width:
            return
        if not self._waiting:
            self._slots = self._size
        columns = -(-width // GROWTH) * GROWTH
        for i, decoder in enumerate(self._decoders):
            wider = decoder.new_cache(self._slots, columns)
            for held, grown in zip(self._caches[i], wider, strict=True):
                grown[:, : self._size, :, : self._width] = held[:, : self._size]
            self._caches[i] = wider
        self._width = columns

    def _completions(self) -> list[Completion]:
        """Every row's draws, in the order of the call."""
        if not self._drawn:
            authors = None if self._pens is None else []
            return [
                Completion(tokens=[], logprobs=[], model_logprobs=[], stop=stop, authors=authors)
                for stop in self._stops
            ]
        places, tokens, logprobs, model_logprobs = (
            torch.cat(column).cpu() for column in zip(*self._drawn, strict=True)
        )
        if not bool(model_logprobs.isfinite().all()):
            raise FloatingPointError("the model's log-probs are not finite: look for NaN or infinite weights")
        order = places.argsort(stable=True)
        starts = [0, *places.bincount(minlength=len(self._lengths)).cumsum(0).tolist()]
        tokens, logprobs, model_logprobs = (column[order].tolist() for column in (tokens, logprobs, model_logprobs))
        out = []
        for start, length, stop, wrote in zip(starts, self._lengths, self._stops, self._authors, strict=False):
            part = slice(start, start + length)  # a dead row may have been drawn a few times more
            authors = None if self._pens is None else wrote
            out.append(
                Completion(
                    tokens=tokens[part],
                    logprobs=logprobs[part],
                    model_logprobs=model_logprobs[part],
                    stop=stop,
                    authors=authors,
                )
            )
        return out
