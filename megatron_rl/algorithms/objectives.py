"""Objectives of policy losses: functions from log-probs and advantages to a loss per token, named in the config.

A new one is a function (live, batch, **args) -> [N] per-token loss, or that and detached figures [N] by name. What it
reads is 0 wherever a label is not in the loss; `batch.old` are the log-probs at the start of the update
(the live ones' in a first optimizer step).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.batches.batch import Batch, Statistics
from megatron_rl.config import plugins
from megatron_rl.config.schema import ConfigError

Answer = Tensor | tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Objective:
    """A function that gives the loss of every token, and what it asks for."""

    function: Callable[..., Answer]
    needs: frozenset[str] = frozenset()  # entropy, vocab_mean, old, reference, or names of Rollout.values
    uses_advantages: bool = True

    def __call__(self, live: Statistics, batch: Batch, **args: Any) -> Answer:
        return self.function(live, batch, **args)


def objective(
    *, needs: Sequence[str] = (), uses_advantages: bool = True
) -> Callable[[Callable[..., Answer]], Objective]:
    """Decorates a function that asks for more than log-probs, or that does without advantages."""
    return lambda function: Objective(function, frozenset(needs), uses_advantages)


def find(name: str, args: Mapping[str, Any]) -> Objective:
    """The objective of a word of WORDS or of `module:name`. Raises ConfigError for an unknown one or for arguments that
    it does not take."""
    if ":" not in name and name not in WORDS:
        raise ConfigError(f"loss.objective = {name!r}: it is one of {', '.join(sorted(WORDS))}, or module:name")
    found = WORDS[name] if name in WORDS else plugins.find(name)
    made = found if isinstance(found, Objective) else Objective(found)
    if not callable(made.function):
        raise ConfigError(f"loss.objective = {name!r} is a {type(found).__name__}: name a function")
    known = [*inspect.signature(made.function).parameters][2:]
    if unknown := sorted(set(args) - set(known)):
        raise ConfigError(
            f"loss.objective_args {', '.join(unknown)}: {name} takes {', '.join(known) or 'no arguments'}"
        )
    return made


def clipped(live: Statistics, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Answer:
    """PPO's clipped ratio (arXiv 1707.06347) in GRPO's per-token form; clip_frac counts tokens whose loss the clip
    decides."""
    ratio = (live.logprobs - batch.old).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    gains, bounded_gains = ratio * batch.advantages, bounded * batch.advantages
    return -torch.min(gains, bounded_gains), {"clip_frac": (bounded_gains < gains).detach()}


def gspo(live: Statistics, batch: Batch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Answer:
    """Clips the geometric mean of a rollout's ratios (GSPO, arXiv 2507.18071); its gradient is shared out over the
    tokens."""
    counts = batch.sequence_sums(batch.counted.to(live.logprobs.dtype)).clamp(min=1)
    log_ratio = live.logprobs - batch.old
    mean = batch.sequence_sums(log_ratio.detach()) / counts
    ratio = (batch.spread(mean) + live.logprobs - live.logprobs.detach()).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    gains, bounded_gains = ratio * batch.advantages, bounded * batch.advantages
    return -torch.min(gains, bounded_gains), {"clip_frac": (bounded_gains < gains).detach()}


def cispo(live: Statistics, batch: Batch, *, cap: float = 5.0) -> Answer:
    """REINFORCE with the ratio, capped at `cap`, as a weight without gradient (CISPO, arXiv 2506.13585)."""
    ratio = (live.logprobs - batch.old).exp().detach()
    return -ratio.clamp(max=cap) * batch.advantages * live.logprobs, {"clip_frac": ratio > cap}


@objective(needs=["vocab_mean", "old"])
def rover(live: Statistics, batch: Batch, *, temperature: float = 1.0) -> Answer:
    """Regresses T log(p / p_old) onto the advantage plus its mean over the vocabulary at the next position (ROVER,
    arXiv 2509.24981)."""
    assert live.vocab_mean is not None  # it is asked for
    value = temperature * (live.logprobs - batch.old)
    means = temperature * (live.vocab_mean - batch.values["old_vocab_mean"])
    later = torch.cat([means[1:], means.new_zeros(1)])  # a rollout's last position has no label: 0
    return (value - (batch.advantages + later).detach()) ** 2


@objective(needs=["teacher_logprobs"], uses_advantages=False)
def distilled(live: Statistics, batch: Batch) -> Answer:
    """Distils on-policy: the advantage of a sampled token is log p of the teacher minus that of the policy."""
    gain = (batch.values["teacher_logprobs"] - live.logprobs).detach()
    return -(live.logprobs - batch.old).exp() * gain, {"teacher_gap": -gain}


WORDS: Mapping[str, Any] = {
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "rover": rover,
    "distilled": distilled,
}
