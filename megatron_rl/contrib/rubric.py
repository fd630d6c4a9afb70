"""Rubric Anchors (arXiv 2508.12790): a judge scores each response on the criteria of its problem's rubric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby
from statistics import fmean
from typing import Any

from megatron_rl.algorithms.advantages import EstimatorName
from megatron_rl.config.base import Count
from megatron_rl.config.plugins import find_function
from megatron_rl.config.schema import ConfigError
from megatron_rl.contrib.judged import JUDGE, answer_text, judge_prompt, judge_rollout
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.judging import Judgement, Judging, Question
from megatron_rl.recipes.solutions import GENERATOR, check_arguments, check_fields, question_text, sampling_for
from megatron_rl.rewards.grading_pool import Graded, check_failures
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.tags import boxed
from megatron_rl.training.iteration import (
    Iteration,
    PromptSource,
    Recipe,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Schedule,
)
from megatron_rl.training.rollouts import drawn, evaluated, greedy
from megatron_rl.types import Outcome, Prompt, Rollout

PASS = 0.5  # minimum score of a fulfilled criterion
# scores of the answers yes and no, which a judge trained with the recipe Entailment gives
_WORDS = {"yes": 1.0, "no": 0.0}


@dataclass(frozen=True)
class Criterion:
    """One criterion of a rubric."""

    criterion: str  # description of the criterion
    weight: float = 1.0  # weight of the score in the reward, at least 0
    veto: bool = False  # if True, a response that does not fulfil the criterion has the reward 0
    # Above this score, in (0, 1], a higher score increases the reward less and less (see `saturated`). 1: at no score.
    saturation: float = 1.0
    tiers: Sequence[str] = ("It is not fulfilled.", "It is fulfilled.")  # descriptions of the score levels, worst first

    def read(self, answer: str) -> float | None:
        r"""Returns the score in [0, 1] in a judge's answer, or None if there is none.

        The score is read from the last \boxed{}, which contains the index of a tier, or yes (best) or no (worst).
        """
        verdict, top = (boxed(answer) or "").lower(), len(self.tiers) - 1
        if verdict.isascii() and verdict.isdigit() and len(verdict) < 4 and int(verdict) <= top:
            return int(verdict) / top
        return _WORDS.get(verdict)


def read_rubric(payload: Mapping[str, Any]) -> list[Criterion]:
    """Returns the criteria in payload["rubric"], a list of mappings with the fields of a Criterion. Fields that are
    null get their defaults. Raises ValueError, with the index of the criterion, for an invalid rubric.
    """
    rows = payload.get("rubric")
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise ValueError(f"the problem's rubric is {rows!r}: it is a list of criteria; name its column by data.fields")
    criteria = []
    for number, row in enumerate(rows):
        try:
            criteria.append(_criterion(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"criterion {number} of the rubric, {row!r}, cannot be used: {error}") from None
    return criteria


def vetoed(criteria: Sequence[Criterion], scores: Sequence[float]) -> bool:
    """Returns whether a response fails a veto: whether its score on any criterion with `veto` is below PASS."""
    return any(criterion.veto and score < PASS for criterion, score in zip(criteria, scores, strict=True))


def rubric_reward(criteria: Sequence[Criterion], scores: Sequence[float]) -> float:
    """Returns sum_k weight_k * saturated(score_k), or 0 for a response that fails a veto. `scores`: one score in [0, 1]
    for each criterion.
    """
    if vetoed(criteria, scores):
        return 0.0
    return math.fsum(c.weight * saturated(score, c.saturation) for c, score in zip(criteria, scores, strict=True))


def saturated(score: float, threshold: float) -> float:
    """Returns the score s if it is at most the threshold t, otherwise t + (1 - t) (1 - exp(-(s - t) / (1 - t))).

    The function has slope 1 at the threshold, and a decreasing slope above it. The paper mentions diminishing returns
    above a threshold but gives no function; this function was chosen because it needs no second parameter.
    """
    room = 1.0 - threshold
    return score if score <= threshold else threshold + room * (1.0 - math.exp(-(score - threshold) / room))


def _criterion(row: Mapping[str, Any]) -> Criterion:
    """Returns the criterion of a mapping. Raises TypeError or ValueError if it is invalid."""
    if not isinstance(row, Mapping):
        raise TypeError(f"it is a mapping with {', '.join(field.name for field in fields(Criterion))}")
    criterion = Criterion(**{name: value for name, value in row.items() if value is not None})
    if not isinstance(criterion.criterion, str) or not criterion.criterion or not isinstance(criterion.veto, bool):
        raise ValueError("its criterion is a text, and its veto true or false")
    if not (0 <= criterion.weight < math.inf and 0 < criterion.saturation <= 1):
        raise ValueError("give a weight of at least 0, and a saturation above 0 up to 1")
    if isinstance(criterion.tiers, str) or len(criterion.tiers) < 2:
        raise ValueError("give at least two tiers, the worst first")
    return criterion


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One response together with one criterion on which it is judged."""

    place: int  # index of the response in its iteration
    rollout: Rollout
    text: str | None  # text of the response without thoughts; None if the response has no answer
    criterion: Criterion
    gold: float | None  # known correct score of the response on the criterion; None if unknown

    def read(self, answer: str) -> float | None:
        return self.criterion.read(answer)


# The judge's answer about a response and a criterion (a Claim): a score in [0, 1], or None if unreadable.
Answer = Judgement[Claim, float | None]


@dataclass(frozen=True, kw_only=True)
class Rubric(Recipe):
    """A recipe that trains `generator` on the judge's scores of its responses.

    The judge is asked about each criterion separately. It is a frozen model, or a model behind a URL, unless
    `train_judge` is set. With `train_judge`, both roles learn in the same iterations; the judge is rewarded for
    readable answers and, if `labels` returns known scores, for correct ones. If the judge gives no readable answer for
    a criterion, the response is not graded and is left out of its group.
    """

    updates: Count  # number of updates in the run
    group_size: Count = 8  # responses per problem
    judgements: Count = 1  # judgements per criterion of a response; the score is their mean
    criteria: Count = 4  # approximate number of criteria in a rubric; used only to estimate memory and time
    estimator: EstimatorName = "grpo"  # a name in algorithms.estimators, or module:name
    train_judge: bool = False
    # module:name of a function (response, payload) -> list with one entry for each criterion. An entry is the known
    # score in [0, 1], or None.
    labels: str | None = None
    # Whether the reward is multiplied by the score of the run's reward function, which checks rules.
    # For VerIF (arXiv 2506.09942), set reward.target to megatron_rl.rewards.instructions:grade.
    rules: bool = False
    format_weight: float = 0.8  # weight, in the judge's reward, of whether the answer is readable
    generator_template: str = "open_generator"  # text file that contains {question}, or name of a packaged prompt
    judge_template: str = "rubric_judge"  # template with {question}, {response}, {criterion}, {tiers}

    def __post_init__(self) -> None:
        groups = ["group_size", "judgements"] if self.train_judge else ["group_size"]
        templates = {"generator_template": ["question"], "judge_template": ["response", "criterion"]}
        check_arguments(self, groups=groups, templates=templates)
        if self.labels is not None:
            find_function(self.labels)
        if self.format_weight < 0 or (self.train_judge and self.labels is None and self.format_weight == 0):
            raise ConfigError(f"recipe.args.format_weight = {self.format_weight}: give more than 0, or 0 with labels")

    def roles(self) -> Mapping[str, RecipeRole]:
        num_judgements = self.group_size * self.criteria * self.judgements
        drawn = {GENERATOR: self.group_size, JUDGE: num_judgements}
        alike = {GENERATOR: self.group_size, JUDGE: self.judgements}
        judge = RecipeRole(trained=self.train_judge, samples=num_judgements, drawn=drawn, per_prompt=alike)
        return {GENERATOR: RecipeRole(samples=self.group_size, drawn=drawn, per_prompt=alike), JUDGE: judge}

    def schedule(self) -> Schedule:
        return [[(GENERATOR, JUDGE) if self.train_judge else (GENERATOR,)]] * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return question_text(self.generator_template, payload)

    def check(self, run: CheckedRun) -> None:
        check_fields(run, GENERATOR, {"rubric": "the judge"}, held_out=True)

    def reads_answers(self) -> Mapping[str, str]:
        return dict.fromkeys((GENERATOR, JUDGE), "the judge reads answers without thoughts")

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        sampling = sampling_for(context, iteration, GENERATOR, self.group_size)
        judge_sampling = sampling_for(context, iteration, JUDGE, self.judgements)
        graded, answers, metrics = self._judged(context, source.take(), sampling, judge_sampling)
        context.add_metrics(GENERATOR, metrics)
        learned: dict[str, Sequence[Rollout]] = {GENERATOR: graded}
        if self.train_judge:
            judged = []
            for answer in answers:
                score, gold = answer.opinion, answer.item.gold
                agrees = None if gold is None else 0.0 if score is None else 1.0 - abs(score - gold)
                parts = {"form": float(score is not None), "agrees": agrees, "weight": self.format_weight}
                judged.append(judge_rollout(context, answer, **parts))
            learned[JUDGE] = judged
        return learned

    def reward(self, role: str) -> str:
        return "total" if role == JUDGE else "outcome"

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Evaluates the generator with a judge that samples greedily. `context.evaluation` determines how the responses
        are sampled; if its option `also_greedy` is set, greedy responses are evaluated as well. The metrics are reward
        (mean of the outcomes), fulfilled, vetoed and, if the setting `rules` is True, rules. A response that could not
        be graded counts as 0 in these means, and is counted in the metric ungraded.
        """
        base, judge = context.samplings[GENERATOR], greedy(context.samplings[JUDGE], seed=context.seed)
        all_metrics: dict[str, float] = {}
        samplings = {"": evaluated(base, context.evaluation, seed=context.seed)}
        samplings |= {"_greedy": greedy(base, seed=context.seed)} if context.evaluation.also_greedy else {}
        for suffix, sampling in samplings.items():
            graded, _, metrics = self._judged(context, prompts, sampling, judge)
            # name of the metric -> name of the reward
            names = {"reward": "outcome", "fulfilled": "fulfilled", "vetoed": "vetoed"}
            names |= {"rules": "rules"} if self.rules else {}
            count = len(prompts) * sampling.n
            metrics |= {metric: sum(r.rewards[reward] for r in graded) / count for metric, reward in names.items()}
            all_metrics |= {f"{GENERATOR}/{metric}{suffix}": value for metric, value in metrics.items()}
        return all_metrics

    def _judged(
        self, context: RolloutContext, prompts: Sequence[Prompt], sampling: Sampling, judge_sampling: Sampling
    ) -> tuple[list[Rollout], list[Answer], dict[str, float]]:
        """Samples responses and asks the judge about each response as soon as it is generated. Returns the graded
        responses with rewards, all answers of the judge (both in the order of the prompts), and metrics.
        """
        rubrics = [read_rubric(prompt.payload) for prompt in prompts]
        # Index of the first claim of each problem. The indices are computed here, before any response arrives, so that
        # they do not depend on the order of arrival.
        first = [0, *accumulate(sampling.n * len(rubric) for rubric in rubrics)]
        question = Question[Claim, float | None](
            prompt=lambda claim: self._ask(context, claim), read=Claim.read, answer_only=True
        )
        judging = Judging(context.engines[JUDGE], context.tokenizers[JUDGE], judge_sampling, question)
        claims = dict[int, Claim]()
        with context.watch("rollout"):
            for i, group in drawn(context, GENERATOR, prompts, sampling):
                for key, claim in enumerate(self._claims(context, i * sampling.n, group, rubrics[i]), start=first[i]):
                    claims[key] = claim
                    if claim.text is not None:
                        judging.ask(key, claim)
                context.watch.beat()
        judgements = judging.collect(context.watch)
        rows = [(claim, judgements.get(key, [])) for key, claim in sorted(claims.items())]
        responses = [list(part) for _, part in groupby(rows, key=lambda row: row[0].place)]
        gradings = self._check_rules(context, [rows[0][0] for rows in responses])
        graded = [rollout for rollout in map(_rewarded, responses, gradings) if rollout is not None]
        answers = [answer for _, own_answers in rows for answer in own_answers]
        metrics = {
            "ungraded": len(responses) - len(graded),  # number of responses without a grade
            # number of criteria whose prompt is too long for the judge
            "unasked": sum(claim.text is not None for claim, _ in rows) - len(judgements),
            "unreadable": sum(answer.opinion is None for answer in answers),  # number of unreadable answers
        }
        return graded, answers, {name: float(count) for name, count in metrics.items()}

    def _claims(
        self, context: RolloutContext, place: int, group: Sequence[Rollout], rubric: Sequence[Criterion]
    ) -> list[Claim]:
        """Returns n * K claims: one for each of n responses to a problem and each of the problem's K criteria. `place`:
        index of the first response."""
        claims: list[Claim] = []
        for j, rollout in enumerate(group):
            text = answer_text(context, rollout)
            gold = (
                [None] * len(rubric) if self.labels is None else find_function(self.labels)(text or "", rollout.payload)
            )
            claims += [Claim(place + j, rollout, text, c, label) for c, label in zip(rubric, gold, strict=True)]
        return claims

    def _check_rules(self, context: RolloutContext, claims: Sequence[Claim]) -> list[Graded | None]:
        """Returns the grading of each of [R] responses by the run's reward function. If the setting `rules` is False,
        returns None for each response. `claims`: one claim about each response.
        """
        if not self.rules:
            return [None] * len(claims)
        with context.watch("reward"):
            graded = context.grade([claim.text or "" for claim in claims], [claim.rollout.payload for claim in claims])
        check_failures(graded, context.max_failure_share)
        return [*graded]

    def _ask(self, context: RolloutContext, claim: Claim) -> Prompt | None:
        tiers = "\n".join(f"{score}: {tier}" for score, tier in enumerate(claim.criterion.tiers))
        values = {"response": str(claim.text), "criterion": claim.criterion.criterion, "tiers": tiers}
        return judge_prompt(context, self.judge_template, claim.rollout.group, claim.rollout.payload, **values)


def _rewarded(rows: Sequence[tuple[Claim, Sequence[Answer]]], rules: Graded | None) -> Rollout | None:
    """Returns a response with the rewards outcome, fulfilled (share of fulfilled criteria) and vetoed. `rows`: for
    each criterion, the claim and the judge's answers about the claim. `rules`: the grading of the response by the run's
    reward function, or None. The score of this grading becomes the reward `rules`, and the outcome is multiplied by the
    score. Returns None if a criterion has no readable answer, or `rules` has no score. A response without an answer has
    the score 0 on each criterion.
    """
    read = [
        [0.0] if claim.text is None else [answer.opinion for answer in answers if answer.opinion is not None]
        for claim, answers in rows
    ]
    if not all(read) or (rules is not None and rules.outcome is not Outcome.SCORE):
        return None
    rollout, criteria = rows[0][0].rollout, [claim.criterion for claim, _ in rows]
    scores = [fmean(opinions) for opinions in read]
    rewards = {
        "outcome": rubric_reward(criteria, scores),
        "fulfilled": fmean(float(score >= PASS) for score in scores),
        "vetoed": float(vetoed(criteria, scores)),
    }
    if rules is not None:
        rewards |= {**rules.metrics, "rules": rules.score, "outcome": rewards["outcome"] * rules.score}
    return replace(rollout, payload={**rollout.payload, "scores": scores}).with_rewards(**rewards)
