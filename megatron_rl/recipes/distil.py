"""On-policy distillation (GKD, arXiv 2306.13649): a student generates texts and learns from the teacher's log-probs at
every position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.config.base import Count, CountOrZero, refuse
from megatron_rl.recipes.answers import accuracies
from megatron_rl.recipes.retokenised import score_texts
from megatron_rl.recipes.solutions import check_arguments, question_text, sampling_for
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.chat_template import check_models
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
from megatron_rl.training.rollouts import sample
from megatron_rl.types import Prompt, Rollout

STUDENT, TEACHER = "student", "teacher"
# reason stated in the error message about models with different vocabularies
SCORES = (
    "the teacher scores the tokens that the student wrote (with recipe.args.retokenise: true it would score the text)"
)
# keys in Rollout.values
NAMES: tuple[str, ...] = ("teacher_logprobs", "candidates", "teacher_candidate_logprobs")
# Two lists with an item for each rollout: {name: values from the teacher}, and the log-ratios of student to teacher at
# the trained tokens.
Scored = tuple[list[dict[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Distil(Recipe):
    """A recipe that trains the role `student` to match the token probabilities of the role `teacher`, on texts that the
    student generated. The teacher has the same vocabulary, or scores the texts with its own tokenizer (`retokenise`).

    The student's loss objective determines the method: `distilled` uses the teacher's log-prob of each generated token,
    `distilled_top_k` uses the teacher's `top_k` most likely tokens at each position. Responses are graded only in
    evaluations.
    """

    updates: Count  # number of updates in the run
    group_size: Count = 1  # samples per problem
    # number of the teacher's most likely tokens per position; 0: only the log-prob of the generated token
    top_k: CountOrZero = 0
    # the teacher scores the student's text in the tokens of its own tokenizer; log-probs are compared where both
    # tokenizers end a token (see recipes/retokenised.py)
    retokenise: bool = False
    template: str = "grpo_generator"  # text file with {question}, or name of a packaged prompt

    def __post_init__(self) -> None:
        check_arguments(self, templates={"template": ["question"]})
        if self.top_k and self.retokenise:
            refuse(f"recipe.args.top_k = {self.top_k} with retokenise: the teacher's tokens have other ids; give 0")

    def roles(self) -> Mapping[str, RecipeRole]:
        return {
            STUDENT: RecipeRole(
                samples=self.group_size, drawn={STUDENT: self.group_size},
                gives=frozenset(NAMES if self.top_k else NAMES[:1]),
            ),
            TEACHER: RecipeRole(trained=False),
        }  # fmt: skip

    def schedule(self) -> Schedule:
        return [[(STUDENT,)]] * self.updates

    def prompt(self, payload: Mapping[str, object]) -> str:
        return question_text(self.template, payload)

    def check(self, run: CheckedRun) -> None:
        if not self.retokenise:
            check_models(run.roles[STUDENT].model, run.roles[TEACHER].model, SCORES)

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        sampling = sampling_for(context, iteration, STUDENT, self.group_size)
        with context.watch("rollout"):
            written = sample(context, STUDENT, source.take(), sampling)
        with context.watch("teacher"):
            values, gaps = self._scored(context, written)
        context.add_metrics(STUDENT, {"sampled_kl": float(np.concatenate(gaps).mean(dtype=np.float64))})
        return {STUDENT: [replace(r, values=v) for r, v in zip(written, values, strict=True)]}

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        """Returns the rollouts unchanged: the loss reads no advantages."""
        return rollouts

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        return accuracies(context, STUDENT, prompts)[0]

    def _scored(self, context: RolloutContext, written: Sequence[Rollout]) -> Scored:
        """Lets the teacher score the rollouts. Returns the teacher's log-probs (and its most likely tokens, if `top_k`
        is above 0) under the names that loss objectives read, and the log-ratios of student to teacher.
        """
        if self.retokenise:
            scores_of_rollout, gaps = score_texts(context, written, TEACHER, self.prompt)
            return [{NAMES[0]: scores} for scores in scores_of_rollout], gaps
        texts = [rollout.tokens for rollout in written]
        if self.top_k:
            top_scores = context.engines[TEACHER].score_top(texts, self.top_k)
            values = [dict(zip(NAMES, (s.logprobs, s.ids, s.top_logprobs), strict=True)) for s in top_scores]
        else:
            values = [{NAMES[0]: scores} for scores in context.engines[TEACHER].score(texts)]
        return values, [(r.logprobs - v[NAMES[0]])[r.trainable] for r, v in zip(written, values, strict=True)]
