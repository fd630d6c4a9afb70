"""Corrections of a loss whose tokens were sampled by an engine that gives them other probabilities than the trainer.

The ratio of a token is r = p_old / p_engine: the trainer's probability at the start of the update over that of the
engine (or of the older weights) that sampled it. TIS truncates r (Yao et al., Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training, 2025), MIS and IcePop set it to 0 outside bounds (Liu et al., When Speed Kills
Stability, 2025; Zhao et al., Small Leak Can Sink a Great Ship, 2025), and geometric rejection does so for whole
rollouts by the mean of log r. With the objective `clipped`, whose ratio is p / p_old, a correction is decoupled PPO
(AReaL, arXiv 2505.24298): p_old is the proximal policy and r the weight of the behaviour policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.batches.packed_batch import Batch, at
from megatron_rl.config.schema import CorrectionConfig
from megatron_rl.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LazyModule("torch"), Any

LOG_LIMIT = 20.0  # |log r| is bounded so, as in verl: exp of more may be inf, and inf times an advantage of 0 is nan
EXP_LIMIT = 40.0  # largest argument of exp in a loss: float32 also holds the square of the result, for gradient norms


def bounded_exp(values: Tensor, limit: float | Tensor = EXP_LIMIT) -> Tensor:
    """Returns exp(values), [N]. Beyond `limit`, a number or [N], exp goes on as its tangent there, so that value and
    gradient stay finite and keep their direction; up to `limit` both are exactly those of exp."""
    held = torch.clamp(values, max=limit)  # type: ignore[call-overload]
    return held.exp() * (1 + (values - held))


def correction_weights(
    config: CorrectionConfig | None, gap: Tensor, batch: Batch
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Turns gap [N] = log r of trained labels, 0 elsewhere, into weights of the labels' losses and metrics, [N] each.

    A weight has no gradient, and is 1 where the label was not sampled by the policy. The metrics are 1 where r of the
    label, or of its rollout, lies outside the bounds: `correction_truncated` where it was moved into them,
    `correction_masked` where the weight is 0. No correction gives (None, {}).

    As in TRL 1.x and AReaL a masked label still counts in the mean, and its KL and entropy stay in the loss. verl takes
    it out of all three; its weights are otherwise these (for GMPO it takes their geometric mean over a rollout). The
    bounds of verl's rejection (`token_k1`, `seq_sum_k1`, `seq_mean_k1`) are those of 1 / r: its 0.5_5.0 is low 0.2,
    high 2.0 here. AReaL's level `sequence` is `geometric` here.
    """
    if config is None or config.kind == "none":
        return None, {}
    log_ratio = gap
    if config.level != "token":
        sums = batch.sequence_sums(gap)
        if config.level == "geometric":
            sums = sums / batch.sequence_sums(batch.mask.to(gap.dtype)).clamp(min=1)
        log_ratio = at(batch.mask, batch.spread(sums))
    ratio = log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    bounded = ratio.clamp(min=config.low, max=config.high)
    outside = bounded != ratio
    match config.kind:
        case "truncate":
            return bounded, {"correction_truncated": outside}
        case "mask":
            return at(~outside, ratio), {"correction_masked": outside}
        case "drop":
            return torch.where(outside, 0.0, torch.ones_like(ratio)), {"correction_masked": outside}


def off_policy_mask(threshold: float | None, logprobs: Tensor, batch: Batch) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Masks rollouts that the policy has moved away from and that are worse than others: the off-policy sequence mask
    of DeepSeek-V3.2 (arXiv 2512.02556; TRL's off_policy_mask_threshold).

    A rollout's distance is the mean of log p_engine - log p over its trained labels, with the live p; it estimates KL.
    The weights, [N] without gradient, are 0 at trained labels whose advantage is negative where that is above
    `threshold`, and 1 elsewhere; the metric `off_policy_masked` counts the zeros. No threshold gives (None, {}).
    """
    if threshold is None:
        return None, {}
    moved = at(batch.mask, batch.engine_logprobs - logprobs.detach())
    counts = batch.sequence_sums(batch.mask.to(moved.dtype)).clamp(min=1)
    far = batch.spread(batch.sequence_sums(moved) / counts) > threshold
    masked = batch.mask & far & (batch.advantages < 0)
    return torch.where(masked, 0.0, torch.ones_like(moved)), {"off_policy_masked": masked}
