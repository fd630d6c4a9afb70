"""The losses of models with a head. A critic has PPO's clipped value loss. A model that is both policy and critic has
the sum of policy loss and value loss. A reward model has the loss that `loss.objective` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.algorithms.objectives import find
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import VALUE, Batch, BatchLoss, Statistics, at
from megatron_rl.config.model import REWARD_OBJECTIVES, LossConfig, RoleConfig
from megatron_rl.lib.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LazyModule("torch"), Any


class ValueLoss:
    """The value loss of PPO, as in verl's `compute_value_loss`: half the squared difference of value and return. With
    `value_clip`, the loss is also computed with the value clamped to old value +- `value_clip`, and the larger of the
    two losses is used."""

    needs: frozenset[str] = frozenset({VALUE, "old_value", "returns"})

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def aggregate(self, counts: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the loss weight of each rollout of an optimizer step, [S] float32, and the number by which the summed
        loss is divided. `counts`: [S] for each rollout, the weighted number of labels that are in the loss. `groups`:
        [S] group index of each rollout.
        """
        return aggregate(self.config.aggregation, counts, groups, max_tokens=self.config.max_tokens)

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch of whole rollouts (a weighted sum to minimise), and metrics (detached sums
        over trained tokens, by name). `live`: the values of the current forward pass.

        `batch.values` has `old_value` and `returns` [N]: the values before the update, and the returns that the values
        should predict. Values at positions with weight 0, even nan, change neither the loss nor its gradient.

        The metrics: value, returns, value_error (the squared difference of value and return), returns_square (the
        squared return, for the variance of the returns), and value_clip_frac (the clip determines the token's loss).
        """
        assert live.value is not None
        batch = batch.cleaned()
        value, old, returns = at(batch.counted, live.value), batch.values["old_value"], batch.values["returns"]
        error, clip, clipped = (value - returns).square(), self.config.value_clip, torch.zeros_like(value)
        loss = error
        if clip is not None:
            bounded = (torch.clamp(value, old - clip, old + clip) - returns).square()
            loss, clipped = torch.maximum(error, bounded), (bounded > error).to(value.dtype)
        total = 0.5 * (at(batch.counted, loss) * batch.weights.to(loss.dtype)).sum()
        sums = {
            "value": value,
            "returns": returns,
            "value_error": error,
            "returns_square": returns.square(),
            "value_clip_frac": clipped,
        }
        return total, {name: at(batch.mask, values.detach()).sum() for name, values in sums.items()}


class PolicyAndValueLoss(PolicyLoss):
    """The loss of a model that is both policy and critic: the policy loss plus `value_coef` times the value loss. The
    two losses have the same aggregation.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__(config)
        self._value_loss = ValueLoss(config)
        self.needs = self.needs | ValueLoss.needs | {"logprobs"}

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns policy loss + `value_coef` x value loss of a micro-batch of whole rollouts, and the metrics of both
        losses (detached sums over trained tokens). `live`: statistics of the current forward pass, including the
        values.
        """
        total, metrics = super().__call__(live, batch)
        value_loss, others = self._value_loss(live, batch)
        return total + self.config.value_coef * value_loss, metrics | others


class RewardLoss(ValueLoss):
    """The loss of a reward model. `loss.objective` names the objective, one of REWARD_OBJECTIVES."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__(config)
        self._objective = find(config.objective, config.objective_args)
        self.needs = self._objective.needs

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch of whole rollouts (a weighted sum to minimise), and the objective's metrics
        (detached sums). `live`: the head's outputs of the current forward pass.
        """
        answer = self._objective(live.at(batch.counted), batch.cleaned(), **self.config.objective_args)
        loss, metrics = answer if isinstance(answer, tuple) else (answer, {})
        total = (at(batch.counted, loss) * batch.weights.to(loss.dtype)).sum()
        return total, {
            name: values if values.dim() == 0 else at(batch.mask, values.detach().to(loss.dtype)).sum()
            for name, values in metrics.items()
        }


def loss_of(role: RoleConfig) -> BatchLoss:
    """Returns the loss with which a role is trained: a value loss for a critic, the loss of a reward model, a policy
    loss, or policy loss plus value loss for a model that is both policy and critic. Raises ConfigError for a loss that
    cannot be built.
    """
    if role.head is None:
        return PolicyAndValueLoss(role.loss) if role.loss.value_coef else PolicyLoss(role.loss)
    return RewardLoss(role.loss) if role.loss.objective in REWARD_OBJECTIVES else ValueLoss(role.loss)
