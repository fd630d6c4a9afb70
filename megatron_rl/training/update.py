"""One update of a policy: its rollouts are scattered, scored by earlier weights where the loss asks, and trained on
step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron_rl.batches.data_parallel_split import Partitioner, ReplicaShares, split_over_replicas
from megatron_rl.batches.packed_batch import BatchLoss
from megatron_rl.batches.replica_batch import COUNTED, Outline, Work
from megatron_rl.run.metrics import SPEED
from megatron_rl.timing import Timer
from megatron_rl.types import Rollout
from megatron_rl.world import Replicas, World

SUMMED = (
    "trained_tokens",
    "packed_tokens",
    "shared_tokens",
    "micro_batches",
)  # over an update's optimizer steps; other metrics are averaged


class PolicyMemory(Protocol):
    """What a policy holds on its device."""

    def sleep(self, *, weights: bool = False) -> None:
        """Frees gradients and moves the optimizer's state to host memory until `wake`; the `weights` too if asked."""
        ...

    def wake(self) -> None: ...

    def present(self) -> AbstractContextManager[None]:
        """Has the weights on the device in the block; they leave again where they were away."""
        ...


class Policy(Partitioner, Protocol):
    """A trained model. Every method but those of `Partitioner` is collective; `work` is that of the rank's own
    replica."""

    @property
    def replicas(self) -> Replicas: ...

    @property
    def timer(self) -> Timer:
        """The watch over the parts of an update on this rank."""
        ...

    def update(self, work: Work, step: int, loss: BatchLoss) -> dict[str, float]:
        """One optimizer step on `work.steps[step]` -> metrics over all replicas. Those in COUNTED are its operations,
        where the policy counts them."""
        ...

    def statistics(
        self, work: Work, names: Sequence[str] = ("logprobs",), *, reference: bool = False
    ) -> dict[str, Tensor]:
        """Statistics of every label in the loss, 0 elsewhere, [N] float32 on CPU by name; nothing on ranks that take no
        loss."""
        ...

    def loss(self, work: Work, loss: BatchLoss) -> float:
        """Mean loss of all of `work`, which is one step, without an update."""
        ...

    @property
    def memory(self) -> PolicyMemory:
        """The gradients, optimizer state and weights on the device, which can be moved to host memory."""
        ...


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model and what it is trained with. A frozen role has a policy too; it is never updated."""

    policy: Policy
    loss: BatchLoss
    refit: Callable[[int], None] | None = (
        None  # (version): brings its engine to the policy's weights; collective. None: it has no engine
    )
    samples_per_optimizer_step: int | None = None  # None: one optimizer step per update
    sleeps: bool = False  # off-load between this role's iterations
    peak_flops: float | None = None  # operations a second of one device that its MFU is a share of; None: not known


def update(
    world: World, trainee: Trainee, rollouts: Sequence[Rollout] | None, *, rescore: bool = False
) -> dict[str, float]:
    """Trains on [S] rollouts of the driver, None on other ranks, in ceil(S / B) optimizer steps of nearly equal size.
    Collective.

    `rescore`: rollouts that several weight versions wrote count as written by the trainer as it is now. Returns the
    policy's metrics, the same on every rank: means over the optimizer steps, sums of those in SUMMED; and with the
    prefix SPEED how fast it was, by this rank's watch (see `_speed`).
    Raises ValueError for rollouts that cannot be trained on, there and DriverError elsewhere, before any rank has
    begun.
    """
    policy, loss, timer, start = trainee.policy, trainee.loss, trainee.policy.timer, time.perf_counter()
    timer.clear()
    with timer("scatter"):
        work = scatter(
            world, policy, rollouts, loss=loss, samples_per_step=trainee.samples_per_optimizer_step, rescore=rescore
        )
    passes = 0  # over all rollouts, with earlier weights
    if "reference" in loss.needs:
        with timer("reference_logprobs"):
            found = policy.statistics(work, reference=True)
        work, passes = replace(work, reference_logprobs=found.get("logprobs")), passes + 1
    if len(work.steps) > 1 or "old" in loss.needs or work.rescored:
        with timer("old_logprobs"):
            work = _with_old(work, policy, loss)
        passes += 1
    steps = [policy.update(work, step, loss) for step in range(len(work.steps))]
    means = {name: fmean(s[name] for s in steps) for name in steps[0] if name not in COUNTED}
    sums = {name: sum(s[name] for s in steps) for name in (*SUMMED, *COUNTED) if name in steps[0]}
    counted = {name: sums.pop(name) for name in COUNTED if name in sums}
    flops = counted["training_flops"] + passes * counted["forward_flops"] if counted else None
    seconds = time.perf_counter() - start
    speed = _speed(seconds, timer.take(), ranks=world.size, flops=flops, peak=trainee.peak_flops)
    speed[f"{SPEED}tokens_per_second"] = sums["packed_tokens"] / seconds / world.size
    return means | sums | {"optimizer_steps": float(len(steps))} | speed


def _with_old(work: Work, policy: Policy, loss: BatchLoss) -> Work:
    """Returns the work with what the policy as it is now says of it. Collective."""
    old = len(work.steps) > 1 or "old" in loss.needs
    names = ("logprobs", "vocab_mean") if old and "vocab_mean" in loss.needs else ("logprobs",)
    found = policy.statistics(work, names)
    if work.rescored and found:
        work = work.rescore(found["logprobs"])
    if old and found:
        values = {"old_vocab_mean": found["vocab_mean"]} if "vocab_mean" in names else {}
        work = replace(work, old_logprobs=found["logprobs"], values=values)
    return work


def _speed(
    seconds: float, parts: Mapping[str, float], *, ranks: int, flops: float | None, peak: float | None
) -> dict[str, float]:
    """Returns how fast an update was: seconds of its parts on this rank, the rest as `waiting`, and rates of a rank.

    `flops`: the model's operations on all ranks, which are as many devices; None: not counted.
    """
    spent = {**parts, "waiting": max(0.0, seconds - sum(parts.values()))}
    found = {f"{SPEED}seconds/{name}": value for name, value in spent.items()}
    if flops is not None:
        rate = flops / seconds / ranks
        found[f"{SPEED}model_tflops"] = rate / 1e12
        if peak is not None:
            found[f"{SPEED}mfu"] = rate / peak
    return found


def mean_loss(world: World, trainee: Trainee, rollouts: Sequence[Rollout] | None) -> float:
    """Returns the mean loss of the driver's rollouts without an update. Collective."""
    return trainee.policy.loss(scatter(world, trainee.policy, rollouts, loss=trainee.loss), trainee.loss)


def policy_logprobs(
    world: World, policy: Policy, rollouts: Sequence[Rollout] | None, *, reference: bool = False
) -> list[np.ndarray] | None:
    """Log-probs of the driver's rollouts under the policy as it is now, or under its reference. Collective.

    -> [S] arrays [T] float32 on the driver, 0 for tokens that are not in the loss; None elsewhere.
    """
    kept: list[ReplicaShares] = []
    work = scatter(world, policy, rollouts, keep=kept)
    own = policy.statistics(work, reference=reference).get("logprobs")
    sizes = [counts.tokens for counts in kept[0].outline.counts] if kept else []
    gathered = world.gather_back(None if own is None else own.numpy(), sizes, policy.replicas)
    if gathered is None:
        return None
    out: list[np.ndarray] = [np.empty(0, np.float32)] * len(kept[0].rollouts)
    for order, values in zip(kept[0].orders, gathered, strict=True):
        place = 0
        for number in order.tolist():
            length = len(kept[0].rollouts[number].tokens)
            out[number] = np.concatenate([np.zeros(1, np.float32), values[place : place + length - 1]])
            place += length
    return out


def scatter(
    world: World,
    policy: Policy,
    rollouts: Sequence[Rollout] | None,
    *,
    loss: BatchLoss | None = None,
    samples_per_step: int | None = None,
    rescore: bool = False,
    keep: list[ReplicaShares] | None = None,
) -> Work:
    """Gives every rank the work of its replica out of the driver's rollouts. Collective.

    What the driver finds wrong is raised on every rank before anything is sent. `keep` takes the driver's table of who
    got what.
    """
    shares: list[ReplicaShares] = [] if keep is None else keep

    def prepare() -> Outline:
        assert rollouts is not None
        shares.append(
            split_over_replicas(rollouts, policy, loss=loss, samples_per_step=samples_per_step, rescore=rescore)
        )
        return shares[0].outline

    outline = world.from_driver(prepare)
    buffer = world.scatter(outline.sizes, lambda replica: shares[0].buffer(replica), policy.replicas)
    return Work.over(buffer, outline, policy.replicas.of(world.rank))
