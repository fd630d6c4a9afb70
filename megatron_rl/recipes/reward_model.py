"""Rewards from a reward model: an option of recipes, in which a frozen role with `head: score` scores each solution, or
each reasoning step of a solution.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from megatron_rl.algorithms.advantages import step_rewards
from megatron_rl.algorithms.gae import mix_steps
from megatron_rl.chat_template import answered_ids, tokenize
from megatron_rl.config.base import Share, config, refuse
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.rewards.tags import after_thinking, step_texts
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.text import decode
from megatron_rl.training.iteration import RecipeRole, RolloutContext, RolloutsByRole, Score
from megatron_rl.types import STEP, Annotations, Rollout

REWARD = "reward_model"  # name of the reward in Rollout.rewards


@config
class RewardModel:
    """A reward model whose score is mixed with the graded outcome of a solution, or whose scores are the rewards of the
    solution's reasoning steps. With both weights 0, the default, there is no reward model, and the methods change
    nothing.
    """

    # Weight of the score. The reward is (1 - weight) * outcome + weight * score, as with orm_reward_weight in RL Tango.
    weight: Share = 0.0
    role: str = "reward"  # the role of the reward model, with `head: score`; it is never trained
    # Part of the solution that the model reads after the prompt. whole: all of it. answer: the text after the last
    # </think>.
    reads: Literal["whole", "answer"] = "whole"
    # none: the score is the output of the head. sigmoid: the sigmoid of the output, from 0 to 1 like most outcomes.
    scale: Literal["none", "sigmoid"] = "none"
    # Weight of the advantages of the reasoning steps, the alpha of RL Tango. The role's model is then a process reward
    # model, which reads the steps alone (`reads` has no effect), and its score at the end of a step is the log-odds
    # that the step is right. With `weight` above 0, the score of the solution is the score of its last step.
    step_weight: Share = 0.0
    step_separator: str = "\n"  # text after each step, as data.step_separator where the model was trained

    @property
    def used(self) -> bool:
        """Whether there is a reward model."""
        return bool(self.weight or self.step_weight)

    @property
    def alpha(self) -> float | None:
        """The weight of the advantages of reasoning steps, as `assign_advantages` takes it; None without a process
        reward model."""
        return self.step_weight or None

    @property
    def weights(self) -> dict[str, float]:
        """The reward that advantages compare, as {name: weight} of a sum."""
        return {"outcome": 1.0 - self.weight, REWARD: self.weight} if self.weight else {"outcome": 1.0}

    @property
    def scores(self) -> list[Score]:
        """The scores that the recipe requests."""
        return [Score(role=self.role, name="value", by=self.role)] if self.used else []

    def roles(self, parts: Mapping[str, RecipeRole]) -> dict[str, RecipeRole]:
        """Returns the roles of a recipe with the reward model added."""
        return {**parts, **({self.role: RecipeRole(trained=False, head="score")} if self.used else {})}

    def check(self, spec: RunSpec, role: str) -> None:
        """Raises ConfigError if the reward model does not fit the run."""
        refuse(*self._problems(spec, role))

    def _problems(self, spec: RunSpec, role: str) -> Iterator[str]:
        if not self.used:
            return
        if self.step_weight and "w_reinforce" in str(spec.recipe.estimator):
            yield (
                f"recipe.args.reward_model.step_weight = {self.step_weight}, and the estimator w_reinforce has no rule "
                "for rewards of steps: set it to 0, or take another estimator"
            )
        shares = spec.recipe.needs_shares or "w_reinforce" in str(spec.recipe.estimator)
        if shares and self.weight and self.scale == "none":
            yield (
                "recipe.args.reward_model.scale = 'none', and this recipe or its estimator understands rewards from 0 "
                "to 1 alone: set it to sigmoid"
            )
        own, read = (
            part.max_prompt_tokens + part.sampling.max_tokens for part in (spec.roles[self.role], spec.roles[role])
        )
        if own < read:
            yield (
                f"roles.{self.role}.max_prompt_tokens + sampling.max_tokens = {own} is less than {read}, that of "
                f"roles.{role}, and {self.role} reads the texts of {role}: raise roles.{self.role}.max_prompt_tokens "
                f"by {read - own} or more"
            )

    def texts(
        self, context: RolloutContext, rollouts: Sequence[Rollout], prompt: Callable[[Mapping[str, Any]], str]
    ) -> dict[str, list[Rollout]]:
        """Returns the texts that the reward model scores, one for each rollout, as {role: rollouts of the role}.

        `prompt`: function that returns the prompt text of a problem. The prompt and the solution are tokenized with the
        reward model's own tokenizer and chat template. A text that is too long for the role loses its beginning; the
        metric reward_model_cut is the number of these texts.
        """
        if not self.used or not rollouts:
            return {}
        limit = context.max_prompt_tokens[self.role] + context.samplings[self.role].max_tokens - 1
        cut, out = 0, list[Rollout]()
        for rollout in rollouts:
            text = decode(context.tokenizers[rollout.role], rollout.response).text
            tokens, ends = self._read(context.tokenizers[self.role], prompt(rollout.payload), text)
            dropped = max(0, len(tokens) - limit)
            cut += dropped > 0
            ends = [end - dropped for end in ends if end >= dropped]
            out.append(scored_rollout(self.role, rollout.group, tokens[dropped:], ends=ends))
        if cut:
            context.add_metrics(rollouts[0].role, {"reward_model_cut": float(cut)})
        return {self.role: out}

    def _read(self, tokenizer: Any, prompt: str, text: str) -> tuple[list[int], list[int]]:
        """Returns the tokens that the model reads, and the indices of the tokens at which scores are read: the last
        token, or with a process reward model the last token of the separator after each step. `text`: the solution. As
        in training, steps and separators are tokenized one by one.
        """
        steps = step_texts(text) if self.step_weight else []
        if not steps:
            answer = after_thinking(text) if self.reads == "answer" else text
            tokens = answered_ids(tokenizer, prompt, answer)
            return tokens, [len(tokens) - 1]
        tokens, ends = tokenize(tokenizer, prompt), list[int]()
        for step in steps:
            for part in (step, self.step_separator):
                tokens = [*tokens, *tokenizer.encode(part, add_special_tokens=False)]
            ends.append(len(tokens) - 1)
        return tokens, ends

    def scored(self, rollouts: RolloutsByRole, role: str) -> RolloutsByRole:
        """Returns the rollouts without the texts, whose scores become rewards of the rollouts of `role`: the reward
        REWARD, and with a process reward model the scores of the steps (2 p - 1) / K, where p is the probability that
        the step is right and K the number of steps. The score of a certain step is then that of a verdict of Tango's
        verifier.

        A solution has no scores of its steps if its text lost its beginning.
        """
        if self.role not in rollouts:
            return rollouts
        out = []
        for rollout, text in zip(rollouts[role], rollouts[self.role], strict=True):
            found = text.values["value"][text.trainable]
            probabilities = 1 / (1 + np.exp(-found.astype(np.float64)))
            if self.weight:
                score = float((probabilities if self.scale == "sigmoid" else found)[-1])
                rollout = replace(rollout, rewards={**rollout.rewards, REWARD: score})
            steps = rollout.annotations_of(STEP)
            if self.step_weight and len(steps):
                scores = step_rewards(probabilities, len(steps))
                judged = {**rollout.annotations, STEP: Annotations(steps.ranges, scores)}
                rollout = replace(rollout, annotations=judged)
            out.append(rollout)
        return {name: own for name, own in rollouts.items() if name != self.role} | {role: out}

    def mixed(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Returns rollouts with the advantages of their steps mixed in, where a critic computed their advantages."""
        return mix_steps(rollouts, alpha=self.step_weight) if self.step_weight else rollouts
