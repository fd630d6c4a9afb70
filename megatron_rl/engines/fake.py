"""A policy and engines small enough for tests: a table of next-token logits that really learns, and one that says what it is told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.engines.base import Completion, Row, Sampling
from megatron_rl.types import Batch, BatchLoss, Stop


class TablePolicy:
    """Next-token logits are a table indexed by the last two tokens. The verbs are those of the Megatron policy."""

    def __init__(self, vocab: int, *, lr: float = 0.3, seed: int = 0) -> None:
        self.vocab, self.asleep = vocab, False
        generator = torch.Generator().manual_seed(seed)
        self.table = (0.1 * torch.randn(vocab * vocab, vocab, generator=generator)).requires_grad_()
        self._start = self.table.detach().clone()
        self._optimizer = torch.optim.Adam([self.table], lr=lr)

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Of the masked labels; 0 elsewhere. -> [N] float32."""
        with torch.no_grad():
            return self._forward(batch, self._start if reference else self.table)[0]

    def update(self, batch: Batch, loss: BatchLoss) -> dict[str, float]:
        """One optimizer step. Raises RuntimeError while asleep."""
        if self.asleep:
            raise RuntimeError("the policy sleeps: wake it before an update")
        total, sums = loss(*self._forward(batch, self.table), batch)
        self._optimizer.zero_grad()
        (total / loss.denominator(batch)).backward()
        self._optimizer.step()
        trained = float(batch.mask.sum())
        means = {name: float(value) / trained for name, value in sums.items()}
        return means | {"loss": float(total.detach()) / loss.denominator(batch), "trained_tokens": trained}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table.detach().clone()

    def save(self, directory: Path) -> None:
        torch.save({"table": self.table.detach(), "optimizer": self._optimizer.state_dict()}, directory / "table.pt")

    def load(self, directory: Path) -> None:
        state = torch.load(directory / "table.pt")
        with torch.no_grad():
            self.table.copy_(state["table"])
        self._optimizer.load_state_dict(state["optimizer"])

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def _forward(self, batch: Batch, table: Tensor) -> tuple[Tensor, Tensor]:
        """-> log-probs and entropies [N]."""
        previous = torch.cat([batch.tokens[:1], batch.tokens[:-1]])
        logprobs = table[previous * self.vocab + batch.tokens].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return torch.where(batch.mask, logprobs.gather(-1, batch.labels[:, None])[:, 0], 0.0), entropy


class TableEngine:
    """Draws from a `TablePolicy`'s table; prompts need two tokens at least."""

    def __init__(self, vocab: int, eos: int) -> None:
        self.vocab, self.eos, self.version = vocab, eos, -1
        self._rows: list[list[float]] = []

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self._rows = dict(weights)["table"].log_softmax(-1).tolist()
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        return [self.generate_rows([(p, i, j) for j in range(sampling.n)], sampling) for i, p in enumerate(prompts)]

    def generate_rows(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]:
        return [self._one(list(p), sampling, random.Random(f"{sampling.seed}/{i}/{j}")) for p, i, j in rows]

    def _one(self, tokens: list[int], sampling: Sampling, rng: random.Random) -> Completion:
        out: list[int] = []
        logprobs: list[float] = []
        while len(out) < sampling.max_tokens and self.eos not in out:
            row = self._rows[tokens[-2] * self.vocab + tokens[-1]]
            best = max(range(self.vocab), key=row.__getitem__)
            token = (
                rng.choices(range(self.vocab), weights=[math.exp(x) for x in row])[0] if sampling.temperature else best
            )
            tokens.append(token)
            out.append(token)
            logprobs.append(row[token])
        stop = Stop.EOS if self.eos in out else Stop.LENGTH
        return Completion(tokens=out, logprobs=logprobs, model_logprobs=logprobs, stop=stop)


class ScriptedEngine:
    """Says what `answer(prompt tokens, prompt index, sample index, sampling)` returns as tokens; each log-prob is -1.

    An answer that ends in `eos` is finished, any other was cut. `asked` holds every call, for a test to look at.
    """

    def __init__(self, answer: Callable[[list[int], int, int, Sampling], list[int]], *, eos: int) -> None:
        self.version, self.eos, self._answer = -1, eos, answer
        self.asked: list[tuple[list[list[int]], Sampling]] = []

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        dict(weights)
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        self.asked.append(([list(p) for p in prompts], sampling))
        return [[self._one(list(p), i, j, sampling) for j in range(sampling.n)] for i, p in enumerate(prompts)]

    def _one(self, prompt: list[int], i: int, j: int, sampling: Sampling) -> Completion:
        tokens = self._answer(prompt, i, j, sampling)
        stop = Stop.EOS if tokens and tokens[-1] == self.eos else Stop.LENGTH
        return Completion(tokens=tokens, logprobs=[-1.0] * len(tokens), model_logprobs=[-1.0] * len(tokens), stop=stop)
