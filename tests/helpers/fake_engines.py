"""Engines small enough for tests: one that draws from a table of next-token logits, and one that says what it is
told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.engines.batched_session import BatchedSession, Row
from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import Completion, SampleLog, Sampling, Tokens, TopScores
from megatron_rl.types import Stop

Answer = Callable[[list[int], int, int, Sampling], list[int]]  # prompt, key, sample, sampling -> tokens


class TableEngine:
    """Draws from a TablePolicy's table: logits of the next token, indexed by the last two. Prompts need two tokens
    at least."""

    def __init__(self, vocab: int, eos: int) -> None:
        self.vocab, self.eos, self.version = vocab, eos, -1
        self._table = torch.empty(0)
        self._rows: list[list[float]] = []

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self._table = dict(weights)["table"].log_softmax(-1)
        self._rows, self.version = self._table.tolist(), version

    def session(self, priority: int = 0, log: SampleLog | None = None) -> BatchedSession:
        return BatchedSession(self.generate_rows, self.check_ask, FullPrompts("a fake"), log)

    def check_ask(self, tokens: np.ndarray, sampling: Sampling, key: int) -> None:
        if len(tokens) < 2:
            raise ValueError(f"prompt {key} has {len(tokens)} tokens: the table needs two")

    def generate_rows(self, rows: Sequence[Row]) -> list[Completion]:
        return [self._one(row.tokens.tolist(), row.sampling, row.key, row.sample) for row in rows]

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        scores = []
        for sequence in sequences:
            tokens = torch.as_tensor(np.asarray(sequence, np.int64))
            previous = torch.cat(
                [tokens[:1], tokens[:-1]]
            )  # as the policy has it: the first token stands for the one before it
            rows = self._table[previous * self.vocab + tokens][:-1]
            scores.append(np.concatenate([np.zeros(1, np.float32), rows.gather(1, tokens[1:, None])[:, 0].numpy()]))
        return scores

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        tops = []
        for sequence, scores in zip(sequences, self.score(sequences), strict=True):
            tokens = np.asarray(sequence, np.int64)
            previous = np.concatenate([tokens[:1], tokens[:-1]])
            top = self._table[torch.as_tensor(previous * self.vocab + tokens)[:-1]].topk(k)
            ids, logprobs = np.zeros((len(tokens), k), np.int32), np.zeros((len(tokens), k), np.float32)
            ids[1:], logprobs[1:] = top.indices.numpy(), top.values.numpy()
            tops.append(TopScores(logprobs=scores, ids=ids, top_logprobs=logprobs))
        return tops

    def tend(self) -> None: ...

    def _one(self, tokens: list[int], sampling: Sampling, key: int, sample: int) -> Completion:
        rng = random.Random(f"{sampling.seed}/{key}/{sample}")
        written: list[int] = []
        logprobs: list[float] = []
        while len(written) < sampling.max_tokens and self.eos not in written:
            row = self._rows[tokens[-2] * self.vocab + tokens[-1]]
            if sampling.temperature:
                token = rng.choices(range(self.vocab), weights=[math.exp(x) for x in row])[0]
            else:
                token = max(range(self.vocab), key=row.__getitem__)
            tokens.append(token)
            written.append(token)
            logprobs.append(row[token])
        stop = Stop.EOS if self.eos in written else Stop.LENGTH
        scores = np.array(logprobs, np.float32)
        return Completion(tokens=np.array(written, np.int32), logprobs=scores, model_logprobs=scores, stop=stop)


class ScriptedEngine:
    """Says what `answer(prompt, key, sample, sampling)` returns as tokens; every log-prob is -1.

    An answer that ends in `eos` is finished, any other was cut. `asked` has (prompt, sampling) of every ask in order,
    `keys` their keys, for a test to look at.
    """

    def __init__(self, answer: Answer, *, eos: int) -> None:
        self.version, self.eos, self._answer = -1, eos, answer
        self.asked: list[tuple[list[int], Sampling]] = []
        self.keys: list[int] = []

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        dict(weights)
        self.version = version

    def session(self, priority: int = 0, log: SampleLog | None = None) -> BatchedSession:
        return BatchedSession(self.generate_rows, self.check_ask, FullPrompts("a fake"), log)

    def check_ask(self, tokens: np.ndarray, sampling: Sampling, key: int) -> None:
        self.asked.append((tokens.tolist(), sampling))
        self.keys.append(key)

    def generate_rows(self, rows: Sequence[Row]) -> list[Completion]:
        return [self.one(row.tokens.tolist(), row.key, row.sample, row.sampling) for row in rows]

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        return [np.concatenate([np.zeros(1, np.float32), np.full(len(s) - 1, -1, np.float32)]) for s in sequences]

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """The likeliest are always the tokens 0 .. k - 1, of one log-prob."""
        tops = []
        for tokens, scores in zip(sequences, self.score(sequences), strict=True):
            ids = np.tile(np.arange(k, dtype=np.int32), (len(tokens), 1))
            tops.append(TopScores(logprobs=scores, ids=ids, top_logprobs=np.full(ids.shape, -2.0, np.float32)))
        return tops

    def tend(self) -> None: ...

    def one(self, prompt: list[int], key: int, sample: int, sampling: Sampling) -> Completion:
        """One answer; a subclass may change it."""
        tokens = self._answer(prompt, key, sample, sampling)
        stop = Stop.EOS if tokens and tokens[-1] == self.eos else Stop.LENGTH
        logprobs = np.full(len(tokens), -1, np.float32)
        return Completion(tokens=np.array(tokens, np.int32), logprobs=logprobs, model_logprobs=logprobs, stop=stop)
