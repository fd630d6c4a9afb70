"""BRPO (Writing-Zero, arXiv 2506.00103): a judge compares each response to a problem with a reference, which is another
response to the same problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_rl.algorithms.advantages import EstimatorName
from megatron_rl.config.base import Count, CountOrZero
from megatron_rl.config.schema import ConfigError
from megatron_rl.contrib.comparing import BOTH, Answer, Comparisons, comparison_metrics
from megatron_rl.contrib.judged import JUDGE, answer_text, judge_rollout
from megatron_rl.recipes.solutions import GENERATOR, check_arguments, question_text, sampling_for
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
from megatron_rl.training.rollouts import drawn, greedy, sample
from megatron_rl.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Pairwise(Recipe):
    """A recipe that trains `generator` to write responses that `judge` prefers to a reference response of the same
    group.

    The judge is a frozen model or a model behind a URL, unless `judge_warmup` or `judge_iterations` is above 0. In
    judge iterations, the judge compares the responses `answer` and `rejected` of each problem (roles.judge.data may be
    a set of preferences), and learns to prefer `answer`. For a problem without `rejected`, it compares two responses of
    the generator, and learns only the requested answer format.
    """

    updates: Count  # number of generator updates
    group_size: Count = 8  # number of responses per problem; one response is the reference for the others
    # true: compare each pair in both orders and average the margins; false: compare each pair in one random order
    both_orders: bool = False
    judge_warmup: CountOrZero = 0  # number of judge iterations before the first generator iteration
    judge_iterations: CountOrZero = 0  # number of judge iterations after each generator iteration
    judgements: Count = 8  # number of judgements of each pair in each order, in a judge iteration
    format_weight: float = 0.8  # weight of the format score in the judge's reward
    estimator: EstimatorName = "grpo"  # estimator for the judge: a name in algorithms.estimators, or module:name
    generator_template: str = "open_generator"  # text file that contains {question}, or name of a packaged prompt
    judge_template: str = "pairwise_judge"  # template with {question}, {first}, {second}

    def __post_init__(self) -> None:
        templates = {"generator_template": ["question"], "judge_template": ["first", "second"]}
        groups = ["judgements"] if self.judge_warmup + self.judge_iterations > 0 else []
        check_arguments(self, groups=groups, templates=templates)
        if self.group_size < 3:
            raise ConfigError(
                f"recipe.args.group_size = {self.group_size}: give at least 3, a reference and two others"
            )
        if self.format_weight < 0:
            raise ConfigError(f"recipe.args.format_weight = {self.format_weight}: give at least 0")

    def roles(self) -> Mapping[str, RecipeRole]:
        orders, others = 1 + self.both_orders, self.group_size - 1
        num_judgements = self.judgements * orders
        trained, alike = self.judge_warmup + self.judge_iterations > 0, {JUDGE: self.judgements}
        judge = RecipeRole(trained=trained, samples=num_judgements, drawn={JUDGE: num_judgements}, per_prompt=alike)
        drawn, alike = {GENERATOR: self.group_size, JUDGE: others * orders}, {GENERATOR: self.group_size}
        return {GENERATOR: RecipeRole(samples=others, drawn=drawn, per_prompt=alike), JUDGE: judge}

    def schedule(self) -> Schedule:
        return [[(JUDGE,)]] * self.judge_warmup + [[(GENERATOR,), *[(JUDGE,)] * self.judge_iterations]] * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return question_text(self.generator_template, payload)

    def reads_answers(self) -> Mapping[str, str]:
        return dict.fromkeys((GENERATOR, JUDGE), "the judge reads answers without thoughts")

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        judge_sampling = sampling_for(context, iteration, JUDGE, self.judgements if iteration.role == JUDGE else 1)
        compared = Comparisons(
            context, self.judge_template, judge_sampling, lambda place: self._orders(context, iteration, place)
        )
        if iteration.role == JUDGE:
            return {JUDGE: self._judge_iteration(iteration, source.take(), context, compared)}
        return {GENERATOR: self._generator_iteration(iteration, source.take(), context, compared)}

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        """Uses the outcome of a response as its advantage, without dividing it by a standard deviation."""
        if iteration.role == JUDGE:
            return super().credit(iteration, rollouts, context)
        return {GENERATOR: [replace(r, advantages=r.rewards["outcome"]) for r in rollouts[GENERATOR]]}

    def reward(self, role: str) -> str:
        return "total"

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Evaluates both roles on the problems that have a response `rejected`, with greedy decoding and both orders.
        The metric win_rate is how often the judge prefers the generator's response to `answer`. The metric accuracy is
        how often the judge prefers `answer` to `rejected`. A comparison that cannot be parsed counts as lost.
        """
        comparable = [prompt for prompt in prompts if "rejected" in prompt.payload]
        if not comparable:
            return {}
        texts = _texts(
            context, sample(context, GENERATOR, comparable, greedy(context.samplings[GENERATOR], seed=context.seed))
        )
        judge = greedy(context.samplings[JUDGE], seed=context.seed)
        compared = Comparisons(context, self.judge_template, judge, lambda place: BOTH)
        for i, (prompt, text) in enumerate(zip(comparable, texts, strict=True)):
            answer, rejected = str(prompt.payload["answer"]), str(prompt.payload["rejected"])
            compared.add(2 * i, prompt, text, answer)
            compared.add(2 * i + 1, prompt, answer, rejected)
        metrics = {f"{JUDGE}/{name}": value for name, value in comparison_metrics(compared.finish()).items()}
        won = [float((compared.margin(place) or 0.0) > 0) for place in range(2 * len(comparable))]
        return metrics | {f"{GENERATOR}/win_rate": fmean(won[::2]), f"{JUDGE}/accuracy": fmean(won[1::2])}

    def _orders(self, context: RolloutContext, iteration: Iteration, place: int) -> Sequence[bool]:
        """Returns the orders in which a pair is compared: both, or one random order, so that the judge's position bias
        averages out over many pairs.
        """
        return BOTH if self.both_orders else (context.seed_for(iteration.number, "order", place) % 2 == 1,)

    def _generator_iteration(
        self, iteration: Iteration, prompts: Sequence[Prompt], context: RolloutContext, compared: Comparisons
    ) -> list[Rollout]:
        """Returns the responses to train on, with an outcome of 1.0 (better than the reference) or -1.0. If all
        comparisons of a problem have the same outcome, the responses to the problem are left out. The reference
        response is not trained on.
        """
        n, groups = self.group_size, dict[int, list[Rollout]]()
        references = [context.seed_for(iteration.number, "reference", i) % n for i in range(len(prompts))]
        sampling = sampling_for(context, iteration, GENERATOR, n)
        with context.watch("rollout"):
            # a group is compared while other groups are still being generated
            for i, group in drawn(context, GENERATOR, prompts, sampling):
                groups[i], texts = group, _texts(context, group)
                for j in _others(n, references[i]):
                    compared.add(i * n + j, prompts[i], texts[j], texts[references[i]])
                context.watch.beat()
        metrics, learned = comparison_metrics(compared.finish()), list[Rollout]()
        ungraded = alike = 0
        for i, reference in enumerate(references):
            margins = {j: compared.margin(i * n + j) for j in _others(n, reference)}
            scored = [
                groups[i][j].with_rewards(outcome=1.0 if margin > 0 else -1.0, margin=margin)
                for j, margin in margins.items()
                if margin is not None
            ]
            ungraded += len(margins) - len(scored)
            differ = any(rollout.rewards["outcome"] != scored[0].rewards["outcome"] for rollout in scored)
            alike += not differ
            learned += scored if differ else []
        context.add_metrics(GENERATOR, metrics | {"ungraded": float(ungraded), "groups_alike": float(alike)})
        return learned

    def _judge_iteration(
        self, iteration: Iteration, prompts: Sequence[Prompt], context: RolloutContext, compared: Comparisons
    ) -> list[Rollout]:
        """Returns the judge's answers as rollouts. The judge compares the responses `answer` and `rejected` of each
        problem. For a problem without `rejected`, the judge compares two responses of the generator.
        """
        unknown = [prompt for prompt in prompts if "rejected" not in prompt.payload]
        texts = _texts(context, sample(context, GENERATOR, unknown, sampling_for(context, iteration, GENERATOR, 2)))
        for place, prompt in enumerate(prompts):
            if "rejected" in prompt.payload:
                compared.add(place, prompt, str(prompt.payload["answer"]), str(prompt.payload["rejected"]))
            else:
                compared.add(place, prompt, texts.pop(0), texts.pop(0))
        answers = compared.finish()
        context.add_metrics(JUDGE, comparison_metrics(answers))
        judged = [
            judge_rollout(context, answer, form=answer.opinion.form, agrees=_agrees(answer), weight=self.format_weight)
            for answer in answers
        ]
        return judged


def _texts(context: RolloutContext, rollouts: Sequence[Rollout]) -> list[str]:
    return [answer_text(context, rollout) or "" for rollout in rollouts]


def _others(n: int, reference: int) -> list[int]:
    return [j for j in range(n) if j != reference]


def _agrees(answer: Answer) -> float | None:
    """Returns 1.0 if an answer prefers the better response, 0.0 if not, and None if the better response is unknown."""
    if "rejected" not in answer.item.payload:
        return None
    return float(answer.opinion.scores is not None and answer.item.margin(answer.opinion.scores) > 0)
