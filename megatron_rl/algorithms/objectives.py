"""Objectives of policy losses: functions that compute a loss per token from log-probs and advantages. The setting
loss.objective selects one by name.

A user-defined objective is a function (live, batch, **args) that returns the per-token loss [N], or a tuple of the loss
and detached metrics by name, [N] each, or a scalar for a metric that is already a sum. `live` holds the statistics of
the current forward pass, with gradient. All inputs are 0 at labels (predicted tokens) that are not in the loss.
`batch.old` holds the log-probs at the start of the update; in the first optimizer step these are the live log-probs,
detached.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from megatron_rl.algorithms import preference_objectives as preferences
from megatron_rl.algorithms.corrections import LOG_LIMIT, bounded_exp
from megatron_rl.batches.packed_batch import ADVANTAGES, VALUE, Batch, Statistics, at
from megatron_rl.config import plugins
from megatron_rl.config.base import NotNegative, Positive, Share
from megatron_rl.config.schema import ConfigError
from megatron_rl.lib.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LazyModule("torch"), Any

Answer = Tensor | tuple[Tensor, dict[str, Tensor]]
AboveOne = Annotated[float, pydantic.Field(gt=1, allow_inf_nan=False)]
# VESPO computes the logs of two numbers, a product of ratios and a correction weight. Both numbers are first raised to
# this minimum.
LEAST_WEIGHT = 1e-8


@dataclass(frozen=True)
class Objective:
    """A function that computes the loss of every token, with a description of its inputs."""

    function: Callable[..., Answer]
    # names of all inputs besides log-probs, including the signal from which the policy learns (see BatchLoss.needs)
    needs: frozenset[str] = frozenset({ADVANTAGES})
    # True if the function itself applies the correction weights, which it finds in batch.values["correction"]
    reads_correction: bool = False
    # True if the function computes a loss per rollout, or per pair, and returns it at every position of the rollouts.
    # The loss of an optimizer step is then the mean over rollouts, and the weights of loss.correction are not applied.
    per_rollout: bool = False

    def __call__(self, live: Statistics, batch: Batch, **args: Any) -> Answer:
        return self.function(live, batch, **args)


def objective(
    *,
    needs: Sequence[str] = (ADVANTAGES,),
    reads_correction: bool = False,
    per_rollout: bool = False,
) -> Callable[[Callable[..., Answer]], Objective]:
    """Returns a decorator for an objective that needs other inputs than log-probs and advantages, that applies the
    correction weights itself, or that computes a loss per rollout.
    """
    return lambda function: Objective(function, frozenset(needs), reads_correction, per_rollout)


def find(name: str, args: Mapping[str, Any]) -> Objective:
    """Returns the objective with the given name, with its arguments bound. `name`: a key of WORDS, or `module:name` of
    a user's function.

    Raises ConfigError for an unknown name, for unknown arguments, and for argument values outside the annotated bounds
    of a built-in objective.
    """
    if ":" not in name and name not in WORDS:
        raise ConfigError(f"loss.objective = {name!r}: it is one of {', '.join(sorted(WORDS))}, or module:name")
    target = WORDS[name] if name in WORDS else plugins.find(name)
    loss = target if isinstance(target, Objective) else Objective(target)
    if not callable(loss.function):
        raise ConfigError(f"loss.objective = {name!r} is a {type(target).__name__}: name a function")
    parameters = [*inspect.signature(loss.function).parameters][2:]
    if unknown := sorted(set(args) - set(parameters)):
        raise ConfigError(
            f"loss.objective_args {', '.join(unknown)}: {name} takes {', '.join(parameters) or 'no arguments'}"
        )
    hints = typing.get_type_hints(loss.function, include_extras=True) if name in WORDS and args else {}
    for key, value in args.items() if hints else ():
        try:
            pydantic.TypeAdapter(hints[key]).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            reason = error.errors()[0]["msg"].replace("Input should be", "give")
            raise ConfigError(f"loss.objective_args.{key} = {value!r}: {reason}") from error
    return loss


def clipped(
    live: Statistics,
    batch: Batch,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: AboveOne | None = None,
    ratio_bound: AboveOne | None = None,
) -> Answer:
    """Computes PPO's loss with a clipped ratio (arXiv 1707.06347) in GRPO's per-token form. The metric clip_frac marks
    tokens whose loss is determined by the clip.

    `dual_clip`: c above 1; the loss for negative advantages A is at most -c A (dual clip, arXiv 1912.09729; verl's
        clip_ratio_c = 3.0, TRL's delta). The metric dual_clip_frac marks tokens whose loss is determined by this bound.
    `ratio_bound`: b above 1; the log-ratio is clamped to [-log b, log b] before exp, and has no gradient outside
        (pre-clip of StableReinforce, arXiv 2505.02835: b = 1000; verl: b = exp(20)).
    """
    log_ratio = live.logprobs - batch.old
    if ratio_bound is not None:
        log_ratio = log_ratio.clamp(-math.log(ratio_bound), math.log(ratio_bound))
    loss, metrics = _clip(bounded_exp(log_ratio), batch.advantages, clip_low, clip_high)
    if dual_clip is not None:
        most = -dual_clip * batch.advantages
        over = (batch.advantages < 0) & (loss > most)
        loss, metrics = torch.where(over, most, loss), {**metrics, "dual_clip_frac": over}
    return loss, metrics


def gspo(
    live: Statistics,
    batch: Batch,
    *,
    clip_low: NotNegative = 3e-4,
    clip_high: NotNegative = 4e-4,
    ratio_cap: AboveOne | None = None,
) -> Answer:
    """Clips the geometric mean of a rollout's ratios (GSPO, arXiv 2507.18071). The gradient is distributed over the
    tokens. This is the paper's GSPO-token, which equals GSPO if all tokens of a rollout have the same advantage.

    The paper averages with the aggregation sequence_mean; this corresponds to TRL's importance_sampling_level =
    sequence. With the aggregation constant and max_tokens 1 it corresponds to TRL's luspo.
    `ratio_cap`: upper bound of the mean ratio, without gradient above it (verl uses exp(10) = 22026; TRL and the paper
        have no bound).
    """
    log_ratio = live.logprobs - batch.old
    mean = batch.sequence_sums(log_ratio.detach()) / _label_counts(batch, log_ratio.dtype)
    log_ratio = batch.spread(mean) + live.logprobs - live.logprobs.detach()
    if ratio_cap is not None:
        log_ratio = log_ratio.clamp(max=math.log(ratio_cap))
    return _clip(bounded_exp(log_ratio), batch.advantages, clip_low, clip_high)


def gmpo(live: Statistics, batch: Batch, *, clip_low: NotNegative = 0.4, clip_high: NotNegative = 0.4) -> Answer:
    """Weighs a rollout by the geometric mean of its clipped ratios (GMPO, arXiv 2507.20673). The metric clip_frac marks
    the clipped tokens, which have no gradient.

    The bounds apply to the log-ratio: a ratio is at most exp(clip_high) if the advantage is not negative, and at least
    exp(-clip_low) if it is negative. The paper averages with the aggregation sequence_mean. As in verl, a rollout whose
    tokens have different advantages is weighted by the mean of these advantages.
    """
    log_ratio = live.logprobs - batch.old
    bounded = torch.where(batch.advantages < 0, log_ratio.clamp(min=-clip_low), log_ratio.clamp(max=clip_high))
    ratio = bounded_exp(batch.sequence_sums(bounded) / _label_counts(batch, bounded.dtype))
    return -batch.spread(ratio) * batch.advantages, {"clip_frac": bounded != log_ratio}


def cispo(live: Statistics, batch: Batch, *, cap: Positive = 5.0) -> Answer:
    """Computes the REINFORCE loss, weighted by the ratio, which is capped at `cap` and has no gradient (CISPO, arXiv
    2506.13585).

    `cap` is the largest value of the ratio itself, as in TRL (epsilon_high, 5.0 for CISPO). NeMo-RL and verl cap the
    ratio at 1 + their parameter, and verl also clips the ratio from below.
    """
    ratio = bounded_exp(live.logprobs - batch.old).detach()
    return -ratio.clamp(max=cap) * batch.advantages * live.logprobs, {"clip_frac": ratio > cap}


def sapo(live: Statistics, batch: Batch, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> Answer:
    """Replaces the clip by a sigmoid of the ratio r: -A (4 / tau) sigmoid(tau (r - 1)), with `tau_pos` for advantages A
    above 0 and `tau_neg` otherwise (SAPO, arXiv 2511.20347; verl, compute_policy_loss_sapo).

    The gradient weight is 1 at r = 1 and decreases on both sides, faster for larger tau. The paper averages with the
    aggregation sequence_mean.
    """
    ratio = (live.logprobs - batch.old).clamp(max=LOG_LIMIT).exp()
    tau = _by_sign(batch.advantages > 0, tau_pos, tau_neg, ratio)
    return -batch.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


def dppo_tv(
    live: Statistics, batch: Batch, *, clip_low: NotNegative = 0.15, clip_high: NotNegative = 0.15, cap: Positive = 20.0
) -> Answer:
    """Computes the REINFORCE loss, weighted by the ratio, of the tokens whose probability p has changed little: with a
    positive advantage p - p_old is at most `clip_high`, otherwise p_old - p is at most `clip_low` (DPPO-Binary-TV,
    arXiv 2602.04879; verl's dppo_tv, whose clip_ratio_low and clip_ratio_high these are). The other tokens have loss 0,
    and the metric clip_frac marks them.

    `cap`: largest value of the ratio, which is a constant weight without a gradient (verl's clip_ratio_c: 20 in its
    code, 3 in its default config). In verl's bypass mode p_old is the engine's probability; here it is the trainer's,
    and loss.correction has the ratio to the engine.
    """
    moved = live.logprobs.detach().exp() - batch.old.exp()
    return _near(live, batch, moved <= clip_high, moved >= -clip_low, cap)


def dppo_kl(
    live: Statistics, batch: Batch, *, clip_low: NotNegative = 0.05, clip_high: NotNegative = 0.05, cap: Positive = 20.0
) -> Answer:
    """Computes the loss of `dppo_tv` with bounds on a KL divergence: that of (p, 1 - p) from (p_old, 1 - p_old), where
    p is the probability of the token, and 1 - p that of all other tokens together (DPPO-Binary-KL, arXiv 2602.04879;
    verl's dppo_kl). A token whose probability fell stays in the loss if its advantage is positive, and a token whose
    probability rose stays if its advantage is not positive.
    """
    logprobs, old = live.logprobs.detach(), batch.old
    p, p_old = logprobs.exp(), old.exp()
    kl = p_old * (old - logprobs) + (1 - p_old) * ((1 - p_old + 1e-8) / (1 - p + 1e-8)).log()
    return _near(live, batch, (kl <= clip_high) | (p <= p_old), (kl <= clip_low) | (p >= p_old), cap)


@objective(reads_correction=True)
def vespo(
    live: Statistics,
    batch: Batch,
    *,
    k_pos: NotNegative = 2.0,
    lambda_pos: Positive = 3.0,
    k_neg: NotNegative = 3.0,
    lambda_neg: Positive = 2.0,
) -> Answer:
    """Computes the REINFORCE loss, multiplied by the weight w^k exp(lambda (1 - w)), where w is the product (not the
    mean) of a rollout's ratios (VESPO, arXiv 2602.10693; FloyedShen/VESPO, recipe/vespo/code). The weight has no
    gradient.

    k and lambda depend on the sign of the advantage; an advantage of 0 counts as positive. The token weights of a
    correction (corrections.py) are multiplied into w, so that w is the ratio to the engine that sampled the tokens. As
    in TRL, the loss is not multiplied by the correction again.
    """
    log_ratio = (live.logprobs.detach() - batch.old).clamp(-LOG_LIMIT, LOG_LIMIT)
    if "correction" in batch.values:
        log_ratio = log_ratio + batch.values["correction"].clamp(min=LEAST_WEIGHT).log()
    log_w = batch.spread(batch.sequence_sums(log_ratio).clamp(math.log(LEAST_WEIGHT), LOG_LIMIT))
    positive = batch.advantages >= 0
    k, fall = _by_sign(positive, k_pos, k_neg, log_w), _by_sign(positive, lambda_pos, lambda_neg, log_w)
    weight = bounded_exp(k * log_w + fall * (1 - log_w.exp()))
    return -weight * batch.advantages * live.logprobs, {"rollout_weight": weight}


def reinforce(live: Statistics, batch: Batch, *, tau: NotNegative = 0.0) -> Answer:
    """Computes the REINFORCE loss without ratio or clip: -A log p / (1 + tau). With tau 1 and A = r - mean, this is
    OPMD (Kimi k1.5, arXiv 2501.12599; Trinity-RFT, opmd_policy_loss.py). With the estimator asymre, this is AsymRE.
    """
    return -batch.advantages * live.logprobs / (1 + tau)


@objective(needs=[ADVANTAGES, "vocab_mean", "old"])
def rover(live: Statistics, batch: Batch, *, temperature: Positive = 1.0) -> Answer:
    """Computes the squared error of T log(p / p_old) of a token, where T is `temperature`. The target is the advantage
    plus the mean of T log(p / p_old) over the vocabulary at the next position (ROVER, arXiv 2509.24981;
    tinnerhrhe/ROVER, Math/verl/workers/actor/dp_actor.py).

    The mean is replaced by 0 if the next token is not in the loss: at the end of a rollout, or before a tool's output.
    """
    assert live.vocab_mean is not None  # requested by `needs`
    value = temperature * (live.logprobs - batch.old)
    means = temperature * (live.vocab_mean - batch.values["old_vocab_mean"])
    later = torch.cat([means[1:], means.new_zeros(1)])  # the last position of a rollout gets 0, because it has no label
    return (value - (batch.advantages + later).detach()) ** 2


@objective(needs=["targets"])
def nll(live: Statistics, batch: Batch) -> Answer:
    """Computes the negative log-likelihood of the trained tokens (supervised fine-tuning)."""
    return -live.logprobs


@objective(needs=["teacher_logprobs"])
def distilled(live: Statistics, batch: Batch, *, max_fall: Positive | None = None) -> Answer:
    """Computes the loss of on-policy distillation: the advantage of a sampled token is the teacher's log-prob minus the
    policy's log-prob.

    `max_fall`: tokens whose probability under the policy is lower than under the engine by more than `max_fall` are
        dropped, and marked by the metric drop_frac (prime-rl, src/prime_rl/trainer/rl/loss.py, `ref_kl_loss_fn`: 0.2).
        prime-rl uses the ratio to the engine. Here, this corresponds to a loss.correction whose bounds are never
        reached. prime-rl also adds 0.001 log(ratio)^2 to the loss; this function does not.
    """
    gain = (batch.values["teacher_logprobs"] - live.logprobs).detach()
    loss, metrics = -bounded_exp(live.logprobs - batch.old) * gain, {"teacher_gap": -gain}
    if max_fall is None:
        return loss, metrics
    fall = batch.engine_logprobs.exp() - live.logprobs.detach().exp()
    dropped = batch.mask & (fall > max_fall)
    return at(~dropped, loss), {**metrics, "drop_frac": dropped}


@objective(needs=["entropy", "candidate_logprobs", "teacher_candidate_logprobs"])
def distilled_top_k(
    live: Statistics,
    batch: Batch,
    *,
    kl: Literal["forward", "reverse", "mixed"] = "reverse",
    forward_share: Share = 0.5,
    rest: Literal["bucket", "renormalised", "zero"] = "bucket",
) -> Answer:
    """Computes the loss of on-policy distillation: the KL divergence between teacher and policy at every position, over
    the candidates, which are the teacher's k most likely tokens at the position (GKD, arXiv 2306.13649; of GKD's
    divergences only forward and reverse KL).

    `kl`: "forward" is KL(teacher || policy), "reverse" is KL(policy || teacher), "mixed" is `forward_share` x forward +
        (1 - `forward_share`) x reverse (NeMo-RL's mixed_kl_weight).
    `rest`: how tokens that are not candidates are handled.
      bucket        these tokens form one additional token (TRL's loss_add_tail, its default; arXiv 2608.14728)
      renormalised  both distributions are renormalised over the candidates (NeMo-RL's default, and TRL without
                    loss_add_tail)
      zero          only the teacher is renormalised, and its log-prob of every other token is -100 (NeMo-RL's
                    zero_outside_topk)
    If all tokens are candidates, the three values of `rest` give the same loss.

    Metrics: `teacher_kl` is the divergence, `student_mass` and `teacher_mass` are the probability sums over the
    candidates. The policy's log-probs are at sampling.temperature, the teacher's at temperature 1, so set the
    temperature to 1.
    """
    assert live.candidate_logprobs is not None and live.entropy is not None  # requested by `needs`
    student, teacher = live.candidate_logprobs, batch.values["teacher_candidate_logprobs"]
    masses = {"student_mass": student.exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
    if rest == "bucket":
        student, teacher = _with_bucket(student), _with_bucket(teacher)
    else:
        teacher = teacher.log_softmax(-1)
        student = student.log_softmax(-1) if rest == "renormalised" else student
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    if rest == "zero":  # adds p (log p - log q), where log q = -100, of the tokens that are not candidates
        others = -live.entropy - (student.exp() * student).sum(-1)
        reverse = reverse + others + 100 * (1 - masses["student_mass"])
    share = {"forward": 1.0, "reverse": 0.0, "mixed": forward_share}[kl]
    loss = share * forward + (1 - share) * reverse
    return loss, {"teacher_kl": loss, **masses}


@objective(needs=[ADVANTAGES, "demonstrations"])
def rl_plus(live: Statistics, batch: Batch, *, focus: NotNegative = 0.5) -> Answer:
    """Computes the loss of RL-PLUS. Tokens that the policy generated have an unclipped ratio. Tokens of a partner (for
    example an expert's solution) have a ratio that does not use the partner's probabilities (RL-PLUS, arXiv 2508.00222;
    YihongDong/RL-PLUS, rlplus_core_alg.py).

    A partner's label has the advantage A (1 - p)^focus (p without gradient) and the ratio 2 p / (p_old + (1 + p_old) /
    2). Its loss weight is the rollout's partner_weight. The released code sums over tokens and divides by a constant
    (aggregation constant), has no KL term, and compares only the policy's samples in its estimator.
    """
    policy_ratio = bounded_exp(at(batch.mask, live.logprobs - batch.old))
    ratio = torch.where(batch.mask, policy_ratio, 2 * live.logprobs.exp() / (1.5 * batch.old.exp() + 0.5))
    focused = batch.advantages * (1 - live.logprobs.detach().exp()).clamp(min=0) ** focus
    return -ratio * torch.where(batch.mask, batch.advantages, focused)


def _with_bucket(logprobs: Tensor) -> Tensor:
    """Appends, to the log-probs of k tokens per position, the log of the total probability of all other tokens. [N, k]
    -> [N, k + 1]

    The appended log-prob is at least log 1e-7, without gradient at this bound, as in TRL (`_add_tail_bucket`), because
    of float32 precision.
    """
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([logprobs, (-total.expm1()).log()], dim=-1)


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns PPO's loss of every token, and whether the clip determines the loss. Shape of both: [N]."""
    gains, bounded_gains = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.min(gains, bounded_gains), {"clip_frac": (bounded_gains < gains).detach()}


def _near(live: Statistics, batch: Batch, may_rise: Tensor, may_fall: Tensor, cap: float) -> Answer:
    """Returns the losses of DPPO, [N], and which tokens it drops. `may_rise`, `may_fall`: [N] bool, whether the token's
    probability may rise further (positive advantage) or fall further (other advantages)."""
    kept = torch.where(batch.advantages > 0, may_rise, may_fall)
    ratio = (live.logprobs.detach() - batch.old).clamp(-LOG_LIMIT, LOG_LIMIT).exp().clamp(max=cap)
    return at(kept, -batch.advantages * ratio * live.logprobs), {"clip_frac": ~kept}


def _by_sign(positive: Tensor, upper: float, lower: float, like: Tensor) -> Tensor:
    """Returns `upper` where `positive` [N] is True and `lower` elsewhere, [N] in the dtype of `like`."""
    return torch.where(positive, like.new_full((), upper), like.new_full((), lower))


def _label_counts(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns, for each rollout, the number of labels that are in the loss, but at least 1: [S]."""
    return batch.sequence_sums(batch.counted.to(dtype)).clamp(min=1)


def _on_pairs(*needs: str) -> Callable[[Callable[..., Answer]], Objective]:
    """Returns a decorator for an objective that compares the two rollouts of each group."""
    return objective(needs=["pairs", *needs], per_rollout=True)


WORDS: Mapping[str, Any] = {
    "clipped": clipped,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
    "reinforce": reinforce,
    "rover": rover,
    "distilled": distilled,
    "distilled_top_k": distilled_top_k,
    "rl_plus": rl_plus,
    "nll": nll,
    "dpo": _on_pairs("reference")(preferences.dpo),
    "dpo_norm": _on_pairs("reference")(preferences.dpo_norm),
    "ipo": _on_pairs("reference")(preferences.ipo),
    "simpo": _on_pairs()(preferences.simpo),
    "kto": objective(needs=["labels", "reference", "kl"], per_rollout=True)(preferences.kto),
    "a_lol": objective(needs=["rewards", "reference"], per_rollout=True)(preferences.a_lol),
    "rwr": objective(needs=["rewards"], per_rollout=True)(preferences.rwr),
    "bradley_terry": _on_pairs(VALUE, "margin")(preferences.bradley_terry),
    "prm": objective(needs=[VALUE, "step_label"])(preferences.prm),
}
