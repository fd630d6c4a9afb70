"""A proposer and a solver play with questions whose answers can be checked: no judge, and no labelled problems."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.algorithms.estimators import find_estimator
from megatron_rl.config.plugins import find
from megatron_rl.config.schema import ConfigError, Reward
from megatron_rl.recipes.base import RIGHT, accuracies, check_arguments, question_text, sampling_for, solve
from megatron_rl.recipes.judged import put
from megatron_rl.rewards.pool import GradePool, check_failures
from megatron_rl.rewards.role_tags import last_inside
from megatron_rl.text import decode_all
from megatron_rl.training.rollouts import sample
from megatron_rl.training.turns import Part, Recipe, Schedule, Source, Table, Turn
from megatron_rl.types import Outcome, Prompt, Rollout

PROPOSER, SOLVER = "proposer", "solver"
Aim = Literal["hard", "middle", "even"]


def aimed(aim: Aim, accuracy: float) -> float:
    """Returns what a proposer earns for a question that the solver answers with this accuracy.

    hard: 1 - a, and middle: 4 a (1 - a), both of Search Self-Play (arXiv 2510.18821); even: min(a, 1 - a), of R-Zero.
    """
    hard = 1.0 - accuracy
    return {"hard": hard, "middle": 4.0 * accuracy * hard, "even": min(accuracy, hard)}[aim]


@dataclass(kw_only=True)
class SelfPlay(Recipe):
    """A run whose every turn trains a proposer and a solver, which have models of their own or share one.

    The proposer turns a task of the data set into a question with an answer. A question without an answer, or whose
    answer the rule refuses, earns `unparseable` and is not played. The solver answers the others; the run's reward
    function compares its answers with the proposed one, and its accuracy decides what the proposer earns.
    """

    updates: int  # of the run
    proposals: int = 4  # of each task
    answers: int = 5  # of the solver to each question
    aim: Aim = "hard"
    unparseable: float = 0.0  # the proposer's reward for what cannot be played
    # module:name of a reward function, (proposed answer, {"question": ...}) -> a score, above 0.5 for a right answer; 0
    # also where it cannot read what a model wrote, as failures above reward.max_failure_share stop the run
    rule: str | None = None
    rule_workers: int = 2  # processes that run it, started anew in every turn
    # hierarchical: minus the mean over the proposals of the same task, 0 for one that is alone (prime-rl's
    # hierarchical_grpo). ema: minus a moving average of the proposer's rewards (SPIRAL, arXiv 2506.24119). Else an
    # estimator over the proposals of a task; Search Self-Play has grpo with one proposal, which is then alone.
    proposer_estimator: str = "hierarchical"
    ema_decay: float = 0.95
    estimator: str = "grpo"  # of the solver, over the answers to one question
    proposer_template: str = "self_play_proposer"  # a text file with {question}, or the name of a packaged prompt
    solver_template: str = "boxed_answer"  # with {question}

    def __post_init__(self) -> None:
        check_arguments(
            self, groups=["answers"], positive=["updates", "proposals", "rule_workers"], shares=["ema_decay"],
            templates=["proposer_template", "solver_template"],
        )  # fmt: skip
        if self.proposer_estimator == "hierarchical" and self.proposals < 2:
            raise ConfigError(
                f"recipe.args.proposals = {self.proposals}: hierarchical compares the proposals of one task; give at "
                "least 2, or recipe.args.proposer_estimator: ema"
            )
        if self.proposer_estimator not in ("hierarchical", "ema"):
            find_estimator(self.proposer_estimator)
        if self.rule is not None:
            find(self.rule)
        self._baseline = 0.0  # moving average of the proposer's rewards

    def roles(self) -> Mapping[str, Part]:
        drawn = {PROPOSER: self.proposals, SOLVER: self.proposals * self.answers}
        return {role: Part(samples=samples, drawn=drawn) for role, samples in drawn.items()}

    def schedule(self) -> Schedule:
        return [[(PROPOSER, SOLVER)]] * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return question_text(self.proposer_template, payload)

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        proposed = sample(table, PROPOSER, source.take(), sampling_for(table, turn, PROPOSER, self.proposals))
        texts = decode_all(table.tokenizers[PROPOSER], [rollout.response for rollout in proposed])
        found = {i: (last_inside(text, "question"), last_inside(text, "answer")) for i, text in enumerate(texts)}
        whole = {i: (question, answer) for i, (question, answer) in found.items() if question and answer}
        right = self._right(table, whole)
        asked = {i: self._ask(table, i, proposed[i], *pair) for i, pair in whole.items() if right[i]}
        prompts = {i: prompt for i, prompt in asked.items() if prompt is not None}
        sampling = sampling_for(table, turn, SOLVER, self.answers)
        solved, figures = solve(table, SOLVER, list(prompts.values()), sampling)
        correct: dict[int, list[bool]] = defaultdict(list)
        for solution in solved:
            correct[int(solution.rollout.group.partition(":")[2])].append(solution.correct)  # behind the place: the id
        accuracy = {i: fmean(own) for i, own in correct.items()}
        # A proposal that could not be graded, or none of whose answers could, is compared with no other.
        unplayed = {i for i in range(len(proposed)) if i not in prompts and right.get(i, False) is not None}
        earned = {i: aimed(self.aim, own) for i, own in accuracy.items()} | dict.fromkeys(unplayed, self.unparseable)
        rewarded = [proposed[i].with_rewards(total=earned[i]) for i in sorted(earned)]
        played = {"questions": len(whole), "right": sum(map(bool, right.values())), "played": len(accuracy)}
        table.note(PROPOSER, {name: float(number) for name, number in played.items()})
        table.note(SOLVER, figures)
        return {
            PROPOSER: self._compared(rewarded),
            SOLVER: assign_advantages([s.rollout for s in solved], reward="outcome", estimator=self.estimator),
        }

    def evaluate(self, prompts: Sequence[Prompt], table: Table) -> dict[str, float]:
        """Measures the solver, on the problems that are not too long for it."""
        own = [put(table, SOLVER, question_text(self.solver_template, prompt.payload)) for prompt in prompts]
        fitting = [replace(p, tokens=o.tokens) for p, o in zip(prompts, own, strict=True) if o is not None]
        return accuracies(table, SOLVER, fitting)[0] if fitting else {}

    def state_dict(self) -> dict[str, Any]:
        return {"baseline": self._baseline}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._baseline = float(state["baseline"])

    def _ask(self, table: Table, number: int, proposal: Rollout, question: str, answer: str) -> Prompt | None:
        """Puts a question to the solver, with the proposed answer for the grader; None where it is too long."""
        payload = {**proposal.payload, "question": question, "answer": answer}
        prompt = put(table, SOLVER, question_text(self.solver_template, payload))
        return None if prompt is None else replace(prompt, id=str(number), payload=payload)

    def _right(self, table: Table, proposals: Mapping[int, tuple[str, str]]) -> dict[int, bool | None]:
        """Tells which proposed answers the rule accepts; None for one that it could not grade. All without a rule."""
        if self.rule is None or not proposals:
            return dict.fromkeys(proposals, True)
        with GradePool(Reward(target=self.rule, workers=self.rule_workers)) as pool:
            answers, payloads = [a for _, a in proposals.values()], [{"question": q} for q, _ in proposals.values()]
            graded = pool.grade(answers, payloads)
        check_failures(graded, table.max_failure_share)
        known = [one.score > RIGHT if one.outcome is Outcome.SCORE else None for one in graded]
        return dict(zip(proposals, known, strict=True))

    def _compared(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Gives proposals their advantages. The moving average is used before a reward moves it."""
        if self.proposer_estimator not in ("hierarchical", "ema"):
            return assign_advantages(rollouts, reward="total", estimator=self.proposer_estimator)
        if self.proposer_estimator == "hierarchical":
            sizes = Counter(rollout.group for rollout in rollouts)
            compared = assign_advantages(rollouts, reward="total", estimator="dr_grpo")
            return [r if sizes[r.group] > 1 else replace(r, advantages=0.0) for r in compared]
        out = []
        for rollout in rollouts:
            reward = rollout.rewards["total"]
            out.append(replace(rollout, advantages=reward - self._baseline))
            self._baseline = self.ema_decay * self._baseline + (1.0 - self.ema_decay) * reward
        return out
