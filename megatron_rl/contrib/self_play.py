"""Self-play of a proposer and a solver on questions with checkable answers, without a judge or labelled problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megatron_rl.algorithms.advantages import EstimatorName, assign_advantages
from megatron_rl.algorithms.estimators import UNGROUPED, find_estimator
from megatron_rl.algorithms.role_credit import RoleBaselines, compare_peers
from megatron_rl.config.base import Count, CountOrZero, Decay, Share
from megatron_rl.config.schema import ConfigError
from megatron_rl.contrib.clusters import cluster_shares
from megatron_rl.contrib.judged import put, quoted
from megatron_rl.contrib.proposals import Aim, AnswerRule, aimed, read_proposal
from megatron_rl.recipes.answers import accuracies_of_fitting
from megatron_rl.recipes.solutions import check_arguments, question_text, sampling_for, solve
from megatron_rl.texts.text import decode_all, fill, read_template
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

PROPOSER, SOLVER = "proposer", "solver"


@dataclass(kw_only=True)
class SelfPlay(Recipe):
    """A recipe that trains a proposer and a solver, with separate models or a shared one.

    The proposer converts a task of the data set to a question with an answer. A question without an answer, or whose
    answer the function `rule` rejects, gets the reward `unparseable` and is not given to the solver. The solver answers
    the other questions. The run's reward function compares the solver's answers with the proposed answer, and the
    solver's accuracy determines the proposer's reward.
    """

    needs_shares = True  # rewards must be in [0, 1], because a missing answer gets 0, which must be the lowest reward
    # Number of iterations, each of which trains both roles.
    # If `proposer_iterations` is above 0: number of rounds, each with first proposer and then solver iterations.
    updates: Count
    # Number of proposer iterations per round. They do not train the solver.
    # If this setting and solver_iterations are both 0, there are no rounds.
    proposer_iterations: CountOrZero = 0
    solver_iterations: CountOrZero = 0  # number of solver iterations per round, each with one proposal per task
    proposals: Count = 4  # proposals per task
    answers: Count = 5  # solver answers per question
    aim: Aim = "hard"
    unparseable: float = 0.0  # the proposer's reward for a proposal that cannot be given to the solver
    # If above 0: BLEU distance below which questions are in one cluster.
    # The share of questions in a question's cluster is subtracted from the reward of the question (R-Zero).
    cluster_distance: Share = 0.0
    # which answer counts as correct: the proposer's, or the solver's most frequent one
    key: Literal["proposed", "majority"] = "proposed"
    least_accuracy: Share = 0.0  # minimum accuracy of a question that the solver is trained on
    most_accuracy: Share = 1.0  # maximum accuracy of a question that the solver is trained on
    # module:name of a reward function (proposed answer, payload of the task with the proposed "question") -> score.
    # A score above 0.5 means a correct answer. For an unreadable answer, return 0: too many errors stop the run.
    rule: str | None = None
    rule_workers: Count = 2  # number of worker processes for `rule`
    # Advantage of a proposal:
    # "hierarchical": reward minus the mean over the task's proposals, 0 for a single proposal (prime-rl).
    # "ema": reward minus a moving average of the proposer's rewards (SPIRAL, arXiv 2506.24119).
    # Any other value is the name of an estimator, which compares the proposals of a task.
    # Search Self-Play uses "reinforce" with one proposal per task: the advantage is the reward.
    proposer_estimator: str = "hierarchical"
    ema_decay: Decay = 0.95
    estimator: EstimatorName = (
        "grpo"  # advantage estimator for the solver; a group is the set of answers to one question
    )
    proposer_template: str = "self_play_proposer"  # text file that may contain {question}, or name of a packaged prompt
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

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        count = self.proposals if PROPOSER in iteration.roles else 1
        proposed = sample(context, PROPOSER, source.take(), sampling_for(context, iteration, PROPOSER, count))
        texts = decode_all(context.tokenizers[PROPOSER], [rollout.response for rollout in proposed])
        pairs = {i: pair for i, text in enumerate(texts) if (pair := read_proposal(text))}
        payloads = {i: {**proposed[i].payload, "question": question} for i, (question, _) in pairs.items()}
        checked = self._rule.correct(
            {i: answer for i, (_, answer) in pairs.items()}, payloads, context.max_failure_share
        )
        solver_prompts = {i: self._ask(context, i, {**payloads[i], "answer": pairs[i][1]}) for i in pairs if checked[i]}
        prompts = {i: prompt for i, prompt in solver_prompts.items() if prompt is not None}
        sampling = sampling_for(context, iteration, SOLVER, self.answers)
        solved, metrics = solve(context, SOLVER, list(prompts.values()), sampling, voted=self.key == "majority")
        correct: dict[int, list[bool]] = defaultdict(list)
        for solution in solved:
            correct[_place(solution.rollout)].append(solution.correct)
        accuracy = {i: fmean(flags) for i, flags in correct.items()}
        teaching = {i for i, share in accuracy.items() if self.least_accuracy <= share <= self.most_accuracy}
        counts = {"questions": len(pairs), "correct": sum(map(bool, checked.values())), "played": len(accuracy)}
        counts |= {"unchecked": unchecked} if (unchecked := sum(flag is None for flag in checked.values())) else {}
        context.add_metrics(PROPOSER, {name: float(number) for name, number in counts.items()})
        context.add_metrics(SOLVER, metrics | {"learned_from": float(len(teaching))})
        learned: dict[str, list[Rollout]] = {}
        if PROPOSER in iteration.roles:
            # a proposal is left out if its answer could not be checked, or no answer of the solver could be graded
            unplayed = {i for i in range(len(proposed)) if i not in prompts and checked.get(i, False) is not None}
            earned = dict.fromkeys(unplayed, self.unparseable) | {i: aimed(self.aim, a) for i, a in accuracy.items()}
            alike = self._alike(context, [pairs.get(i, ("", ""))[0] for i in range(len(proposed))])
            rewarded = [proposed[i].with_rewards(total=earned[i] - alike[i]) for i in sorted(earned)]
            learned[PROPOSER] = rewarded
        if SOLVER in iteration.roles:
            learned[SOLVER] = [s.rollout for s in solved if _place(s.rollout) in teaching]
            if self.rule is None:  # agreement with an answer that the proposer wrote is no accuracy
                learned[SOLVER] = [replace(r, payload={**r.payload, "correct": None}) for r in learned[SOLVER]]
        return learned

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        of_solver = {role: group for role, group in rollouts.items() if role == SOLVER}
        credited = super().credit(iteration, of_solver, context)
        return {role: self._compared(group) if role == PROPOSER else credited[role] for role, group in rollouts.items()}

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Evaluates the solver on the problems whose prompt is not too long. The metric solver/too_long is the number
        of problems whose prompt is too long.
        """
        encoded = [put(context, SOLVER, question_text(self.solver_template, prompt.payload)) for prompt in prompts]
        return accuracies_of_fitting(context, SOLVER, prompts, encoded)

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
        """Returns, for each question, the share of all questions that are in the question's cluster, or 0 if
        `cluster_distance` is 0. This share is subtracted from the proposer's reward. Each empty text has a separate
        cluster.
        """
        if not self.cluster_distance:
            return [0.0] * len(questions)
        shares = cluster_shares(questions, self.cluster_distance)
        context.add_metrics(PROPOSER, {"cluster_share": fmean(shares)})
        return shares

    def _compared(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Assigns advantages to proposals as `proposer_estimator` determines. With "ema", the advantage is the reward
        minus the moving average; the average is updated with this reward only afterwards.
        """
        if self.proposer_estimator == "hierarchical":
            return compare_peers(rollouts, [rollout.group for rollout in rollouts], "total")
        if self.proposer_estimator == "ema":
            credited, self._baselines = self._baselines.credit(rollouts, "total", decay=self.ema_decay)
            return credited
        return assign_advantages(rollouts, reward="total", estimator=self.proposer_estimator)


def _place(rollout: Rollout) -> int:
    """Returns the index of the proposal that an answer of the solver belongs to. The index is the id of the question,
    which is the second part of the group name.
    """
    return int(rollout.group.partition(":")[2])
