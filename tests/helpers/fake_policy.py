"""A policy small enough for tests, which really learns: a table of next-token logits, on one process or one replica per
rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batches.micro_batches import Prefixes, Shares, micro_batches
from megatron_rl.batches.packed_batch import CANDIDATES, Batch, BatchLoss, Statistics, statistics_needed
from megatron_rl.batches.replica_batch import Work
from megatron_rl.lib.timing import Timer
from megatron_rl.messages.world import Replicas
from megatron_rl.run.metrics import SPEED


class TablePolicy:
    """Next-token logits are a table indexed by the last two tokens. The verbs are those of the Megatron policy.

    Every rank of the default process group is a replica. Sums are taken in float64 and rounded once, so that any number
    of ranks gives the same bits.
    """

    replays = False
    shares_prefixes = False

    def __init__(self, vocab: int, *, lr: float = 0.3, seed: int = 0, micro_batch_tokens: int = 1 << 20) -> None:
        self.vocab, self.micro_batch_tokens = vocab, micro_batch_tokens
        self.asleep, self.away = False, False  # without gradients and optimizer; without weights
        generator = torch.Generator().manual_seed(seed)
        self.table = (0.1 * torch.randn(vocab * vocab, vocab, generator=generator)).requires_grad_()
        self._start = self.table.detach().clone()
        self._optimizer = torch.optim.Adam([self.table], lr=lr)
        self.timer = Timer()

    @property
    def memory(self) -> TablePolicy:
        return self

    @property
    def replicas(self) -> Replicas:
        ranks = range(dist.get_world_size() if dist.is_initialized() else 1)
        return Replicas(ranks=[[rank] for rank in ranks], reporters=[*ranks])

    def shares(self, lengths: np.ndarray, prefixes: Prefixes | None = None, groups: np.ndarray | None = None) -> Shares:
        replicas, most = len(self.replicas.ranks), self.micro_batch_tokens
        return micro_batches(lengths, max_tokens=most, replicas=replicas, prefixes=prefixes, groups=groups)

    def update(self, work: Work, step: int, loss: BatchLoss) -> dict[str, float]:
        """One optimizer step. Raises RuntimeError while asleep."""
        if self.asleep:
            raise RuntimeError("the policy sleeps: wake it before an update")
        table, totals = self.table.detach().double().requires_grad_(), work.steps[step]
        sums = self._sums(work, step, loss, table)
        assert table.grad is not None
        self._optimizer.zero_grad()
        self.table.grad = _over_ranks(table.grad / totals.denominator).float()
        self._optimizer.step()
        means = {name: _rounded(value) for name, value in totals.means(sums).items()}
        return means | {"trained_tokens": totals.trained_tokens, "packed_tokens": totals.packed_tokens}

    def statistics(
        self, work: Work, names: Sequence[str] = ("logprobs",), *, reference: bool = False
    ) -> dict[str, Tensor]:
        """Gives statistics of the labels in the loss; 0 elsewhere. -> [N] or [N, k] float32 by name."""
        self._check_present()
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for micro in work.micros():
            batch = work.batch(micro)
            statistics = self._forward(batch, (self._start if reference else self.table.detach()).double(), names)
            counted = statistics.at(batch.counted)
            for name in names:
                found[name].append(getattr(counted, name).float())
        return {name: torch.cat(parts) for name, parts in found.items()}

    def evaluate(self, work: Work, loss: BatchLoss) -> dict[str, float]:
        with torch.no_grad():
            sums = self._sums(work, 0, loss, self.table.detach().double())
        return work.steps[0].means(sums)

    def _check_present(self) -> None:
        if self.away:
            raise RuntimeError("the weights are in host memory")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self._check_present()
        yield "table", self.table.detach().clone()

    def save(self, directory: Path) -> None:
        torch.save({"table": self.table.detach(), "optimizer": self._optimizer.state_dict()}, directory / "table.pt")

    def load(self, directory: Path) -> None:
        state = torch.load(directory / "table.pt")
        with torch.no_grad():
            self.table.copy_(state["table"])
        self._optimizer.load_state_dict(state["optimizer"])

    def sleep(self, *, weights: bool = False) -> None:
        self.asleep, self.away = True, self.away or weights

    def wake(self) -> None:
        self.asleep = self.away = False

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        was_away, self.away = self.away, False
        yield
        self.away = was_away

    def _sums(self, work: Work, step: int, loss: BatchLoss, table: Tensor) -> dict[str, float]:
        """Sums over all ranks; gradients of the loss's sum are left in `table` where it wants them."""
        sums: dict[str, Tensor] = {}
        for micro in work.micros(step):
            batch = work.batch(micro)
            batch = _doubled(batch if batch.num_sequences else batch.dummy(1))
            total, metrics = loss(self._forward(batch, table, statistics_needed(loss.needs)), batch)
            if table.requires_grad:
                total.backward()
            for name, value in {"loss": total.detach(), **metrics}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value
        totals = _over_ranks(torch.stack([sums[name] for name in sorted(sums)]))
        return dict(zip(sorted(sums), totals.tolist(), strict=True))

    def _forward(self, batch: Batch, table: Tensor, names: Sequence[str]) -> Statistics:
        """[N] float64 each."""
        previous = torch.cat([batch.tokens[:1], batch.tokens[:-1]])
        firsts = batch.cu_seqlens[:-1][batch.lengths > 0]
        previous[firsts] = batch.tokens[firsts]
        logprobs = table[previous * self.vocab + batch.tokens].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) if "entropy" in names else None
        mean = logprobs.detach().mean(-1) if "vocab_mean" in names else None
        labels = torch.where(batch.counted, batch.labels, 0)
        with_candidates = "candidate_logprobs" in names
        candidates = logprobs.gather(-1, batch.values[CANDIDATES].long()) if with_candidates else None
        return Statistics(logprobs.gather(-1, labels[:, None])[:, 0], entropy, mean, candidates)


def without_speed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics of an update without those that tell how fast it was, which differ from run to run."""
    return {name: value for name, value in metrics.items() if not name.startswith(SPEED)}


def _doubled(batch: Batch) -> Batch:
    """The batch with log-probs in float64."""
    names = ("engine_logprobs", "old_logprobs", "reference_logprobs")
    doubled = {name: values.double() for name in names if (values := getattr(batch, name)) is not None}
    return replace(batch, **doubled)


def _over_ranks(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def _rounded(value: float) -> float:
    """Rounds to float32: what the order of float64 sums changes is gone."""
    return float(np.float32(value))
