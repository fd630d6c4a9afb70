"""Losses on log-probabilities. Each returns sums over trained tokens; the caller divides once, by `denominator` of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config.schema import LossConfig
from megatron_rl.types import Batch


class PolicyLoss:
    """Clipped policy gradient with KL to a frozen reference and an entropy bonus (PPO, arXiv 1707.06347; GRPO's per-token form)."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Live log-probs and entropies [N] of a micro-batch of whole sequences -> (sum to minimise, detached sums by name).

        `old_logprobs` None means that the live ones are the old ones (ratio 1 in value, not in gradient). Whatever stands at an
        untrained place, nan included, reaches neither value nor gradient. The sums, over trained tokens and unweighted:
        clip_frac (the clip decides the token's loss), ratio, entropy, engine_gap |old - engine|, engine_kl (k3 of KL(engine || old)),
        and with kl_coef > 0 kl_ref (k3 of KL(policy || reference), whatever `kl` is).
        Tokens with a weight that are not trained (a junior's) are in the loss alone, with its truncated importance sampling off.
        Raises ValueError when kl_coef > 0 and a batch with a trained token has no reference.
        """
        config, mask = self.config, batch.counted
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        advantages = batch.advantages
        ratio = _at(mask, logprobs - old).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        per_token = -torch.min(ratio * advantages, clipped * advantages)
        gap = _at(batch.mask, old - batch.engine_logprobs)  # no gradient: neither side is live
        if config.tis_cap is not None:
            per_token = per_token * gap.exp().clamp(max=config.tis_cap)
        if config.entropy_coef:
            per_token = per_token - config.entropy_coef * _at(mask, entropy)
        sums = {
            "clip_frac": (clipped * advantages < ratio * advantages).to(logprobs.dtype),
            "ratio": ratio.detach(),
            "entropy": entropy.detach(),
            "engine_gap": gap.abs(),
            "engine_kl": k3(-gap, torch.zeros_like(gap)),
        }
        if config.kl_coef > 0:
            live, reference = _at(mask, logprobs), _at(mask, self._reference(batch))
            estimate = {"k1": k1, "k2": k2, "k3": k3}[config.kl]
            per_token = per_token + config.kl_coef * estimate(live, reference)
            sums["kl_ref"] = k3(live.detach(), reference)
        total = (_at(mask, per_token) * self._weights(batch, logprobs)).sum()
        return total, {name: _at(batch.mask, values).sum() for name, values in sums.items()}

    def denominator(self, batch: Batch) -> float:
        """Trained tokens (token_mean; by weight), or sequences with at least one of them (sequence_mean)."""
        if self.config.aggregation == "token_mean":
            return float(_weights(batch).sum())
        return float((_weight_per_sequence(batch) > 0).sum())

    def _reference(self, batch: Batch) -> Tensor:
        """[N] log-probs of the reference; of a batch that trains nothing (a rank without sequences) they may be missing."""
        if batch.reference_logprobs is not None:
            return batch.reference_logprobs
        if batch.mask.any():
            raise ValueError(
                f"loss.kl_coef = {self.config.kl_coef} needs the reference's log-probs: compute them, or set kl_coef to 0"
            )
        return torch.zeros_like(batch.engine_logprobs)

    def _weights(self, batch: Batch, like: Tensor) -> Tensor:
        """[N]: that of each token, or its share of its sequence's."""
        weights = _weights(batch).to(like.dtype)
        if self.config.aggregation == "token_mean":
            return weights
        whole = _weight_per_sequence(batch)
        per_sequence = torch.where(whole > 0, 1.0 / whole, 0.0).to(like.dtype)
        return weights * per_sequence.repeat_interleave(batch.lengths.to(per_sequence.device))


class CompletionLoss:
    """Negative log-likelihood of the trained tokens (supervised fine-tuning)."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] each -> (sum to minimise, {entropy: detached sum})."""
        return -_at(batch.mask, logprobs).sum(), {"entropy": _at(batch.mask, entropy.detach()).sum()}

    def denominator(self, batch: Batch) -> float:
        """Trained tokens."""
        return float(batch.mask.sum())


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Estimates of KL(p || q) from tokens drawn from p (`logprobs` log p, `other` log q; Schulman, Approximating KL Divergence).

    log p - log q: unbiased, high variance. As a loss its gradient is zero in expectation: it pulls nowhere.
    """
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance; its gradient is that of KL(p || q)."""
    return 0.5 * (logprobs - other) ** 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log q - log p: unbiased, low variance, never negative."""
    difference = other - logprobs
    return difference.exp() - difference - 1


def _at(mask: Tensor, values: Tensor) -> Tensor:
    """Values where trained, 0 elsewhere: nothing that stands at an untrained place can reach a sum, not even nan."""
    return torch.where(mask, values, 0.0)


def _weights(batch: Batch) -> Tensor:
    """[N] of each label in the loss."""
    return batch.mask.float() if batch.weights is None else batch.weights


def _weight_per_sequence(batch: Batch) -> Tensor:
    """[S] sum of the weights of each sequence's labels, float64."""
    weights = _weights(batch).double()
    sums = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    cu = batch.cu_seqlens.to(sums.device)
    return sums[cu[1:]] - sums[cu[:-1]]
