"""Losses on log-probs: weighted sums over positions, which the caller divides by the denominator of the
optimizer step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.algorithms import objectives
from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.algorithms.corrections import EXP_LIMIT, bounded_exp, correction_weights, off_policy_mask
from megatron_rl.batches.packed_batch import Batch, Statistics, at
from megatron_rl.config.schema import ConfigError, LossConfig
from megatron_rl.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LazyModule("torch"), Any


class PolicyLoss:
    """The loss of a policy: an objective named in the config, corrected for the difference between trainer and engine,
    with an optional KL penalty to a frozen reference and an entropy bonus.
    """

    uses_advantages: bool
    needs: frozenset[str]

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self._args = dict(config.objective_args)
        if config.objective == "clipped":
            self._args = {"clip_low": config.clip_low, "clip_high": config.clip_high} | self._args
        self._objective = objectives.find(config.objective, self._args)
        if self._objective.reads_correction and config.correction is not None and config.correction.level != "token":
            raise ConfigError(
                f"loss.correction.level = {config.correction.level!r} with loss.objective = {config.objective!r}: it "
                "multiplies the tokens' weights itself; set the level to token"
            )
        self.uses_advantages = self._objective.uses_advantages
        self.needs = self._objective.needs | {"entropy"} | ({"reference"} if config.kl_coef > 0 else set())

    def aggregate(self, counts: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the loss weights of the rollouts, [S] float32, and the denominator. `counts`: [S] weighted number of
        labels. `groups`: [S] group indices.
        """
        return aggregate(self.config.aggregation, counts, groups, max_tokens=self.config.max_tokens)

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weighted sum to minimise and detached sums by name, for a micro-batch of whole sequences.

        If `old_logprobs` is None, the live log-probs are used (the ratio is 1, but has a gradient). Values at positions
        without weight, also nan, affect neither value nor gradient.
        The sums are unweighted, over trained tokens: ratio, entropy, engine_gap |old - engine|, engine_kl (k3 of
        KL(engine || old)), and the objective's metrics (clip_frac: the clip determines the token's loss). With kl_coef
        > 0 also kl_ref (always k3 of KL(policy || reference), regardless of the other kl settings). Also the metrics of
        the correction and the off-policy mask (corrections.py).
        Tokens with a weight that are not trained (a junior's) are only in the loss, without correction. KL and entropy
        are not corrected either. Raises ValueError if the reference is needed but missing in a batch with a trained
        token.
        """
        config = self.config
        live, batch = live.at(batch.counted), self._complete(live, batch).cleaned()
        assert live.entropy is not None
        gap = at(batch.mask, batch.old - batch.engine_logprobs)  # no gradient: neither side is live
        per_token, metrics = self._corrected(live, batch, gap)
        if config.entropy_coef:
            per_token = per_token - config.entropy_coef * live.entropy
        sums = {
            "ratio": bounded_exp(live.logprobs.detach() - batch.old),
            "entropy": live.entropy.detach(),
            "engine_gap": gap.abs(),
            "engine_kl": k3(-gap, torch.zeros_like(gap)),
        }
        if config.kl_coef > 0:
            assert batch.reference_logprobs is not None
            per_token = per_token + config.kl_coef * self._kl(live.logprobs, batch)
            sums["kl_ref"] = k3(live.logprobs.detach(), batch.reference_logprobs)
        total = (at(batch.counted, per_token) * batch.weights.to(per_token.dtype)).sum()
        sums |= {name: values.detach().to(per_token.dtype) for name, values in metrics.items()}
        return total, {name: at(batch.mask, values).sum() for name, values in sums.items()}

    def _corrected(self, live: Statistics, batch: Batch, gap: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the objective, weighted by the correction for the engine. Returns the losses [N] and metrics [N] by
        name.
        """
        weights, corrected = correction_weights(self.config.correction, gap, batch)
        if weights is not None and self._objective.reads_correction:
            batch, weights = replace(batch, values={**batch.values, "correction": weights}), None
        answer = self._objective(live, batch, **self._args)
        per_token, metrics = answer if isinstance(answer, tuple) else (answer, {})
        kept, masked = off_policy_mask(self.config.off_policy_mask, live.logprobs, batch)
        for factor in (weights, kept):
            per_token = per_token if factor is None else per_token * factor
        return per_token, metrics | corrected | masked

    def _kl(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """Returns an estimate of KL(policy || reference) at every token, [N], with gradient.

        With `kl_bias_correction` the estimate is multiplied by the live ratio, so that its mean over tokens of the old
        policy has the gradient of the KL (arXiv 2512.02556; TRL's use_bias_correction_kl).
        """
        assert batch.reference_logprobs is not None
        match self.config.kl:
            case "k1":
                estimate = k1(logprobs, batch.reference_logprobs)
            case "k2":
                estimate = k2(logprobs, batch.reference_logprobs)
            case "k3":
                estimate = k3(logprobs, batch.reference_logprobs, clamp=self.config.kl_clamp)
        if not self.config.kl_bias_correction:
            return estimate
        # k3 contains an exp too; together they must stay below EXP_LIMIT
        room = EXP_LIMIT - (batch.reference_logprobs - logprobs).detach().clamp(0, EXP_LIMIT)
        return estimate * bounded_exp(logprobs - batch.old, room)

    def _complete(self, live: Statistics, batch: Batch) -> Batch:
        """Returns the batch with old log-probs, and with zeros as reference if a reference is needed but missing, as on
        a rank without sequences. Raises ValueError if a batch with a trained token has no reference.
        """
        if "reference" in self.needs and batch.reference_logprobs is None:
            if batch.mask.any():
                raise ValueError(
                    f"loss.kl_coef = {self.config.kl_coef} or loss.objective = {self.config.objective!r} needs the "
                    "reference's log-probs: compute them, or set kl_coef to 0"
                )
            batch = replace(batch, reference_logprobs=torch.zeros_like(batch.engine_logprobs))
        if "vocab_mean" in self.needs and "old_vocab_mean" not in batch.values:
            assert live.vocab_mean is not None
            batch = replace(batch, values={**batch.values, "old_vocab_mean": live.vocab_mean.detach()})
        if batch.old_logprobs is None:
            batch = replace(batch, old_logprobs=live.logprobs.detach())
        return batch


class CompletionLoss:
    """Negative log-likelihood of the trained tokens (supervised fine-tuning)."""

    needs = frozenset({"entropy"})
    uses_advantages = False

    def aggregate(self, counts: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns equal weights for all tokens; the denominator is the number of tokens."""
        return aggregate("token_mean", counts, groups)

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum to minimise and {entropy: detached sum}."""
        assert live.entropy is not None
        total = -(at(batch.counted, live.logprobs) * batch.weights.to(live.logprobs.dtype)).sum()
        return total, {"entropy": at(batch.mask, live.entropy.detach()).sum()}


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Estimates KL(p || q) from tokens sampled from p (`logprobs` is log p, `other` is log q; Schulman, Approximating
    KL Divergence).

    Returns log p - log q: unbiased, high variance. As a loss, its expected gradient is zero, so it has no effect.
    """
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Returns (log p - log q)^2 / 2, an estimate of KL(p || q): biased, low variance. Its gradient is that of KL(p ||
    q).
    """
    return 0.5 * (logprobs - other) ** 2


def k3(logprobs: Tensor, other: Tensor, *, clamp: float | None = None) -> Tensor:
    """Returns exp(d) - d - 1 with d = log q - log p, an estimate of KL(p || q): unbiased, low variance, never negative.

    `clamp`: upper bound of the result, without gradient beyond; d is then first clamped to +-20, so that exp stays
        finite. verl and the release of RL Tango clamp at 10 (verl/trainer/ppo/core_algos.py, `kl_penalty`).
    """
    difference = other - logprobs
    if clamp is None:
        return bounded_exp(difference) - difference - 1
    difference = difference.clamp(-20.0, 20.0)
    return (difference.exp() - difference - 1).clamp(max=clamp)
