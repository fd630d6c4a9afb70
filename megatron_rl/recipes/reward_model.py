"""Rewards from a reward model: an option of recipes, in which a frozen role with `head: score` scores each solution."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from megatron_rl.chat_template import answered_ids
from megatron_rl.config.base import Share, config, refuse
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.text import decode
from megatron_rl.training.iteration import RecipeRole, RolloutContext, RolloutsByRole, Score
from megatron_rl.types import Rollout

REWARD = "reward_model"  # name of the reward in Rollout.rewards
_END_OF_THINKING = "</think>"


@config
class RewardModel:
    """A reward model whose score is mixed with the graded outcome of a solution. With weight 0, the default, there is
    no reward model, and the methods change nothing.
    """

    # Weight of the score. The reward is (1 - weight) * outcome + weight * score, as with orm_reward_weight in RL Tango.
    weight: Share = 0.0
    role: str = "reward"  # the role of the reward model, with `head: score`; it is never trained
    # Part of the solution that the model reads after the prompt. whole: all of it. answer: the text after the last
    # </think>.
    reads: Literal["whole", "answer"] = "whole"
    # none: the score is the output of the head. sigmoid: the sigmoid of the output, from 0 to 1 like most outcomes.
    scale: Literal["none", "sigmoid"] = "none"

    @property
    def weights(self) -> dict[str, float]:
        """The reward that advantages compare, as {name: weight} of a sum."""
        return {"outcome": 1.0 - self.weight, REWARD: self.weight} if self.weight else {"outcome": 1.0}

    @property
    def scores(self) -> list[Score]:
        """The scores that the recipe requests."""
        return [Score(role=self.role, name="value", by=self.role)] if self.weight else []

    def roles(self, parts: Mapping[str, RecipeRole]) -> dict[str, RecipeRole]:
        """Returns the roles of a recipe with the reward model added."""
        return {**parts, **({self.role: RecipeRole(trained=False, head="score")} if self.weight else {})}

    def check(self, spec: RunSpec, role: str) -> None:
        """Raises ConfigError if the reward model does not fit the run."""
        refuse(*self._problems(spec, role))

    def _problems(self, spec: RunSpec, role: str) -> Iterator[str]:
        if not self.weight:
            return
        shares = spec.recipe.needs_shares or "w_reinforce" in str(spec.recipe.estimator)
        if shares and self.scale == "none":
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
        if not self.weight or not rollouts:
            return {}
        limit = context.max_prompt_tokens[self.role] + context.samplings[self.role].max_tokens - 1
        cut, out = 0, list[Rollout]()
        for rollout in rollouts:
            answer = decode(context.tokenizers[rollout.role], rollout.response).text
            if self.reads == "answer":
                answer = answer.rpartition(_END_OF_THINKING)[2].lstrip()
            tokens = answered_ids(context.tokenizers[self.role], prompt(rollout.payload), answer)
            cut += len(tokens) > limit
            out.append(scored_rollout(self.role, rollout.group, tokens[-limit:]))
        if cut:
            context.add_metrics(rollouts[0].role, {"reward_model_cut": float(cut)})
        return {self.role: out}

    def scored(self, rollouts: RolloutsByRole, role: str) -> RolloutsByRole:
        """Returns the rollouts without the texts, whose scores become the reward REWARD of the rollouts of `role`."""
        if self.role not in rollouts:
            return rollouts
        out = []
        for rollout, text in zip(rollouts[role], rollouts[self.role], strict=True):
            score = float(text.values["value"][-1])
            if self.scale == "sigmoid":
                score = float(1 / (1 + np.exp(-score)))
            out.append(replace(rollout, rewards={**rollout.rewards, REWARD: score}))
        return {name: own for name, own in rollouts.items() if name != self.role} | {role: out}
