"""HACPO (Heterogeneous Agent Collaborative Reinforcement Learning, arXiv 2603.02604): two models solve the same
problems, and each model learns from the solutions of both. The models may have different architectures and tokenizers.

The formulas are those of the paper and of the released code (zzx-peter/HACRL-code, recipe/hacpo/hacpo_core_algos.py).
The source of a rollout is the model that generated the rollout. The learner is the model that is trained on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.algorithms.objectives import Answer, objective
from megatron_rl.batches.packed_batch import ADVANTAGES, Batch, Statistics
from megatron_rl.config.base import Count, NotNegative, Share, refuse
from megatron_rl.contrib.judged import put
from megatron_rl.recipes.answers import accuracies, accuracies_of_fitting
from megatron_rl.recipes.retokenised import rewritten
from megatron_rl.recipes.solutions import check_arguments, question_text, sampling_for, solve
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.training.iteration import (
    CreditContext,
    Iteration,
    PromptSource,
    Recipe,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Schedule,
)
from megatron_rl.types import TRAINED, WRITTEN_BY, Prompt, Rollout

FIRST, SECOND = "first", "second"
OTHER = {FIRST: SECOND, SECOND: FIRST}
OBJECTIVE = "megatron_rl.contrib.hacpo:hacpo"
# SOURCE and LOW are keys in Rollout.values. Each value is a float32 array [T] that repeats one number for all tokens.
# SOURCE: mean log-prob per token of the response, under the model that generated it and with this model's tokenizer.
SOURCE = "source_logprobs"
# LOW: lower bound of the rollout's probability ratio if the other model generated the rollout. If the learner generated
# the rollout, the value is OWN.
LOW = "cross_clip_low"
OWN = -1.0
EPSILON = 1e-6  # added to the standard deviation of a group's rewards, by which the advantages are divided
MOST = 10.0  # a capability ratio is clipped to [1 / MOST, MOST]
LEAST = 1e-8  # lower bound of a role's share of solved problems, because the share is a divisor


@objective(needs=[ADVANTAGES, SOURCE, LOW], per_rollout=True)
def hacpo(
    live: Statistics,
    batch: Batch,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    alpha: float = 1.0,
    max_log_ratio: float = 10.0,
) -> Answer:
    """Computes the loss of each rollout from its ratio s = exp(mean log p under the learner - mean log p under the
    source), where each mean is over the tokens of the model's own tokenizer.

    The learner's own rollouts have GSPO's loss: s is clipped to [1 - clip_low, 1 + clip_high], and the source is the
    learner at the start of the update. Rollouts of the other model have the loss -A c sg(c)^alpha, where c is s clipped
    to [low, 1], and sg stops the gradient. The recipe computes `low`, which increases with the optimizer step, and
    multiplies the advantage A by the capability ratio. log s is clamped to [-max_log_ratio, max_log_ratio].
    """
    low = batch.values[LOW]
    is_own = low < 0
    source_logprobs = batch.old.where(is_own, batch.values[SOURCE].to(live.logprobs.dtype))
    counts = batch.sequence_sums(batch.counted.to(source_logprobs.dtype)).clamp(min=1)
    mean = batch.sequence_sums(live.logprobs - source_logprobs) / counts
    ratio = batch.spread(mean.clamp(-max_log_ratio, max_log_ratio).exp())
    gain = (ratio * batch.advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * batch.advantages)
    clipped = ratio.clamp(low.to(ratio.dtype), low.new_ones(low.shape, dtype=ratio.dtype))
    crossed = clipped * clipped.detach() ** alpha * batch.advantages
    metrics = {"cross_ratio": ratio.where(~is_own, 0), "cross_clip_frac": (clipped != ratio) & ~is_own}
    counted = {f"count/{name}": (~is_own).to(ratio.dtype) for name in metrics}
    return -gain.where(is_own, crossed), metrics | counted


@dataclass(kw_only=True)
class Hacpo(Recipe):
    """A recipe that trains the roles `first` and `second` on the same problems. Each role trains on its own solutions
    and on the solutions of the other role, which are tokenized again with the role's tokenizer.

    The capability of a role is its share of solutions with a reward above 0, averaged over the last `window`
    iterations. The ratio of the two capabilities weighs the other role's rewards in the baseline, and the other role's
    rollouts in the loss. Both roles need loss.objective = megatron_rl.contrib.hacpo:hacpo.

    Differences from the released code: the log-probs of the source are those of the source's engine, a KL penalty
    (loss.kl_coef) applies to all rollouts and not only to the learner's own, and rollouts that are too long for the
    other role are left out and not truncated.
    """

    # Rewards must be in [0, 1], because a reward above 0 counts as solved and a baseline above 1 is replaced.
    needs_shares = True
    updates: Count  # number of iterations, each of which trains both roles
    group_size: Count = 8  # samples per problem and role
    window: Count = 5  # number of iterations over which a role's capability is averaged
    # Lower bound of the probability ratio of a rollout of the other role, in optimizer step m of an update (from 0):
    # 1 - cross_clip + m cross_clip_step, at most 1. An update trains on the role's own rollouts first.
    cross_clip: Share = 0.2
    cross_clip_step: NotNegative = 0.025
    samples_per_optimizer_step: Count | None = None  # must equal roles.X.samples_per_optimizer_step of both roles
    template: str = "grpo_generator"  # text file that contains {question}, or name of a packaged prompt

    def __post_init__(self) -> None:
        check_arguments(self, templates={"template": ["question"]})
        self._rates: dict[str, list[float]] = {FIRST: [], SECOND: []}  # shares of solved problems, newest last

    def roles(self) -> Mapping[str, RecipeRole]:
        drawn = dict.fromkeys(OTHER, self.group_size)
        return {
            role: RecipeRole(
                samples=2 * self.group_size, drawn=drawn, per_prompt=drawn, gives=frozenset({ADVANTAGES, SOURCE, LOW})
            )
            for role in OTHER
        }  # fmt: skip

    def schedule(self) -> Schedule:
        return [[(FIRST, SECOND)]] * self.updates

    def prompt(self, payload: Mapping[str, object]) -> str:
        return question_text(self.template, payload)

    def check(self, run: CheckedRun) -> None:
        refuse(*self._problems(run))

    def _problems(self, run: CheckedRun) -> Iterator[str]:
        """Yields an error message for each setting of the run that does not fit the recipe."""
        if run.rollouts.mixed == "drop":
            yield "rollouts.mixed = 'drop' with HACPO, whose bounds count all rollouts: set it to keep or rescore"
        for role in OTHER:
            settings, place = run.roles[role], f"roles.{role}"
            if settings.samples_per_optimizer_step != self.samples_per_optimizer_step:
                yield (
                    f"{place}.samples_per_optimizer_step = {settings.samples_per_optimizer_step}, and recipe.args."
                    f"samples_per_optimizer_step = {self.samples_per_optimizer_step}: a bound of the loss depends on "
                    "the optimizer step; give both the same number"
                )

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        prompts = [(prompt, self._second(context, prompt)) for prompt in source.take()]
        kept = [(prompt, second) for prompt, second in prompts if second is not None]
        solved: dict[str, list[Rollout]] = {}
        for place, role in enumerate(OTHER):
            sampling = sampling_for(context, iteration, role, self.group_size)
            solutions, metrics = solve(context, role, [pair[place] for pair in kept], sampling)
            context.add_metrics(role, metrics | {"too_long": float(len(prompts) - len(kept))})
            solved[role] = [solution.rollout for solution in solutions]
        return {
            role: [*map(_with_source, rollouts), *self._crossed(context, role, solved)]
            for role, rollouts in solved.items()
        }

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        for role, rates in self._rates.items():
            outcomes = [float(r.rewards["outcome"] > 0) for r in rollouts[role] if WRITTEN_BY not in r.payload]
            self._rates[role] = [*rates, *([max(fmean(outcomes), LEAST)] if outcomes else [])][-self.window :]
        capability = {role: fmean(rates) if rates else 1.0 for role, rates in self._rates.items()}
        credited: dict[str, list[Rollout]] = {}
        for role, role_rollouts in rollouts.items():
            ratio = min(max(capability[OTHER[role]] / capability[role], 1 / MOST), MOST)
            context.add_metrics(role, {"capability": capability[role], "capability_ratio": ratio})
            credited[role] = self._credited(role_rollouts, ratio)
        return credited

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        second_prompts = [self._second(context, prompt) for prompt in prompts]
        return accuracies(context, FIRST, prompts)[0] | accuracies_of_fitting(context, SECOND, prompts, second_prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = {role: list(rates) for role, rates in state["rates"].items()}

    def _second(self, context: RolloutContext, prompt: Prompt) -> Prompt | None:
        """Returns the prompt of the second role for a problem, or None if the prompt is too long."""
        return put(context, SECOND, self.prompt(prompt.payload), id=prompt.id, payload=prompt.payload)

    def _crossed(
        self, context: RolloutContext, role: str, solved: Mapping[str, Sequence[Rollout]]
    ) -> Iterator[Rollout]:
        """Yields the solutions of the other role as rollouts that `role` can be trained on, with the tokens of the
        tokenizer of `role`. A solution is left out if it is too long, or if this tokenizer cannot represent it."""
        left_out = 0
        for rollout in solved[OTHER[role]]:
            translated = rewritten(context, rollout, role, self.prompt(rollout.payload))
            left_out += translated is None
            if translated is not None:
                yield _with_source(translated, rollout)
        context.add_metrics(role, {"cross_left_out": float(left_out)})

    def _credited(self, rollouts: Sequence[Rollout], ratio: float) -> list[Rollout]:
        """Returns the rollouts of a learner with advantages and with the lower bounds of their ratios. `ratio`:
        capability of the other role divided by the capability of the learner.
        """
        is_own = np.array([WRITTEN_BY not in r.payload for r in rollouts], bool)
        rewards = np.array([r.rewards["outcome"] for r in rollouts])
        advantages = capability_advantages(rewards, [r.group for r in rollouts], is_own, ratio)
        lows = np.where(is_own, OWN, self._lows(len(rollouts)))
        return [
            replace(
                r.with_rewards(**{TRAINED: r.rewards["outcome"]}),
                advantages=float(advantage if mine else ratio * advantage),
                values={**r.values, LOW: np.full(len(r.tokens), low, np.float32)},
            )
            for r, advantage, low, mine in zip(rollouts, advantages, lows, is_own, strict=True)
        ]

    def _lows(self, count: int) -> np.ndarray:
        """Returns a lower bound of the ratio for each of `count` rollouts. The bound depends on the optimizer step that
        trains on the rollout. batches.data_parallel_split.split assigns the rollouts to the same steps.
        """
        steps = 1 if self.samples_per_optimizer_step is None else -(-count // self.samples_per_optimizer_step)
        ends = [(i + 1) * count // steps for i in range(steps)]
        indices = np.searchsorted(ends, np.arange(count), side="right")
        return np.minimum(1 - self.cross_clip + indices * self.cross_clip_step, 1.0)


def capability_advantages(rewards: np.ndarray, groups: Sequence[str], is_own: np.ndarray, ratio: float) -> np.ndarray:
    """Returns the advantages of a learner's rollouts: the reward minus a baseline, divided by the standard deviation of
    the rewards of the group (equations 5 and 6). All arguments but `ratio` have the shape [B].

    The baseline is the mean reward of the group, in which rewards of the other model are divided by `ratio`, the
    capability of the other model over that of the learner. A group with equal rewards gets advantages of 0. A baseline
    above 1 is replaced by the mean of the learner's own rewards. `is_own`: whether the learner generated the rollout.
    """
    advantages, names = np.zeros(len(rewards)), np.array(groups)
    weighted = np.where(is_own, rewards, rewards / ratio)
    for name in np.unique(names):
        at = names == name
        if rewards[at].min() == rewards[at].max():
            continue
        baseline = weighted[at].mean()
        if baseline > 1 and is_own[at].any():
            baseline = rewards[at & is_own].mean()
        advantages[at] = (rewards[at] - baseline) / (rewards[at].std(ddof=1) + EPSILON)
    return advantages


def _with_source(rollout: Rollout, source: Rollout | None = None) -> Rollout:
    """Returns a rollout with SOURCE, the mean log-prob under the model that generated the response, in its values.
    `source`: the rollout as that model generated it; None if it is `rollout` itself.
    """
    drawn = rollout if source is None else source
    mean = drawn.logprobs[drawn.trainable].mean(dtype=np.float64)
    return replace(rollout, values={**rollout.values, SOURCE: np.full(len(rollout.tokens), mean, np.float32)})
