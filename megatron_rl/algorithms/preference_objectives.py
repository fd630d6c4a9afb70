"""Objectives that compute one loss per response, or per pair of responses, from sums of log-probs: DPO and its
relatives for preference pairs, KTO for responses that are labelled good or bad, A-LoL and reward-weighted regression
for fixed responses with rewards. Also the objectives of reward models, which are computed from the outputs of a head.

In a pair, the first rollout of the group is the chosen (preferred) response, the second one the rejected response. The
loss of an optimizer step is the mean over its pairs, or over its responses. The metrics have TRL's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.corrections import bounded_exp
from megatron_rl.batches.packed_batch import COUNT, Batch, Statistics
from megatron_rl.config.base import NotNegative, Positive, Share
from megatron_rl.lib.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch, F, Tensor = LazyModule("torch"), LazyModule("torch.nn.functional"), Any

Answer = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Responses:
    """R responses, as tensors [R]. Each value is a sum over those labels of a response that are in the loss."""

    logps: Tensor  # log-prob of the response under the trained policy, with gradient
    reference_logps: Tensor  # log-prob under the frozen reference; 0 if the objective does not need the reference
    lengths: Tensor  # number of labels; 0 for a response of a dummy batch
    advantages: Tensor  # sum of the labels' advantages

    @property
    def logratios(self) -> Tensor:
        """[R] log-prob under the policy minus log-prob under the reference."""
        return self.logps - self.reference_logps

    def per_token(self, values: Tensor) -> Tensor:
        """Divides values [R] by the number of labels of each response."""
        return values / self.lengths.clamp(min=1)


def responses(live: Statistics, batch: Batch) -> Responses:
    """Returns the summed log-probs, reference log-probs, label counts and advantages of all S rollouts of a batch."""
    kind, reference = live.logprobs.dtype, batch.reference_logprobs
    sums = [
        batch.sequence_sums(values.to(kind))
        for values in (
            live.logprobs,
            torch.zeros_like(live.logprobs) if reference is None else reference,
            batch.counted,
            batch.advantages,
        )
    ]
    return Responses(*sums)


def pairs(live: Statistics, batch: Batch) -> tuple[Responses, Responses]:
    """Splits the S rollouts of a batch into the P = S / 2 chosen responses and the P rejected responses. Returns
    (chosen, rejected), see `responses`. The single rollout of a dummy batch becomes a pair of length 0.
    """
    sides = [_sides(values) for values in vars(responses(live, batch)).values()]
    return Responses(*(chosen for chosen, _ in sides)), Responses(*(rejected for _, rejected in sides))


def over_pairs(batch: Batch, losses: Tensor) -> Tensor:
    """Repeats the loss of each pair at every position of both of its rollouts. [P] -> [N]"""
    return batch.spread(losses.repeat_interleave(2)[: batch.num_sequences])


def means(mask: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """Returns the sums and counts from which the means of metrics are computed later. `values`: {name: [R] values of a
    metric}. The mean is over the values for which `mask` [R] is True. The result has, for each metric, the sum of these
    values with the key name, and their number with the key COUNT + name. In names, "__" is replaced by "/".
    """
    sums = {name.replace("__", "/"): torch.where(mask, metric.detach(), 0).sum() for name, metric in values.items()}
    return sums | {f"{COUNT}{name}": mask.sum() for name in sums}


def dpo(live: Statistics, batch: Batch, *, beta: Positive = 0.1, label_smoothing: Share = 0.0) -> Answer:
    """Computes the loss of Direct Preference Optimization (arXiv 2305.18290; TRL's loss_type sigmoid).

    `label_smoothing`: assumed probability that the labels of a pair are swapped (conservative DPO). The same as
        label_smoothing of TRL's CPOTrainer; TRL's loss_type "robust" has another formula.
    """
    chosen, rejected = pairs(live, batch)
    losses = _sigmoid_loss(beta * (chosen.logratios - rejected.logratios), label_smoothing)
    return _answer(batch, losses, chosen, rejected, beta)


def dpo_norm(live: Statistics, batch: Batch, *, beta: Positive = 5.0, label_smoothing: Share = 0.0) -> Answer:
    """Computes length-normalised DPO: log-ratios are means over the tokens of a response (Tulu 3, arXiv 2411.15124,
    whose beta is 5; TRL's loss_type sigmoid_norm).
    """
    chosen, rejected = pairs(live, batch)
    gap = chosen.per_token(chosen.logratios) - rejected.per_token(rejected.logratios)
    return _answer(batch, _sigmoid_loss(beta * gap, label_smoothing), chosen, rejected, beta)


def ipo(live: Statistics, batch: Batch, *, beta: Positive = 0.1) -> Answer:
    """Computes the squared loss of Identity Preference Optimization, with `beta` for the paper's tau (arXiv 2310.12036,
    eq. 17). As in TRL, log-ratios are means over the tokens of a response.
    """
    chosen, rejected = pairs(live, batch)
    gap = chosen.per_token(chosen.logratios) - rejected.per_token(rejected.logratios)
    return _answer(batch, (gap - 1 / (2 * beta)) ** 2, chosen, rejected, beta)


def simpo(
    live: Statistics,
    batch: Batch,
    *,
    beta: Positive = 2.0,
    simpo_gamma: NotNegative = 0.5,
    label_smoothing: Share = 0.0,
) -> Answer:
    """Computes the loss of SimPO, which has no reference: the mean log-probs of the tokens of both responses must
    differ by a margin (arXiv 2405.14734; CPOTrainer's loss_type simpo).

    `simpo_gamma`: the margin. If label_smoothing is 0, the loss of a pair is
        -log sigmoid(beta x difference of the means - simpo_gamma). TRL's default of beta is 0.1; 2.0 is the default of
        the paper's code.
    """
    chosen, rejected = (
        Responses(side.per_token(side.logps), side.reference_logps, side.lengths, side.advantages)
        for side in pairs(live, batch)
    )
    gap = beta * (chosen.logps - rejected.logps) - simpo_gamma
    return _answer(batch, _sigmoid_loss(gap, label_smoothing), chosen, rejected, beta)


def kto(
    live: Statistics,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
) -> Answer:
    """Computes the loss of Kahneman-Tversky Optimization for responses that are labelled desirable (advantage above 0)
    or undesirable (arXiv 2402.01306, eq. 7; TRL's KTOTrainer).

    The value "kl" of each token is the estimate of KL(policy || reference), the same for the whole optimizer step.
    """
    answers = responses(live, batch)
    good, has_tokens = answers.advantages > 0, answers.lengths > 0
    kl = answers.per_token(batch.sequence_sums(batch.values["kl"].to(answers.logps.dtype)))
    gain = torch.where(good, answers.logratios - kl, kl - answers.logratios)
    weights = torch.where(good, answers.logps.new_full((), desirable_weight), undesirable_weight)
    rewards, metrics = beta * answers.logratios, {}
    for name, mask in (("chosen", good & has_tokens), ("rejected", ~good & has_tokens)):
        metrics |= means(mask, **{f"rewards__{name}": rewards, f"logps__{name}": answers.logps})
    return batch.spread(weights * torch.sigmoid(-beta * gain)), metrics | means(has_tokens, kl=kl)


def a_lol(live: Statistics, batch: Batch, *, clip: NotNegative = 0.9) -> Answer:
    """Computes the loss of Advantage Leftover Lunch RL on fixed responses: -advantage x ratio x log-prob of the
    response (arXiv 2305.14718; abaheti95/LoL-RL, lolrl_qlora_llama_hh.py, `a_lol`). Negative advantages count as 0. The
    ratio is the response's probability under the policy divided by the probability under the reference, without
    gradient.

    `clip`: the ratio is clamped to [1 - clip, 1 + clip]. The advantage is the `reward` of the data row. As in the
        paper, this should be the response's reward minus the mean reward of the reference for the prompt.
    """
    answers = responses(live, batch)
    ratio = bounded_exp(answers.logratios.detach()).clamp(1 - clip, 1 + clip)
    advantages, has_tokens = answers.per_token(answers.advantages).clamp(min=0), answers.lengths > 0
    return batch.spread(-advantages * ratio * answers.logps), means(has_tokens, rollout_weight=advantages * ratio)


def rwr(live: Statistics, batch: Batch, *, beta: Positive = 1.0) -> Answer:
    """Computes reward-weighted regression on fixed responses: minus the log-prob of a response, multiplied by
    exp(reward / beta) (Peters and Schaal, 2007).
    """
    answers = responses(live, batch)
    weights = bounded_exp(answers.per_token(answers.advantages) / beta)
    return batch.spread(-weights * answers.logps), means(answers.lengths > 0, rollout_weight=weights)


def bradley_terry(live: Statistics, batch: Batch, *, center_rewards_coefficient: NotNegative = 0.0) -> Answer:
    """Computes the loss of a reward model on pairs: -log sigmoid(chosen score - rejected score - margin), as TRL's
    RewardTrainer does. The score of a text is the head's output at the position that predicts the text's only label.
    The margin is the value "margin" at the label of the chosen text.

    `center_rewards_coefficient`: weight of the mean of (chosen score + rejected score)^2, which keeps the mean score
        near 0 (arXiv 2312.09244).
    """
    assert live.value is not None
    kind = live.value.dtype
    (chosen, rejected), (margin, _), (counted, _) = (
        _sides(batch.sequence_sums(values.to(kind))) for values in (live.value, batch.values["margin"], batch.counted)
    )
    losses = -F.logsigmoid(chosen - rejected - margin) + center_rewards_coefficient * (chosen + rejected) ** 2
    metrics = means(
        counted > 0,
        rewards__chosen=chosen,
        rewards__rejected=rejected,
        rewards__accuracies=(chosen > rejected).to(kind),
        rewards__margins=chosen - rejected,
    )
    return over_pairs(batch, losses), metrics


def prm(live: Statistics, batch: Batch) -> Answer:
    """Computes the loss of a process reward model: the binary cross-entropy between the head's output at the end of a
    reasoning step, which is a logit, and the label of the step, which is the value "step_label" (0 or 1). TRL's
    PRMTrainer has two outputs, whose difference is this logit.
    """
    assert live.value is not None
    labels = batch.values["step_label"].to(live.value.dtype)
    losses = F.binary_cross_entropy_with_logits(live.value, labels, reduction="none")
    return losses, {"rewards/accuracies": (live.value > 0) == (labels > 0.5), "rewards/mean": live.value}


def _sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the values [S] of a batch's rollouts into the values of the chosen responses and the values of the
    rejected responses, [S / 2] each. The single rollout of a dummy batch becomes a pair.
    """
    both = F.pad(values, (0, len(values) % 2)).view(-1, 2)
    return both[:, 0], both[:, 1]


def _sigmoid_loss(gap: Tensor, label_smoothing: float) -> Tensor:
    """Returns the loss of P pairs, [P] -> [P]: -log sigmoid(gap), mixed with -log sigmoid(-gap), the loss of the pair
    with swapped labels. `label_smoothing`: weight of the second loss, from 0 to 1.
    """
    return -F.logsigmoid(gap) * (1 - label_smoothing) - F.logsigmoid(-gap) * label_smoothing


def _answer(batch: Batch, losses: Tensor, chosen: Responses, rejected: Responses, beta: float) -> Answer:
    """Returns the result of an objective on pairs: [N] losses and the metrics of DPO. Every position of a rollout has
    the loss of the rollout's pair. `losses`: [P] losses of the pairs. The metrics rewards/* are computed from the
    implicit reward of a response, which is beta x its log-ratio.
    """
    first, second = beta * chosen.logratios, beta * rejected.logratios
    metrics = means(
        chosen.lengths > 0,
        rewards__chosen=first,
        rewards__rejected=second,
        rewards__accuracies=(first > second).to(first.dtype),
        rewards__margins=first - second,
        logps__chosen=chosen.logps,
        logps__rejected=rejected.logps,
    )
    return over_pairs(batch, losses), metrics
