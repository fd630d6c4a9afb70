"""Rewards from a reward model: an option of recipes, in which a frozen role with `head: score` scores each solution, or
each reasoning step of a solution.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from megatron_rl.algorithms.advantages import step_rewards
from megatron_rl.algorithms.gae import mix_steps
from megatron_rl.config.base import Share, config, refuse
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.chat_template import answered_ids, tokenize
from megatron_rl.texts.response_forms import form_problems, read_response, response_answer
from megatron_rl.texts.tags import step_texts
from megatron_rl.training.iteration import Recipe, RecipeRole, RolloutContext, RolloutsByRole, Score
from megatron_rl.types import STEP, Annotations, Rollout

REWARD = "reward_model"  # name of the reward in Rollout.rewards


@config
class RewardModel:
    """A frozen reward model that scores solutions. With `weight` above 0, the score of a solution is mixed with the
    graded outcome. With `step_weight` above 0, the scores of the reasoning steps are the rewards of the steps. With
    both weights 0 (the default), no reward model is used, and rollouts are left unchanged.
    """

    # Weight of the score. The reward is (1 - weight) * outcome + weight * score, as with orm_reward_weight in RL Tango.
    weight: Share = 0.0
    role: str = "reward"  # the role of the reward model, with `head: score`; it is never trained
    # Part of the solution that the model reads after the prompt. whole: all of it. answer: the text after the last
    # </think>; nothing if a thought is not closed.
    reads: Literal["whole", "answer"] = "whole"
    # none: the score is the output of the head. sigmoid: the sigmoid of the output, from 0 to 1 like most outcomes.
    scale: Literal["none", "sigmoid"] = "none"
    # Weight of the advantages that are computed from scores of the reasoning steps, such as alpha in RL Tango. 0: steps
    # are not scored. Above 0: the reward model must be a process reward model, whose score at the end of a step is the
    # log-odds that the step is right. The model reads the prompt and all steps of the solution, and the setting `reads`
    # has no effect. If `weight` is above 0 too, the score of a solution is the score of the solution's last step.
    step_weight: Share = 0.0
    step_separator: str = "\n"  # text after each step; the same as data.step_separator when the model was trained

    @property
    def used(self) -> bool:
        """Returns whether the recipe uses a reward model, which is the case if one of the weights is above 0."""
        return bool(self.weight or self.step_weight)

    @property
    def alpha(self) -> float | None:
        """Returns the argument `alpha` of `assign_advantages`: `step_weight`, or None if `step_weight` is 0 (no step
        advantages)."""
        return self.step_weight or None

    @property
    def weights(self) -> dict[str, float]:
        """The reward from which advantages are computed: a weighted sum of rewards, as {reward name: weight}."""
        return {"outcome": 1.0 - self.weight, REWARD: self.weight} if self.weight else {"outcome": 1.0}

    @property
    def scores(self) -> list[Score]:
        """The recipe's request for the reward model's scores; an empty list if no reward model is used."""
        return [Score(role=self.role, name="value", by=self.role)] if self.used else []

    def roles(self, parts: Mapping[str, RecipeRole]) -> dict[str, RecipeRole]:
        """Returns the roles of a recipe with the reward model added."""
        return {**parts, **({self.role: RecipeRole(trained=False, head="score")} if self.used else {})}

    def check(self, recipe: Recipe, run: CheckedRun, role: str) -> None:
        """Raises ConfigError if the reward model does not fit the run's estimator, recipe or maximum lengths."""
        refuse(*self._problems(recipe, run, role))

    def _problems(self, recipe: Recipe, run: CheckedRun, role: str) -> Iterator[str]:
        if not self.used:
            return
        if self.step_weight and "w_reinforce" in str(recipe.estimator):
            yield (
                f"recipe.args.reward_model.step_weight = {self.step_weight}, and the estimator w_reinforce has no rule "
                "for rewards of reasoning steps: set step_weight to 0, or use another estimator"
            )
        shares = recipe.needs_shares or "w_reinforce" in str(recipe.estimator)
        if shares and self.weight and self.scale == "none":
            yield (
                "recipe.args.reward_model.scale = 'none', and this recipe or its estimator understands rewards from 0 "
                "to 1 alone: set it to sigmoid"
            )
        if self.reads == "answer":
            model = run.roles[role].model
            yield from form_problems(model, f"roles.{role}.model", "recipe.args.reward_model.reads = 'answer'")
        limit, read = (
            part.max_prompt_tokens + part.sampling.max_tokens for part in (run.roles[self.role], run.roles[role])
        )
        if limit < read:
            yield (
                f"roles.{self.role}.max_prompt_tokens + sampling.max_tokens = {limit} is less than {read}, that of "
                f"roles.{role}, and {self.role} reads the texts of {role}: raise roles.{self.role}.max_prompt_tokens "
                f"by {read - limit} or more"
            )

    def texts(
        self, context: RolloutContext, rollouts: Sequence[Rollout], prompt: Callable[[Mapping[str, Any]], str]
    ) -> dict[str, list[Rollout]]:
        """Returns the texts that the reward model scores, one for each rollout, as {role: rollouts of the role}.

        `prompt`: function that returns the prompt text of a problem. The prompt and the solution are tokenized with the
        reward model's own tokenizer and chat template. A text that is too long for the reward model is truncated at the
        beginning; the metric reward_model_cut is the number of these texts.
        """
        if not self.used or not rollouts:
            return {}
        limit = context.max_prompt_tokens[self.role] + context.samplings[self.role].max_tokens - 1
        cut, scored_texts = 0, list[Rollout]()
        for rollout in rollouts:
            tokenizer = context.tokenizers[rollout.role]
            reads = response_answer if self.reads == "answer" else _whole_text
            text = reads(tokenizer, rollout.prompt, rollout.response)
            full_text = _whole_text(tokenizer, rollout.prompt, rollout.response) if self.step_weight else text
            tokens, ends = self._read(context.tokenizers[self.role], prompt(rollout.payload), text, full_text)
            dropped = max(0, len(tokens) - limit)
            cut += dropped > 0
            ends = [end - dropped for end in ends if end >= dropped]
            scored_texts.append(scored_rollout(self.role, rollout.group, tokens[dropped:], ends=ends))
        if cut:
            context.add_metrics(rollouts[0].role, {"reward_model_cut": float(cut)})
        return {self.role: scored_texts}

    def _read(self, tokenizer: Any, prompt: str, text: str, solution: str) -> tuple[list[int], list[int]]:
        """Returns (the tokens that the reward model reads, the indices of the tokens whose scores are used). The
        indices are the last token, or with a process reward model the last token of the separator after each step.
        `text`: the part of the solution that is read. `solution`: the whole solution, in which steps are found. Steps
        and separators are tokenized separately, as in the training of process reward models.
        """
        steps = step_texts(solution) if self.step_weight else []
        if not steps:
            tokens = answered_ids(tokenizer, prompt, text)
            return tokens, [len(tokens) - 1]
        tokens, ends = tokenize(tokenizer, prompt), list[int]()
        for step in steps:
            for part in (step, self.step_separator):
                tokens = [*tokens, *tokenizer.encode(part, add_special_tokens=False)]
            ends.append(len(tokens) - 1)
        return tokens, ends

    def scored(self, rollouts: RolloutsByRole, role: str) -> RolloutsByRole:
        """Converts the scores that the reward model gave to texts (see `texts`) to rewards of the rollouts of `role`.
        Returns the rollouts of all roles except the reward model's role, whose rollouts are the texts.

        The score of a solution becomes the reward REWARD. With a process reward model, each of its K steps gets the
        reward (2 p - 1) / K, where p is the probability that the step is right. For p = 1 and p = 0, this is the
        reward for a verdict of Tango's verifier. If the end of a step was truncated, no step of the solution gets a
        reward.
        """
        if self.role not in rollouts:
            return rollouts
        new_rollouts = []
        for rollout, text in zip(rollouts[role], rollouts[self.role], strict=True):
            logits = text.values["value"][text.trainable]
            probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
            if self.weight:
                score = float((probabilities if self.scale == "sigmoid" else logits)[-1])
                rollout = replace(rollout, rewards={**rollout.rewards, REWARD: score})
            steps = rollout.annotations_of(STEP)
            if self.step_weight and len(steps):
                scores = step_rewards(probabilities, len(steps))
                judged = {**rollout.annotations, STEP: Annotations(steps.ranges, scores)}
                rollout = replace(rollout, annotations=judged)
            new_rollouts.append(rollout)
        return {name: credited for name, credited in rollouts.items() if name != self.role} | {role: new_rollouts}

    def mixed(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Returns rollouts in which the advantages that a critic computed are mixed with advantages of the steps."""
        return mix_steps(rollouts, alpha=self.step_weight) if self.step_weight else rollouts


def _whole_text(tokenizer: Any, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray) -> str:
    return read_response(tokenizer, prompt, tokens).text
