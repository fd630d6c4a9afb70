"""Runs on four ranks without a model: rollouts go out to two replicas of two ranks, an update is made, log-probs come
back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from fake_policy import TablePolicy, without_speed
from one_process import OneProcess

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.micro_batches import micro_batches
from megatron_rl.config.schema import LossConfig
from megatron_rl.messages.world import DriverError, Replicas, World
from megatron_rl.training.update import Trainee, policy_logprobs, scatter, update
from megatron_rl.types import Rollout, spans_of

VOCAB, SIZE = 9, 500


def make_rollouts(count: int = 12) -> list[Rollout]:
    rng = np.random.default_rng(1)
    return [
        Rollout(
            role="generator", group=str(i // 4),
            tokens=rng.integers(0, VOCAB, SIZE + i), logprobs=-rng.random(SIZE + i),
            spans=spans_of((20, 2, -1), (SIZE - 20 + i, 0, 5)), advantages=float(rng.normal()),
        )
        for i in range(count)
    ]  # fmt: skip


class Sent:
    """Bytes that this rank sends by torch.distributed, by what carries them."""

    def __init__(self) -> None:
        self.direct, self.shared = [], []
        self._send, self._broadcast = dist.send, dist.broadcast

    def __enter__(self):
        dist.send, dist.broadcast = self.send, self.broadcast
        return self

    def __exit__(self, *_):
        dist.send, dist.broadcast = self._send, self._broadcast

    def send(self, tensor, dst, **settings):
        self.direct.append([dst, tensor.numel() * tensor.element_size()])
        return self._send(tensor, dst, **settings)

    def broadcast(self, tensor, src, **settings):
        if src == dist.get_rank() and tensor.numel() * tensor.element_size() > 1000:
            self.shared.append(tensor.numel() * tensor.element_size())
        return self._broadcast(tensor, src, **settings)


class Pairs(TablePolicy):
    """Two replicas of two ranks each; the second rank of each reports. For handing out alone."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
        self.pairs = Replicas(ranks=[[0, 1], [2, 3]], reporters=[1, 3], group=groups[dist.get_rank() // 2])

    @property
    def replicas(self) -> Replicas:
        return self.pairs

    def shares(self, lengths, prefixes=None, groups=None):
        return micro_batches(lengths, max_tokens=1200, replicas=2)


def refused(world, policy, loss) -> str:
    """Returns what a rank hears of rollouts that cannot be trained on."""
    bad = [Rollout(role="a", group="7", tokens=[1], logprobs=[0], spans=spans_of((1, 2, -1)))]
    try:
        scatter(world, policy, bad if world.rank == 0 else None, loss=loss)
    except (ValueError, DriverError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    world, rollouts, policy = World(), make_rollouts(), Pairs()
    mine, loss = rollouts if world.rank == 0 else None, PolicyLoss(LossConfig(kl_coef=0.0))
    answer = {"refused": refused(world, policy, loss)}
    with Sent() as sent:
        work = scatter(world, policy, mine, loss=loss)
    answer |= {
        "direct": sent.direct,
        "shared": sent.shared,
        "numbers": work.flat.numbers.tolist(),
        "same": all(
            np.array_equal(work.flat.tokens[a:b], rollouts[i].tokens)
            for i, a, b in zip(work.flat.numbers, work.flat.starts, work.flat.starts[1:], strict=False)
        ),
    }
    logprobs = policy_logprobs(world, policy, mine)
    answer["logprobs"] = None if logprobs is None else [row.tolist() for row in logprobs]
    table = TablePolicy(VOCAB)
    trainee = Trainee(policy=table, loss=PolicyLoss(LossConfig(kl_coef=0.1)), samples_per_optimizer_step=5)
    answer["metrics"] = without_speed(update(world, trainee, mine))
    answer["table"] = table.table.tolist()
    Path(sys.argv[1]).write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def alone() -> dict:
    """The same update and log-probs in one process."""
    table = TablePolicy(VOCAB)
    logprobs = policy_logprobs(OneProcess(), table, make_rollouts())
    trainee = Trainee(policy=table, loss=PolicyLoss(LossConfig(kl_coef=0.1)), samples_per_optimizer_step=5)
    metrics = without_speed(update(OneProcess(), trainee, make_rollouts()))
    assert logprobs is not None
    return {"metrics": metrics, "table": table.table.tolist(), "logprobs": [row.tolist() for row in logprobs]}


if __name__ == "__main__":
    main()
