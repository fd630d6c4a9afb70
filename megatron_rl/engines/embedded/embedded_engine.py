"""The embedded engine of one rank: loads weights, answers requests in rounds, and scores sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.tandem_authors import boundaries
from megatron_rl.devices.host_to_device import upload
from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.batched_session import BatchedSession, Row
from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.embedded.engine_weights import QuantisedSlots, WeightSlots, gather_weights, storage
from megatron_rl.engines.embedded.scheduler import ContinuousBatch
from megatron_rl.engines.embedded.stop_conditions import Ends
from megatron_rl.engines.embedded.tandem_writers import Writers, pens_of
from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import Completion, EngineError, SampleLog, Sampling, Tokens, TopScores
from megatron_rl.lib.leaf_modules import leaf
from megatron_rl.weights import hf_model
from megatron_rl.weights.quantisation import FORMATS

SCORE_TOKENS = 1024  # maximum number of positions whose logits are in memory at once
SCORED_TOGETHER = 2048  # maximum number of tokens, including padding, that are scored in one forward pass


class EmbeddedEngine:
    """An engine that generates on this rank with a separate copy of the weights. Implements engines.protocol.Engine for
    a world of one rank.

    Greedy output equals transformers' `generate`. A sequence ends at the end-of-sequence tokens of the model directory
    and of `tokenizer`.

    `max_batch`: maximum number of rows that are decoded together.
    `tokenizer`: required for stop strings and for Tandem RL.
    `junior`: a frozen model that generates some of the tokens if `Sampling.tandem` is set. The constructor loads the
    junior's weights.
    `tells_experts`: completions contain the experts that the model (the senior of Tandem RL) chose, for router replay.
    Raises ValueError for a model without experts.
    `quantization`: the format in which weight syncs send the weights (a key of weights.quantisation.FORMATS). The
    engine dequantises the weights. None: weight syncs send the weights in the model's dtype.
    `cuda_graphs`: on a GPU, decoding steps of a dense model without a junior use CUDA graphs (cuda_graphs.py).

    Raises ConfigError for a model that is not supported.
    """

    def __init__(
        self, model_dir: str | Path, *, max_batch: int = 256, dtype: torch.dtype = torch.float32, device: torch.device |
        None = None, tokenizer: Any = None, junior: str | Path | None = None, tells_experts: bool = False, quantization:
        str | None = None, cuda_graphs: bool = True,
    ) -> None:  # fmt: skip
        if max_batch < 1:
            raise ValueError(f"max_batch = {max_batch}: give at least 1 row")
        self.version = -1
        self._directory, self._full = hf_model.local_directory(model_dir), FullPrompts(str(model_dir))
        self.arch = hf_model.read_architecture(self._directory)
        if tells_experts and not self.arch.experts:
            raise ValueError(f"{model_dir} has no experts, whose choice could be told: leave tells_experts out")
        self._tells_experts = tells_experts
        self._max_batch, self._dtype, self._tokenizer = max_batch, dtype, tokenizer
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._recorder = None
        if cuda_graphs and self._device.type == "cuda":
            self._recorder = leaf("engines.embedded.cuda_graphs", "engine.cuda_graphs = true").GraphRecorder()
        self._eos = hf_model.eos_tokens(self._directory, self.arch.config, tokenizer)
        self._decoder: Decoder | None = None
        self._landing: tuple[Decoder, WeightSlots] | None = None
        self._format = None if quantization is None else FORMATS[quantization]
        self._quantised: QuantisedSlots | None = None
        self._boundaries = functools.cache(functools.partial(boundaries, tokenizer))  # tokens by rule
        self._junior: Decoder | None = None
        if junior is not None:
            directory = hf_model.local_directory(junior)
            arch = hf_model.read_architecture(directory)
            if arch.vocab != self.arch.vocab:
                raise ValueError(
                    f"{junior} has {arch.vocab} tokens, {model_dir} {self.arch.vocab}: a tandem needs one vocabulary"
                )
            self._junior = Decoder(arch, gather_weights(hf_model.read_tensors(directory), arch, dtype, self._device))

    @property
    def targets(self) -> WeightSlots:
        """The storage to which a weight sync (refit) writes the new weights. The storage is allocated at the first
        access. The engine uses this storage from the first `commit_refit` on.
        """
        if self._landing is None:
            weights, slots = storage(self.arch, self._dtype, self._device)
            if self._format is not None:
                self._quantised = QuantisedSlots(slots, self.arch, self._format, self._device)
                slots = self._quantised.slots
            self._landing = Decoder(self.arch, weights), WeightSlots(slots)
        return self._landing[1]

    def held_bytes(self) -> dict[str, int]:
        """Returns {"weights": bytes of device memory that hold the weights written by weight syncs}."""
        return {"weights": 0 if self._landing is None else self._landing[1].nbytes}

    def begin_refit(self) -> None:
        """Begins a weight sync (refit): marks the weights as incomplete. The engine cannot generate until
        `commit_refit`.
        """
        self._decoder, self.version = None, -1

    def commit_refit(self, version: int) -> None:
        """Ends a weight sync (refit): the engine uses the weights in `targets` from now on. The caller must have
        written all weights of this version.
        """
        assert self._landing is not None, "nothing was written"
        if self._quantised is not None:
            self._quantised.fill()
        self._decoder, self.version = self._landing[0], version

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Loads all weights of the model from a stream of (Hugging Face name, full tensor). If this raises an error,
        the engine keeps its old weights and version.

        Raises ValueError for unknown, missing, repeated or misshapen tensors.
        """
        self._decoder = Decoder(self.arch, gather_weights(weights, self.arch, self._dtype, self._device))
        self.version = version

    def load_pretrained(self) -> None:
        """Loads the weights from the model directory and sets the engine's version to 0. Raises FileNotFoundError if
        the directory has no weights.
        """
        self.load(hf_model.read_tensors(self._directory), version=0)

    def session(self, priority: int = 0, log: SampleLog | None = None) -> BatchedSession:
        """Returns a new session. The session's `ask` raises the errors of `check_ask`, and the session's `answers`
        raises the errors of `generate_rows`.
        """
        return BatchedSession(self.generate_rows, self.check_ask, self._full, log)

    def tend(self) -> None:
        """No-op: there are no servers."""

    def check_ask(self, tokens: np.ndarray, sampling: Sampling, key: int) -> None:
        """Checks a request. Raises ValueError for an empty prompt, a token or stop token outside the vocabulary, an
        invalid sampling setting, stop strings without a tokenizer, and Tandem RL settings without a junior or a
        tokenizer.
        """
        sampling_seeds.check(sampling)
        problem = None
        if sampling.stop_strings and self._tokenizer is None:
            problem = f"stop_strings {sampling.stop_strings} need a tokenizer: give one to EmbeddedEngine"
        elif sampling.tandem is not None and self._junior is None:
            problem = "sampling.tandem: this engine has no junior; give one to EmbeddedEngine (roles.NAME.tandem)"
        elif sampling.tandem is not None and self._tokenizer is None:
            strategy = sampling.tandem.rule.strategy
            problem = f"sampling.tandem with strategy {strategy!r} needs a tokenizer: give one to EmbeddedEngine"
        if problem is not None:
            raise ValueError(problem)
        self._check_tokens(tokens, f"prompt {key}")
        if sampling.stop_tokens:
            self._check_tokens(np.array(sampling.stop_tokens), "stop_tokens")

    @torch.inference_mode()
    def generate_rows(self, rows: Sequence[Row]) -> list[Completion]:
        """Samples one completion per row. Returns [R] completions in the order of the [R] rows. Rows whose sampling
        settings differ only in seed, length and n share a batch.

        A row whose prompt and completion fill the model's context ends with Stop.LENGTH. Raises RuntimeError if no
        weights have been loaded, and FloatingPointError if the model's log-probs are not finite. Every row must have
        passed `check_ask`.
        """
        decoder = self._loaded()
        batches: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            kind = replace(row.sampling, n=1, seed=0, max_tokens=1)
            batches.setdefault(kind, []).append(place)
        found: dict[int, Completion] = {}
        for kind, places in batches.items():
            found |= zip(places, self._batch(decoder, [rows[i] for i in places], kind).run(), strict=True)
        return [found[place] for place in range(len(rows))]

    @torch.inference_mode()
    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Returns the model's log-prob of every token given the tokens before it, at temperature 1: one float32 array
        [T] for each of the [S][T] sequences. The log-prob of the first token is 0.

        Raises ValueError for an empty sequence or a token outside the vocabulary, and RuntimeError if no weights have
        been loaded.
        """
        return [scores.logprobs for scores in self.score_top(sequences, 0)]

    @torch.inference_mode()
    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """Implements `engines.protocol.Engine.score_top`. Raises EngineError if k exceeds the vocabulary size, and the
        errors of `score`.
        """
        if k > self.arch.vocab:
            raise EngineError(
                f"the {k} likeliest tokens were asked for: {self._directory} has {self.arch.vocab} in all"
            )
        decoder, arrays = self._loaded(), [np.asarray(sequence, np.int64) for sequence in sequences]
        for i, tokens in enumerate(arrays):
            self._check_tokens(tokens, f"sequence {i}")
        found: dict[int, TopScores] = {}
        group: list[int] = []
        for i in sorted(range(len(arrays)), key=lambda i: -len(arrays[i])):
            if group and (len(group) + 1) * len(arrays[group[0]]) > SCORED_TOGETHER:
                found |= zip(group, self._score_together(decoder, [arrays[g] for g in group], k), strict=True)
                group = []
            group.append(i)
        found |= zip(group, self._score_together(decoder, [arrays[g] for g in group], k), strict=True)
        return [found[i] for i in range(len(arrays))]

    @torch.inference_mode()
    def distributions(self, tokens: Tokens) -> Iterator[Tensor]:
        """Yields the log-probs of the next token over the whole vocabulary, at temperature 1, for every position of a
        sequence except the last position. [T] token ids -> [T - 1, V] float32, in chunks of consecutive rows. Raises
        the same errors as `score`.
        """
        decoder, array = self._loaded(), np.asarray(tokens, np.int64)
        self._check_tokens(array, "a sequence")
        hidden = decoder.prefill(torch.from_numpy(array[None]).to(self._device))[0][0, :-1]
        for part in hidden.split(SCORE_TOKENS):
            yield decoder.logits(part).float().log_softmax(dim=-1)

    def _batch(self, decoder: Decoder, rows: Sequence[Row], kind: Sampling) -> ContinuousBatch:
        ends = Ends(self._eos, kind, self._tokenizer, self.arch.vocab)
        decoders, writers = [decoder], None
        if kind.tandem is not None:
            assert self._junior is not None, "checked when asked"
            pens = pens_of(rows, kind.tandem, self._boundaries(kind.tandem.rule))
            decoders, writers = [decoder, self._junior], Writers((decoder, self._junior), pens)
        return ContinuousBatch(
            decoders, rows, ends=ends, max_batch=self._max_batch, writers=writers, tells_experts=self._tells_experts,
            recorder=self._recorder,
        )  # fmt: skip

    def _score_together(self, decoder: Decoder, sequences: Sequence[np.ndarray], k: int) -> list[TopScores]:
        """Scores sequences, sorted by descending length, in one forward pass. Also returns the k most likely tokens at
        every position.
        """
        if not sequences:
            return []
        lengths = np.array([len(tokens) for tokens in sequences])
        padded = np.zeros((len(sequences), lengths[0]), np.int64)
        inside = np.arange(lengths[0]) < lengths[:, None]
        padded[inside] = np.concatenate(sequences)
        own = np.nonzero(inside[:, 1:])  # Row and column indices of the positions that predict a token of a sequence.
        rows, columns, labels, tokens = (
            upload(torch.from_numpy(one), self._device) for one in (*own, padded[:, 1:][own][:, None], padded)
        )
        hidden = decoder.prefill(tokens)[0][rows, columns]
        found, likeliest = [], []
        for h, next_ids in zip(hidden.split(SCORE_TOKENS), labels.split(SCORE_TOKENS), strict=True):
            every = decoder.logits(h).float().log_softmax(dim=-1)
            top = every.topk(k, dim=-1)
            found.append(torch.cat([every.gather(1, next_ids), top.values], dim=1))
            likeliest.append(top.indices.int())
        # No position predicts the first token of a sequence: its scores stay zero.
        scores, ids = np.zeros((*padded.shape, 1 + k), np.float32), np.zeros((*padded.shape, k), np.int32)
        scores[:, 1:][own], ids[:, 1:][own] = torch.cat(found).cpu().numpy(), torch.cat(likeliest).cpu().numpy()
        rows_of = zip(scores, ids, lengths.tolist(), strict=True)
        return [TopScores(logprobs=s[:n, 0].copy(), ids=i[:n], top_logprobs=s[:n, 1:].copy()) for s, i, n in rows_of]

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError(
                "the engine has no whole weights: call load (or load_pretrained), or finish the refit first"
            )
        return self._decoder

    def _check_tokens(self, tokens: np.ndarray, name: str) -> None:
        if not len(tokens):
            raise ValueError(f"{name} is empty and cannot be continued: give at least one token")
        outside = tokens[(tokens < 0) | (tokens >= self.arch.vocab)]
        if len(outside):
            raise ValueError(
                f"{name} holds token {outside[0]}, the model's vocabulary has {self.arch.vocab}: "
                "use the model's own tokenizer"
            )
