"""Schulman's estimates of the KL divergence of two models from the log-probs of sampled tokens (Approximating KL
Divergence, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.algorithms.corrections import bounded_exp
from megatron_rl.config.model import Kl

if TYPE_CHECKING:
    from torch import Tensor

VERL_CLAMP = 10.0  # clamp of k3 in verl and in the release of RL Tango (verl/trainer/ppo/core_algos.py, `kl_penalty`)


def kl_estimates(kind: Kl, logprobs: Tensor, other_logprobs: Tensor, *, clamp: float | None = None) -> Tensor:
    """Returns estimates of KL(p || q) for tokens sampled from p, [N]. `logprobs`: log p. `other_logprobs`: log q.

    k1: log p - log q, unbiased with high variance. As a loss, its expected gradient is 0.
    k2: (log p - log q)^2 / 2, biased with low variance. As a loss, it has the gradient of KL(p || q) in expectation.
    k3: exp(d) - d - 1 with d = log q - log p, unbiased with low variance, never negative.

    `clamp`: upper bound of k3, without gradient above it; d is then first clamped to +-20, so that exp stays finite.
    """
    if kind == "k1":
        return logprobs - other_logprobs
    if kind == "k2":
        return 0.5 * (logprobs - other_logprobs) ** 2
    difference = other_logprobs - logprobs
    if clamp is None:
        return bounded_exp(difference) - difference - 1
    difference = difference.clamp(-20.0, 20.0)
    return (difference.exp() - difference - 1).clamp(max=clamp)
