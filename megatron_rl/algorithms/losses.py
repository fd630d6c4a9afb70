"""Losses on log-probabilities. Each returns sums over trained tokens; the caller divides once, by `denominator` of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config import Loss
from megatron_rl.types import Batch


class PolicyLoss:
    """Clipped policy gradient with KL to a frozen reference and an entropy bonus (PPO; GRPO's per-token form)."""

    def __init__(self, config: Loss) -> None:
        self.config = config

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Live log-probs and entropies [N] of a micro-batch -> (sum to minimise, sums by name).

        `old_logprobs` None means that the live ones are the old ones (ratio 1 in value, not in gradient). Raises ValueError when
        kl_coef > 0 and the batch has no reference.
        """
        config, mask = self.config, batch.mask
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        log_ratio = _at(mask, logprobs - old)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        surrogate = -torch.min(ratio * batch.advantages, clipped * batch.advantages)
        gap = _at(mask, old.detach() - batch.engine_logprobs)
        if config.tis_cap is not None:
            surrogate = surrogate * gap.exp().clamp(max=config.tis_cap)
        per_token = surrogate - config.entropy_coef * entropy
        sums = {
            "clip_frac": _sum(mask, (ratio != clipped).float()),
            "ratio": _sum(mask, ratio.detach()),
            "entropy": _sum(mask, entropy.detach()),
            "engine_gap": _sum(mask, gap.abs()),
            "engine_kl": _sum(mask, k3(torch.zeros_like(gap), -gap)),
        }
        if config.kl_coef > 0:
            if batch.reference_logprobs is None:
                raise ValueError(
                    f"loss.kl_coef = {config.kl_coef} needs the reference's log-probs; set it to 0 for a run without reference"
                )
            reference = _at(mask, batch.reference_logprobs)
            estimate = {"k1": k1, "k2": k2, "k3": k3}[config.kl]
            per_token = per_token + config.kl_coef * estimate(_at(mask, logprobs), reference)
            sums["kl_ref"] = _sum(mask, k3(_at(mask, logprobs.detach()), reference))
        return (torch.where(mask, per_token, 0.0) * self._weights(batch)).sum(), sums

    def denominator(self, batch: Batch) -> float:
        """Trained tokens (token_mean), or sequences with at least one trained token (sequence_mean)."""
        if self.config.aggregation == "token_mean":
            return float(batch.mask.sum())
        return float((_trained_per_sequence(batch) > 0).sum())

    def _weights(self, batch: Batch) -> Tensor | float:
        """[N]: 1 per token, or 1 / (trained tokens of its sequence)."""
        if self.config.aggregation == "token_mean":
            return 1.0
        per_sequence = 1.0 / _trained_per_sequence(batch).clamp(min=1).float()
        return per_sequence.repeat_interleave(batch.lengths.to(per_sequence.device))


class CompletionLoss:
    """Negative log-likelihood of the trained tokens (supervised fine-tuning)."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] each -> (sum, sums by name)."""
        return -torch.where(batch.mask, logprobs, 0.0).sum(), {"entropy": _sum(batch.mask, entropy.detach())}

    def denominator(self, batch: Batch) -> float:
        return float(batch.mask.sum())


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) estimate log p - log q: unbiased, high variance (Schulman, Approximating KL Divergence)."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance."""
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log q - log p: unbiased, low variance, never negative."""
    difference = reference - logprobs
    return difference.exp() - difference - 1


def _at(mask: Tensor, values: Tensor) -> Tensor:
    """Values where trained, 0 elsewhere: nothing that stands at an untrained place can reach a sum, not even nan."""
    return torch.where(mask, values, 0.0)


def _sum(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()


def _trained_per_sequence(batch: Batch) -> Tensor:
    """[S] trained tokens of each sequence."""
    counts = torch.cat([batch.mask.new_zeros(1, dtype=torch.int64), batch.mask.long().cumsum(0)])
    cu = batch.cu_seqlens.to(counts.device)
    return counts[cu[1:]] - counts[cu[:-1]]
