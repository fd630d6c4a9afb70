"""Corrections of a policy loss for tokens sampled by an engine whose probabilities differ from the trainer's.

The ratio of a token is r = p_old / p_engine: the trainer's probability at the start of the update, divided by the
probability under the engine (or older weights) that sampled the token. TIS truncates r (Yao et al., Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training, 2025). MIS and IcePop set the weight to 0 outside bounds (Liu et
al., When Speed Kills Stability, 2025; Zhao et al., Small Leak Can Sink a Great Ship, 2025). Geometric rejection sets
the weights of a whole rollout to 0 if the mean of log r over its tokens is outside bounds. With the objective
`clipped`, whose ratio is p / p_old, a correction is decoupled PPO (AReaL, arXiv 2505.24298): p_old is the proximal
policy, and r weighs the behaviour policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.batches.packed_batch import Batch, at
from megatron_rl.config.schema import CorrectionConfig
from megatron_rl.lib.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LazyModule("torch"), Any

# upper bound of |log r|, as in verl; exp of a larger number may be inf, and inf times an advantage of 0 is nan
LOG_LIMIT = 20.0
# largest argument of exp in a loss; the square of the result, needed for gradient norms, fits into float32
EXP_LIMIT = 40.0


def bounded_exp(values: Tensor, limit: float | Tensor = EXP_LIMIT) -> Tensor:
    """Returns exp(values), [N], continued linearly (along the tangent) above `limit`, a number or [N].

    Above `limit`, the result and its gradient stay finite and positive. Up to `limit`, both are exactly those of exp.
    """
    held = torch.clamp(values, max=limit)  # type: ignore[call-overload]
    return held.exp() * (1 + (values - held))


def correction_weights(
    config: CorrectionConfig | None, gap: Tensor, batch: Batch
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Returns the loss weights of the labels, [N], and metrics, [N] each. `gap`: [N] log r of the trained labels, where
    r = p_old / p_engine (see CorrectionConfig), and 0 for other labels.

    The weights have no gradient, and are 1 for labels that the policy did not sample. A metric is 1 for labels whose r
    (or, at the other levels, the r of the whole rollout) is outside the bounds: `correction_truncated` if r was clamped
    to the bounds, `correction_masked` if the weight is 0. Without a correction, returns (None, {}).

    As in TRL 1.x and AReaL, a masked label still counts in the mean, and its KL and entropy stay in the loss. verl
    removes the label from the mean, the KL and the entropy. Otherwise verl's weights are the same, except that verl
    uses the geometric mean of the weights over a rollout for GMPO. The bounds of verl's rejection (`token_k1`,
    `seq_sum_k1`, `seq_mean_k1`) apply to 1 / r: verl's bounds 0.5_5.0 correspond to low 0.2 and high 2.0 of
    CorrectionConfig. AReaL's level `sequence` corresponds to the level `geometric`.
    """
    if config is None or config.kind == "none":
        return None, {}
    log_ratio = gap
    if config.level != "token":
        sums = batch.sequence_sums(gap)
        if config.level == "geometric":
            sums = sums / batch.sequence_sums(batch.mask.to(gap.dtype)).clamp(min=1)
        log_ratio = at(batch.mask, batch.spread(sums))
    weights, outside = weights_of_ratios(config, log_ratio)
    return weights, {"correction_truncated" if config.kind == "truncate" else "correction_masked": outside}


def weights_of_ratios(config: CorrectionConfig | None, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights for given log r, and whether r is outside the bounds. Shape of all: [N]."""
    ratio = log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if config is None or config.kind == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    bounded = ratio.clamp(min=config.low, max=config.high)
    outside = bounded != ratio
    match config.kind:
        case "truncate":
            return bounded, outside
        case "mask":
            return at(~outside, ratio), outside
        case "drop":
            return torch.where(outside, 0.0, torch.ones_like(ratio)), outside


def off_policy_mask(threshold: float | None, logprobs: Tensor, batch: Batch) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Returns weights that mask rollouts with negative advantage from which the policy has moved away: the off-policy
    sequence mask of DeepSeek-V3.2 (arXiv 2512.02556; TRL's off_policy_mask_threshold).

    The distance of a rollout is the mean of log p_engine - log p (live p) over its trained labels, an estimate of the
    KL divergence. The weights, [N] without gradient, are 0 at trained labels with negative advantage if the distance is
    above `threshold`, and 1 elsewhere. The metric `off_policy_masked`, [N], is 1 where the weight is 0. Without a
    threshold, returns (None, {}).
    """
    if threshold is None:
        return None, {}
    moved = at(batch.mask, batch.engine_logprobs - logprobs.detach())
    counts = batch.sequence_sums(batch.mask.to(moved.dtype)).clamp(min=1)
    far = batch.spread(batch.sequence_sums(moved) / counts) > threshold
    masked = batch.mask & far & (batch.advantages < 0)
    return torch.where(masked, 0.0, torch.ones_like(moved)), {"off_policy_masked": masked}
