"""A proposer and a solver play with questions whose answers can be checked: no judge, and no labelled problems."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.algorithms.estimators import UNGROUPED, find_estimator
from megatron_rl.algorithms.role_credit import RoleBaselines, compare_peers
from megatron_rl.config.schema import ConfigError
from megatron_rl.contrib.clusters import cluster_shares
from megatron_rl.contrib.judged import put, quoted
from megatron_rl.contrib.proposals import Aim, AnswerRule, aimed, read_proposal
from megatron_rl.contrib.voting import solve_by_vote
from megatron_rl.recipes.solutions import accuracies_of_fitting, check_arguments, question_text, sampling_for, solve
from megatron_rl.text import decode_all, fill, read_template
from megatron_rl.training.iteration import Iteration, PromptSource, Recipe, RecipeRole, RolloutContext, Schedule
from megatron_rl.training.rollouts import sample
from megatron_rl.types import Prompt, Rollout

PROPOSER, SOLVER = "proposer", "solver"


@dataclass(kw_only=True)
class SelfPlay(Recipe):
    """A run that trains a proposer and a solver, which have models of their own or share one.

    The proposer turns a task of the data set into a question with an answer. A question without an answer, or whose
    answer the rule refuses, earns `unparseable` and is not played. The solver answers the others; the run's reward
    function compares its answers with the proposed one, and its accuracy decides what the proposer earns.
    """

    needs_shares = True  # an answer that nobody gave counts as 0
    # iterations that train both roles; or rounds, each with the iterations of one role and then of the other
    updates: int
    proposer_iterations: int = 0  # of a round, in which the solver's model stays as it is; 0 and 0: no rounds
    solver_iterations: int = 0  # of a round, each with one proposal of a task
    proposals: int = 4  # of each task
    answers: int = 5  # of the solver to each question
    aim: Aim = "hard"
    unparseable: float = 0.0  # the proposer's reward for what cannot be played
    # above 0: minus the share of the iteration's questions that are nearer in BLEU (R-Zero)
    cluster_distance: float = 0.0
    key: Literal["proposed", "majority"] = "proposed"  # the answer taken for correct: the proposed one, or the solver's
    least_accuracy: float = 0.0  # of a question that the solver learns from
    most_accuracy: float = 1.0  # of a question that the solver learns from
    # module:name of a reward function, (proposed answer, the task's payload with the proposed "question") -> a score,
    # above 0.5 for a correct answer; 0 also for what it cannot read, as failures above reward.max_failure_share stop it
    rule: str | None = None
    rule_workers: int = 2  # processes that run it
    # hierarchical: minus the mean over the proposals of the same task, 0 for one that is alone (prime-rl). ema: minus a
    # moving average of the proposer's rewards (SPIRAL, arXiv 2506.24119). Else an estimator over the proposals of a
    # task; Search Self-Play has one proposal, whose advantage is its reward: reinforce.
    proposer_estimator: str = "hierarchical"
    ema_decay: float = 0.95
    estimator: str = "grpo"  # of the solver, over the answers to one question
    proposer_template: str = "self_play_proposer"  # a text file with {question}, or the name of a packaged prompt
    solver_template: str = "boxed_answer"  # with {question}

    def __post_init__(self) -> None:
        check_arguments(
            self, groups=["answers"], shares=["ema_decay", "cluster_distance", "least_accuracy", "most_accuracy"],
            positive=["updates", "proposals", "rule_workers"], natural=["proposer_iterations", "solver_iterations"],
            templates={"proposer_template": [], "solver_template": ["question"]},  # a proposer may need no material
        )  # fmt: skip
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
        if self.ema_decay == 1.0:
            raise ConfigError("recipe.args.ema_decay = 1.0: the average would never move; give less than 1")
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
            # A proposal that could not be graded, or none of whose answers could, is compared with no other.
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
        """Measures the solver, on the problems that are not too long for it; solver/too_long counts the others."""
        own = [put(context, SOLVER, question_text(self.solver_template, prompt.payload)) for prompt in prompts]
        return accuracies_of_fitting(context, SOLVER, prompts, own)

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self._baselines.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._baselines = RoleBaselines(state["baselines"])

    def _ask(self, context: RolloutContext, number: int, payload: Mapping[str, Any]) -> Prompt | None:
        """Puts a question to the solver, with the proposed answer for the grader; None where it is too long."""
        prompt = put(context, SOLVER, question_text(self.solver_template, quoted(context, SOLVER, payload)))
        return None if prompt is None else replace(prompt, id=str(number), payload=payload)

    def _alike(self, context: RolloutContext, questions: Sequence[str]) -> list[float]:
        """Returns the share of each question's cluster, which its proposer pays; an empty text is a cluster of one."""
        if not self.cluster_distance:
            return [0.0] * len(questions)
        shares = cluster_shares(questions, self.cluster_distance)
        context.add_metrics(PROPOSER, {"cluster_share": fmean(shares)})
        return shares

    def _compared(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Gives proposals their advantages. The moving average is used before a reward moves it."""
        if self.proposer_estimator == "hierarchical":
            return compare_peers(rollouts, [rollout.group for rollout in rollouts], "total")
        if self.proposer_estimator == "ema":
            credited, self._baselines = self._baselines.credit(rollouts, "total", decay=self.ema_decay)
            return credited
        return assign_advantages(rollouts, reward="total", estimator=self.proposer_estimator)


def _place(rollout: Rollout) -> int:
    """Returns the number of the proposal that an answer is to; it is the question's id, behind its place."""
    return int(rollout.group.partition(":")[2])
