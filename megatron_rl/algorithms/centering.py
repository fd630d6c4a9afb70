"""Score centering (arXiv 2609.20807): subtracts, from the gradient of a token-wise objective, its mean over the tokens
that the engine could have sampled at the same position with the same advantage.

A sampled token v adds w g(v) grad log p(v) to the gradient, where g is the derivative of the objective's loss by
log p(v) and w the weight of loss.correction. If engine and trainer have the same probabilities, the mean of this over
the engine's distribution q is 0 for an advantage that does not depend on the token. Otherwise it is a drift, which
changes the policy even if no token is better than another. Centering subtracts sum_v q w g grad log p. What is left is
the covariance of the advantage with the rest, not the gradient without mismatch (docs/reference/recipes.md).

The sum is taken over the k most likely tokens of the engine (`candidates`). All other tokens, the tail, are one more
candidate. Its probability under the policy is the typical probability of a token in the tail.

N positions   k candidates
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.corrections import weights_of_ratios
from megatron_rl.batches.packed_batch import ADVANTAGES, Batch, Statistics, at
from megatron_rl.config.schema import ConfigError, CorrectionConfig
from megatron_rl.lib.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_rl.algorithms.objectives import Objective
else:
    torch, Tensor = LazyModule("torch"), Any

# keys of Rollout.values: the engine's log-probs [T, k] of the tokens in `candidates`, -inf for tokens that cut sampling
# removes; and the trainer's log-probs of these tokens at the start of the update
ENGINE_CANDIDATES, OLD_CANDIDATES = "engine_candidate_logprobs", "old_candidate_logprobs"
LEAST_REST = 1e-6  # smaller probabilities of all tokens outside of the candidates are rounding errors of float32


COMBINES = (
    "loss.centering with an objective that combines the tokens of a rollout: another token in one place would change "
    "the loss of all others; set loss.centering to 0, or take an objective of single tokens"
)


class Alone(Batch):
    """A batch of tokens that belong to no rollout. An objective that combines the tokens of a rollout fails."""

    @property
    def lengths(self) -> Tensor:
        raise ConfigError(COMBINES)

    def sequence_sums(self, values: Tensor) -> Tensor:
        raise ConfigError(COMBINES)

    def spread(self, values: Tensor) -> Tensor:
        raise ConfigError(COMBINES)


def check(objective: Objective, arguments: Mapping[str, Any], correction: CorrectionConfig | None) -> None:
    """Raises ConfigError for an objective whose gradient cannot be centered: one that combines the tokens of a rollout,
    or that reads more than the log-probs of the sampled token, the entropy and the advantage of its position. Also
    raises it for a correction that weighs whole rollouts.
    """
    if correction is not None and correction.level != "token":
        raise ConfigError(
            f"loss.centering with loss.correction.level = {correction.level!r}: the weight that a rollout would have "
            "with another token in one place is unknown; set the level to token, or loss.centering to 0"
        )
    if objective.reads_correction:
        raise ConfigError(COMBINES)
    if objective.needs - {"old"} != {ADVANTAGES}:
        raise ConfigError(
            f"loss.centering with an objective that reads {', '.join(sorted(objective.needs))}: they are not known "
            "for the tokens that were not sampled; set loss.centering to 0, or take an objective that reads advantages"
        )
    logprobs = torch.full((2,), -1.0)
    _slopes(objective, arguments, logprobs, logprobs, logprobs, torch.ones(2), torch.ones(2))


def centering_losses(
    objective: Objective,
    arguments: Mapping[str, Any],
    correction: CorrectionConfig | None,
    live: Statistics,
    batch: Batch,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns loss terms, [N], that the caller adds to the objective's losses: their gradient is minus the drift (see
    the docstring of the module). They are 0 at labels that the policy did not sample. Also returns metrics, [N] each.

    The metric `head_mass` is the engine's probability of the candidates. `drift_mass` is the size of what is
    subtracted: the sum of its absolute values over the logits of the candidates, for an advantage of 1.
    """
    assert live.candidate_logprobs is not None and live.entropy is not None  # requested by PolicyLoss.needs
    logprobs, engine = live.candidate_logprobs, batch.values[ENGINE_CANDIDATES]
    with torch.no_grad():
        head = logprobs.detach(), batch.values[OLD_CANDIDATES], engine.to(logprobs.dtype)
        coefficients = _coefficients(objective, arguments, correction, head, live.entropy.detach(), batch.advantages)
        coefficients = at(batch.mask, coefficients)
    terms = -(coefficients * logprobs).sum(-1)
    drift = (coefficients - head[0].exp() * coefficients.sum(-1, keepdim=True)).abs().sum(-1)
    size = batch.advantages.abs()
    drift = torch.where(size > 0, drift / size.clamp(min=torch.finfo(drift.dtype).tiny), 0.0)
    return terms, {"head_mass": engine.exp().sum(-1), "drift_mass": drift}


def _coefficients(
    objective: Objective, arguments: Mapping[str, Any], correction: CorrectionConfig | None,
    head: tuple[Tensor, Tensor, Tensor], entropy: Tensor, advantages: Tensor,
) -> Tensor:  # fmt: skip
    """Returns the factors of the candidates' scores grad log p in the drift, [N, k]. `head`: log-probs [N, k] of the
    candidates under the policy, under the policy at the start of the update, and under the engine.

    The scores of all tokens, weighted by p, sum to 0, so the tail's are minus those of the candidates.
    """
    logprobs, _, engine = head
    rests = [(1 - one.exp().sum(-1)).clamp(min=LEAST_REST) for one in head]
    # Mean of log p over the tail, weighted by p. The sum of p log p over all tokens is -entropy, so the tail's part of
    # the sum is -entropy minus the part of the candidates.
    inside = (logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)
    typical = torch.minimum((-entropy - inside) / rests[0], rests[0].log())
    tails = [typical + (rest / rests[0]).log() for rest in rests]
    policy, old, drawn = (torch.cat([one, tail[:, None]], -1) for one, tail in zip(head, tails, strict=True))
    removed = torch.isneginf(drawn)  # the engine cannot sample these tokens
    ratios = (old - drawn.masked_fill(removed, 0.0)).flatten()
    weights = weights_of_ratios(correction, ratios)[0].view_as(drawn)
    slopes = _slopes(
        objective, arguments, policy.flatten(), old.flatten(), drawn.masked_fill(removed, 0.0).flatten(),
        advantages[:, None].expand_as(drawn).flatten(), entropy[:, None].expand_as(drawn).flatten(),
    ).view_as(drawn)  # fmt: skip
    each = (weights * slopes).masked_fill(removed, 0.0)
    coefficients = engine.exp() * each[:, :-1]
    share = torch.where(rests[2] > 2 * LEAST_REST, rests[2] / rests[0] * each[:, -1], 0.0)
    # without a tail any share will do: this one gives coefficients of 0 where engine and policy are equal
    share = torch.where(rests[0] > 2 * LEAST_REST, share, coefficients.sum(-1))
    return coefficients - share[:, None] * logprobs.exp()


def _slopes(
    objective: Callable[..., Any], arguments: Mapping[str, Any], logprobs: Tensor, old: Tensor, engine: Tensor,
    advantages: Tensor, entropy: Tensor,
) -> Tensor:  # fmt: skip
    """Returns the derivative of the objective's loss by the log-prob of each token, [M], for M tokens in texts of their
    own. All arguments are [M]."""
    with torch.enable_grad():
        live = logprobs.detach().requires_grad_()
        ids = torch.zeros(len(live), dtype=torch.int64, device=live.device)
        batch = Alone(
            tokens=ids, labels=ids, mask=ids == 0, weights=torch.ones_like(live), engine_logprobs=engine,
            advantages=advantages, cu_seqlens=ids[:0], old_logprobs=old,
        )  # fmt: skip
        answer = objective(Statistics(logprobs=live, entropy=entropy), batch, **arguments)
        losses = answer[0] if isinstance(answer, tuple) else answer
        return torch.autograd.grad(losses.sum(), live)[0]
