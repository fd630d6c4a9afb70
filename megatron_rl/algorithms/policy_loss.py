"""Losses on log-probabilities: weighted sums over positions, which the caller divides once, by the denominator of the
optimizer step."""

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
    """An objective named in the config, weighed against the difference between trainer and engine, with KL to a frozen
    reference and an entropy bonus."""

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
        """[S] weighted numbers of labels and group numbers -> ([S] float32 weights of the rollouts' tokens,
        denominator)."""
        return aggregate(self.config.aggregation, counts, groups, max_tokens=self.config.max_tokens)

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Live statistics of a micro-batch of whole sequences -> (weighted sum to minimise, detached sums by name).

        `old_logprobs` None means that the live ones are the old ones (ratio 1 in value, not in gradient). Whatever
        stands at a place without weight, nan included, reaches neither value nor gradient. The sums, over trained
        tokens and unweighted: ratio, entropy, engine_gap |old - engine|, engine_kl (k3 of KL(engine || old)), the
        objective's own (clip_frac: the clip decides the token's loss), and with kl_coef > 0 kl_ref (k3 of KL(policy ||
        reference), whatever the other settings of kl are) and those of the correction and the mask (corrections.py).
        Tokens with a weight that are not trained (a junior's) are in the loss alone, without correction. KL and entropy
        are not corrected either. Raises ValueError when the reference is needed and a batch with a trained token has
        none.
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
        """Computes the objective, weighed against the difference to the engine; [N] losses and [N] metrics by name."""
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
        """Estimates KL(policy || reference) at every token, [N], with gradient.

        With `kl_bias_correction` the estimate is multiplied by the live ratio, so that its mean over the old policy's
        tokens has the gradient of the KL (arXiv 2512.02556; TRL's use_bias_correction_kl).
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
        room = EXP_LIMIT - (batch.reference_logprobs - logprobs).detach().clamp(0, EXP_LIMIT)  # k3 is an exp as well
        return estimate * bounded_exp(logprobs - batch.old, room)

    def _complete(self, live: Statistics, batch: Batch) -> Batch:
        """The batch with its old log-probs, and with a reference if one is needed: a rank without sequences may have
        none."""
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
        """All tokens alike; the denominator is their number."""
        return aggregate("token_mean", counts, groups)

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum to minimise and {entropy: detached sum}."""
        assert live.entropy is not None
        total = -(at(batch.counted, live.logprobs) * batch.weights.to(live.logprobs.dtype)).sum()
        return total, {"entropy": at(batch.mask, live.entropy.detach()).sum()}


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Estimates KL(p || q) from tokens drawn from p (`logprobs` log p, `other` log q; Schulman, Approximating KL
    Divergence).

    log p - log q: unbiased, high variance. As a loss its gradient is zero in expectation: it pulls nowhere.
    """
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance; its gradient is that of KL(p || q)."""
    return 0.5 * (logprobs - other) ** 2


def k3(logprobs: Tensor, other: Tensor, *, clamp: float | None = None) -> Tensor:
    """exp(d) - d - 1 with d = log q - log p: unbiased, low variance, never negative.

    With `clamp` it is at most that, and a token beyond it has no gradient; d is then first held within +-20, so that
    exp stays finite. verl and the release of RL Tango clamp at 10 (verl/trainer/ppo/core_algos.py, `kl_penalty`).
    """
    difference = other - logprobs
    if clamp is None:
        return bounded_exp(difference) - difference - 1
    difference = difference.clamp(-20.0, 20.0)
    return (difference.exp() - difference - 1).clamp(max=clamp)
