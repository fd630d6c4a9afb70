"""Self-play of a proposer and a solver on questions with checkable answers, without a judge or labelled problems."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.algorithms.estimators import UNGROUPED, find_estimator
from megatron_rl.algorithms.role_credit import RoleBaselines, compare_peers
from megatron_rl.config.base import Count, CountOrZero, Decay, Share
from megatron_rl.config.plugins import find_function
from megatron_rl.config.schema import ConfigError, Reward
from megatron_rl.contrib.clusters import cluster_shares
from megatron_rl.contrib.judged import put, quoted
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.solutions import (
    Solution,
    accuracies_of_fitting,
    check_arguments,
    question_text,
    sampling_for,
    solve,
)
from megatron_rl.rewards.grading_pool import Graded, GradePool, check_failures
from megatron_rl.rewards.role_tags import last_inside
from megatron_rl.rewards.tags import boxed
from megatron_rl.text import decode_all, fill, read_template
from megatron_rl.training.iteration import Iteration, PromptSource, Recipe, RecipeRole, RolloutContext, Schedule
from megatron_rl.training.rollouts import sample
from megatron_rl.types import Outcome, Prompt, Rollout

Aim = Literal["hard", "middle", "even"]


def aimed(aim: Aim, accuracy: float) -> float:
    """Returns the proposer's reward for a question that the solver answers with accuracy a.

    `aim`: the formula. "hard" means 1 - a and "middle" means 4 a (1 - a), both from Search Self-Play (arXiv
        2510.18821). "even" means min(a, 1 - a), from R-Zero (arXiv 2508.05004).
    """
    hard = 1.0 - accuracy
    return {"hard": hard, "middle": 4.0 * accuracy * hard, "even": min(accuracy, hard)}[aim]


def read_proposal(text: str) -> tuple[str, str] | None:
    """Returns the last question and the last answer of a proposal, or None if one of them is missing."""
    question, answer = last_inside(text, "question"), last_inside(text, "answer")
    return (question, answer) if question and answer else None


class AnswerRule:
    """A user-defined function that checks whether a proposer's answers are correct. It runs in worker processes, which
    exist as long as the AnswerRule.
    """

    def __init__(self, target: str | None, workers: int) -> None:
        """Creates the pool of worker processes. `target`: module:name of a reward function; if None, every answer
        counts as correct. Raises ConfigError if the function cannot be imported.
        """
        self._pool: GradePool | None = None
        if target is not None:
            find_function(target)
            self._pool = GradePool(Reward(target=target, workers=workers))
            weakref.finalize(self, self._pool.close)

    def correct(
        self, answers: Mapping[int, str], payloads: Mapping[int, Mapping[str, Any]], max_failure_share: float
    ) -> dict[int, bool | None]:
        """Returns whether each answer is correct, or None for an answer that could not be graded. The mappings have the
        same keys. Raises RewardFailure if too many gradings fail.
        """
        if self._pool is None or not answers:
            return dict.fromkeys(answers, True)
        graded = self._pool.grade(list(answers.values()), [payloads[i] for i in answers])
        check_failures(graded, max_failure_share)
        known = [one.correct if one.outcome is Outcome.SCORE else None for one in graded]
        return dict(zip(answers, known, strict=True))


# grading of each sample of a problem for which no sample has an answer: the sample counts as wrong
UNANSWERED = Graded(Outcome.SCORE)


def solve_by_vote(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[list[Solution], dict[str, float]]:
    r"""Samples [P * n] answers, and grades the answers to a problem against the most frequent answer in \boxed{} (the
    earliest one if several are equally frequent), which replaces payload["answer"]. Returns the graded solutions in
    order, and the metrics graded/timeout and graded/error.

    R-Zero (arXiv 2508.05004) creates its labels in this way. R-Zero merges answers that its grader considers equal;
    this function counts answers as strings, and uses the grader only to compare with the most frequent answer. A sample
    without a score is left out of its group. Raises RewardFailure if too many gradings fail.
    """
    with context.watch("rollout"):
        rollouts = sample(context, role, prompts, sampling)
    texts = decode_all(context.tokenizers[role], [rollout.response for rollout in rollouts])
    winners = [elected(texts[i : i + sampling.n]) for i in range(0, len(texts), sampling.n)]
    keys = [winners[k // sampling.n] for k in range(len(texts))]
    payloads = [{**rollout.payload, "answer": key} for rollout, key in zip(rollouts, keys, strict=True)]
    known = [k for k, key in enumerate(keys) if key is not None]
    with context.watch("reward"):
        graded = context.grade([texts[k] for k in known], [payloads[k] for k in known])
    check_failures(graded, context.max_failure_share)
    results = dict.fromkeys(range(len(texts)), UNANSWERED) | dict(zip(known, graded, strict=True))
    solutions = []
    for k, result in results.items():
        if result.outcome is Outcome.SCORE:
            correct = result.correct
            payload = {**payloads[k], "correct": correct, "grading": result.outcome.value}
            rollout = replace(rollouts[k].with_rewards(**result.metrics, outcome=result.score), payload=payload)
            solutions.append(Solution(rollout=rollout, text=texts[k], correct=correct))
    failed = Counter(result.outcome for result in graded)
    return solutions, {f"graded/{kind.value}": float(failed[kind]) for kind in (Outcome.TIMEOUT, Outcome.ERROR)}


def elected(texts: Sequence[str]) -> str | None:
    r"""Returns the most frequent answer in the last \boxed{} of each text, or None if no text has one."""
    votes = Counter(answer for text in texts if (answer := boxed(text)))
    return votes.most_common(1)[0][0] if votes else None


PROPOSER, SOLVER = "proposer", "solver"


@dataclass(kw_only=True)
class SelfPlay(Recipe):
    """A recipe that trains a proposer and a solver, with separate models or a shared one.

    The proposer converts a task of the data set to a question with an answer. A question without an answer, or whose
    answer the function `rule` rejects, gets the reward `unparseable` and is not given to the solver. The solver answers
    the other questions. The run's reward function compares its answers with the proposed answer, and the solver's
    accuracy determines the proposer's reward.
    """

    needs_shares = True  # rewards must be from 0 to 1, because a missing answer has the reward 0
    # Number of iterations, each of which trains both roles.
    # With `proposer_iterations` and `solver_iterations`: number of rounds of proposer, then solver iterations.
    updates: Count
    # number of proposer iterations per round, in which the solver is unchanged; 0 for both settings: no rounds
    proposer_iterations: CountOrZero = 0
    solver_iterations: CountOrZero = 0  # number of solver iterations per round, each with one proposal per task
    proposals: Count = 4  # proposals per task
    answers: Count = 5  # solver answers per question
    aim: Aim = "hard"
    unparseable: float = 0.0  # the proposer's reward for proposals that cannot be played
    # If above 0: BLEU distance below which questions are in one cluster.
    # The share of questions in a question's cluster is subtracted from the reward of the question (R-Zero).
    cluster_distance: Share = 0.0
    # which answer counts as correct: the proposer's, or the solver's most frequent one
    key: Literal["proposed", "majority"] = "proposed"
    least_accuracy: Share = 0.0  # minimum accuracy of a question that the solver is trained on
    most_accuracy: Share = 1.0  # maximum accuracy of a question that the solver is trained on
    # module:name of a reward function (proposed answer, payload of the task with the proposed "question") -> score.
    # The score of a correct answer is above 0.5. It should be 0 for unreadable answers: too many errors stop the run.
    rule: str | None = None
    rule_workers: Count = 2  # number of worker processes for `rule`
    # Advantage of a proposal:
    # "hierarchical": reward minus the mean over the task's proposals, 0 for a single proposal (prime-rl).
    # "ema": reward minus a moving average of the proposer's rewards (SPIRAL, arXiv 2506.24119).
    # Any other value is the name of an estimator, which compares the proposals of a task.
    # Search Self-Play has one proposal per task, whose advantage is its reward: "reinforce".
    proposer_estimator: str = "hierarchical"
    ema_decay: Decay = 0.95
    estimator: str = "grpo"  # estimator for the solver, over the answers to one question
    proposer_template: str = "self_play_proposer"  # text file with {question}, or name of a packaged prompt
    solver_template: str = "boxed_answer"  # template with {question}

    def __post_init__(self) -> None:
        # the proposer's template need not contain {question}
        check_arguments(self, groups=["answers"], templates={"proposer_template": [], "solver_template": ["question"]})
        if (self.proposer_iterations > 0) != (self.solver_iterations > 0):
            raise ConfigError(
                f"recipe.args.proposer_iterations = {self.proposer_iterations}, solver_iterations = "
                f"{self.solver_iterations}: a round has iterations of both roles; give both at least 1, or both 0"
            )
        if self.proposer_estimator not in {"ema"} | UNGROUPED and self.proposals < 2:
            raise ConfigError(
                f"recipe.args.proposals = {self.proposals}: {self.proposer_estimator} compares the proposals of one "
                "task; give at least 2, or recipe.args.proposer_estimator: ema or reinforce"
            )
        if self.least_accuracy > self.most_accuracy:
            least, most = self.least_accuracy, self.most_accuracy
            raise ConfigError(f"recipe.args.least_accuracy = {least}: give at most most_accuracy, {most}")
        if self.proposer_estimator not in ("hierarchical", "ema"):
            find_estimator(self.proposer_estimator)
        self._baselines, self._rule = RoleBaselines(), AnswerRule(self.rule, self.rule_workers)

    def roles(self) -> Mapping[str, RecipeRole]:
        drawn = {PROPOSER: self.proposals, SOLVER: self.proposals * self.answers}
        alike = {PROPOSER: self.proposals, SOLVER: self.answers}
        if not self.proposer_iterations:
            return {role: RecipeRole(samples=samples, drawn=drawn, per_prompt=alike) for role, samples in drawn.items()}
        alone = RecipeRole(samples=self.answers, drawn={PROPOSER: 1, SOLVER: self.answers}, per_prompt=alike)
        return {PROPOSER: RecipeRole(samples=self.proposals, drawn=drawn, per_prompt=alike), SOLVER: alone}

    def schedule(self) -> Schedule:
        if not self.proposer_iterations:
            return [[(PROPOSER, SOLVER)]] * self.updates
        return ([[(PROPOSER,)]] * self.proposer_iterations + [[(SOLVER,)]] * self.solver_iterations) * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return fill(read_template(self.proposer_template), question=str(payload["question"]))

    def rollout(
        self, iteration: Iteration, source: PromptSource, context: RolloutContext
    ) -> Mapping[str, Sequence[Rollout]]:
        count = self.proposals if PROPOSER in iteration.roles else 1
        proposed = sample(context, PROPOSER, source.take(), sampling_for(context, iteration, PROPOSER, count))
        texts = decode_all(context.tokenizers[PROPOSER], [rollout.response for rollout in proposed])
        found = {i: pair for i, text in enumerate(texts) if (pair := read_proposal(text))}
        payloads = {i: {**proposed[i].payload, "question": question} for i, (question, _) in found.items()}
        checked = self._rule.correct(
            {i: answer for i, (_, answer) in found.items()}, payloads, context.max_failure_share
        )
        asked = {i: self._ask(context, i, {**payloads[i], "answer": found[i][1]}) for i in found if checked[i]}
        prompts = {i: prompt for i, prompt in asked.items() if prompt is not None}
        play = solve if self.key == "proposed" else solve_by_vote
        solved, metrics = play(
            context, SOLVER, list(prompts.values()), sampling_for(context, iteration, SOLVER, self.answers)
        )
        correct: dict[int, list[bool]] = defaultdict(list)
        for solution in solved:
            correct[_place(solution.rollout)].append(solution.correct)
        accuracy = {i: fmean(own) for i, own in correct.items()}
        teaching = {i for i, own in accuracy.items() if self.least_accuracy <= own <= self.most_accuracy}
        counts = {"questions": len(found), "correct": sum(map(bool, checked.values())), "played": len(accuracy)}
        context.add_metrics(PROPOSER, {name: float(number) for name, number in counts.items()})
        context.add_metrics(SOLVER, metrics | {"learned_from": float(len(teaching))})
        out: dict[str, list[Rollout]] = {}
        if PROPOSER in iteration.roles:
            # a proposal is left out if the check of its answer, or the grading of all the solver's answers, failed
            unplayed = {i for i in range(len(proposed)) if i not in prompts and checked.get(i, False) is not None}
            earned = dict.fromkeys(unplayed, self.unparseable) | {i: aimed(self.aim, a) for i, a in accuracy.items()}
            alike = self._alike(context, [found.get(i, ("", ""))[0] for i in range(len(proposed))])
            rewarded = [proposed[i].with_rewards(total=earned[i] - alike[i]) for i in sorted(earned)]
            out[PROPOSER] = self._compared(rewarded)
        if SOLVER in iteration.roles:
            learned = [s.rollout for s in solved if _place(s.rollout) in teaching]
            out[SOLVER] = assign_advantages(learned, reward="outcome", estimator=self.estimator)
        return out

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Evaluates the solver on the problems that fit into its prompt; solver/too_long is the number of
        problems that do not fit.
        """
        own = [put(context, SOLVER, question_text(self.solver_template, prompt.payload)) for prompt in prompts]
        return accuracies_of_fitting(context, SOLVER, prompts, own)

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self._baselines.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._baselines = RoleBaselines(state["baselines"])

    def _ask(self, context: RolloutContext, number: int, payload: Mapping[str, Any]) -> Prompt | None:
        """Converts a question to a prompt of the solver, with the proposed answer in the payload for the grader.
        Returns None if the prompt is too long.
        """
        prompt = put(context, SOLVER, question_text(self.solver_template, quoted(context, SOLVER, payload)))
        return None if prompt is None else replace(prompt, id=str(number), payload=payload)

    def _alike(self, context: RolloutContext, questions: Sequence[str]) -> list[float]:
        """Returns, for each question, the share of questions that are in its cluster. This share is subtracted from the
        proposer's reward. Each empty text has a separate cluster.
        """
        if not self.cluster_distance:
            return [0.0] * len(questions)
        shares = cluster_shares(questions, self.cluster_distance)
        context.add_metrics(PROPOSER, {"cluster_share": fmean(shares)})
        return shares

    def _compared(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Assigns advantages to proposals as `proposer_estimator` determines. With "ema", a reward is compared with the
        moving average before the average is updated with the reward.
        """
        if self.proposer_estimator == "hierarchical":
            return compare_peers(rollouts, [rollout.group for rollout in rollouts], "total")
        if self.proposer_estimator == "ema":
            credited, self._baselines = self._baselines.credit(rollouts, "total", decay=self.ema_decay)
            return credited
        return assign_advantages(rollouts, reward="total", estimator=self.proposer_estimator)


def _place(rollout: Rollout) -> int:
    """Returns the index of the proposal that an answer belongs to. The index is the question's id, the second part of
    the group name.
    """
    return int(rollout.group.partition(":")[2])
