"""Tango (arXiv 2505.15034): a generator and a generative verifier trained by turns, each on the other's current answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_rl.algorithms.advantages import Estimator, assign_advantages, step_rewards
from megatron_rl.algorithms.class_weights import ClassCounts
from megatron_rl.algorithms.schedules import Schedule, step_weight
from megatron_rl.config.plugins import find
from megatron_rl.config.schema import ConfigError
from megatron_rl.recipes import held_out
from megatron_rl.recipes.base import Solution, accuracies, at_least, check_groups, solution_metrics, solve
from megatron_rl.recipes.review import Reviewed, Reviewer, StepLabels, review_metrics
from megatron_rl.text import fill, read_template
from megatron_rl.training.rollouts import measure, plain, without_signal
from megatron_rl.training.turns import Played, Players, Turn
from megatron_rl.types import Prompt, Trajectory

GENERATOR, VERIFIER = "generator", "verifier"


@dataclass(kw_only=True)
class Tango:
    """Steps: warm-up of the verifier alone, then cycles of generator turns and verifier turns.

    A frozen player (train_... false) still plays; the other keeps the turns it would have had, but a warm-up for a frozen verifier.
    """

    generator_updates: int = 300  # of the run
    warmup_updates: int = 40  # of the verifier, before the first cycle
    generator_turns: int = 3  # per cycle
    verifier_turns: int = 1  # per full cycle
    group_size: int = 5  # solutions per problem in a generator turn, each verified once
    verifications: int = 5  # of one solution per problem in a verifier turn
    alpha_start: float = 0.1  # weight of the step advantages at the first generator update
    alpha_min: float = 1e-3
    alpha_schedule: Schedule = "exponential"
    estimator: Estimator = "grpo"
    format_weight: float = 0.8  # gamma, in the verifier's reward
    class_weight_decay: float = 0.8  # of the moving counts of right and wrong solutions
    train_generator: bool = True
    train_verifier: bool = True
    generator_template: str = "tango_generator"  # a text file with {question}, or the name of a packaged prompt
    verifier_template: str = "tango_verifier"  # with {question}, {solution}, {num_steps}
    step_labels: str | None = None  # module:name, (step texts, payload) -> gold labels; for measuring alone
    balanced_per_class: int = 128  # right and wrong solutions the verifier is evaluated on
    balanced_rounds: int = 8  # at most so many draws per held-out problem to find them

    def __post_init__(self) -> None:
        positive = ("generator_updates", "generator_turns", "balanced_per_class", "balanced_rounds")
        check_groups({"group_size": self.group_size, "verifications": self.verifications}, self.estimator)
        at_least({name: getattr(self, name) for name in positive}, 1)
        at_least({name: getattr(self, name) for name in ("warmup_updates", "verifier_turns")}, 0)
        if not (self.train_generator or self.train_verifier):
            raise ConfigError(
                "recipe.args: train_generator and train_verifier are both false; at least one player must learn"
            )
        if not 0.0 <= self.class_weight_decay < 1.0:
            raise ConfigError(
                f"recipe.args.class_weight_decay = {self.class_weight_decay}: it is at least 0 and below 1"
            )
        try:
            self._alpha(0)
            read_template(self.generator_template), read_template(self.verifier_template), self._labels()
        except (ValueError, FileNotFoundError) as error:
            raise ConfigError(f"recipe.args: {error}") from None
        if self.alpha_start > 1.0:
            raise ConfigError(f"recipe.args.alpha_start = {self.alpha_start}: it is a share, at most 1")
        self._counts = ClassCounts()
        self._balanced: list[dict[str, Any]] | None = None  # see held_out.solutions_to_json

    @property
    def roles(self) -> tuple[str, ...]:
        return (GENERATOR, VERIFIER)

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(name for name, on in ((GENERATOR, self.train_generator), (VERIFIER, self.train_verifier)) if on)

    @property
    def prompt_role(self) -> str:
        return GENERATOR

    @property
    def group_sizes(self) -> Mapping[str, int]:
        return {GENERATOR: self.group_size, VERIFIER: self.verifications}

    def drawn(self, role: str) -> Mapping[str, int]:
        """Samples per problem that each role draws in a turn of `role`, in order: for `megatron-rl plan`."""
        solutions = self.group_size if role == GENERATOR else 1
        return {GENERATOR: solutions, VERIFIER: solutions if role == GENERATOR else self.verifications}

    def num_steps(self) -> int:
        warmup = self.warmup_updates if self.train_verifier else 0
        full, rest = divmod(self.generator_updates, self.generator_turns)
        return warmup + full + (1 if rest and self.train_generator else 0)

    def turns(self, step: int) -> list[str]:
        """Whose turns a step holds. A last cycle cut by `generator_updates` has no verifier turn; 300 updates by 3 make 100."""
        cycle = step - self.warmup_updates if self.train_verifier else step
        if cycle < 0:
            return [VERIFIER]
        left = self.generator_updates - cycle * self.generator_turns
        own = min(max(left, 0), self.generator_turns)
        others = self.verifier_turns if left >= self.generator_turns else 0
        return [GENERATOR] * (own if self.train_generator else 0) + [VERIFIER] * (others if self.train_verifier else 0)

    def generator_prompt(self, payload: Mapping[str, Any]) -> str:
        return fill(read_template(self.generator_template), question=str(payload["question"]))

    def play(self, turn: Turn, prompts: Sequence[Prompt], players: Players) -> Played:
        """[P] problems -> a generator turn's [P * group_size] solutions, or a verifier turn's [P * verifications] verifications."""
        return (
            self._generator_turn(turn, prompts, players)
            if turn.role == GENERATOR
            else self._verifier_turn(turn, prompts, players)
        )

    def evaluate(self, prompts: Sequence[Prompt], players: Players, seed: int) -> dict[str, float]:
        """Both players on held-out problems: base.accuracies, and held_out.judge on a set that the first call draws and the state keeps."""
        figures, solutions = accuracies(players, GENERATOR, prompts, seed)
        if self._balanced is None:
            rounds = self._rounds(solutions, prompts, players, seed)
            chosen = held_out.balanced_set(
                rounds, lambda s: self._reviewer().prompt(players, s) is not None, self.balanced_per_class
            )
            self._balanced = held_out.solutions_to_json(chosen)
        fixed = held_out.solutions_from_json(self._balanced, prompts, players.tokenizers[GENERATOR])
        return figures | held_out.judge(players, self._reviewer(), fixed, self._labels(), seed)

    def state_dict(self) -> dict[str, Any]:
        return {"right": self._counts.right, "wrong": self._counts.wrong, "balanced": self._balanced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts, self._balanced = ClassCounts(state["right"], state["wrong"]), state["balanced"]

    def _generator_turn(self, turn: Turn, prompts: Sequence[Prompt], players: Players) -> Played:
        """Outcome and step advantages, mixed by alpha. A solution whose verdicts do not match its steps keeps its outcome alone."""
        solutions, judged = self._solve_and_review(turn, prompts, players, n=self.group_size, verifications=1)
        marked = [_marked(solution, one) for solution, one in zip(solutions, judged, strict=True)]
        alpha = self._alpha(turn.update)
        trajectories = assign_advantages(marked, reward="outcome", estimator=self.estimator, alpha=alpha)
        metrics = measure(trajectories) | {
            "alpha": alpha,
            "groups_without_signal": without_signal(trajectories, "outcome"),
        }
        return Played(trajectories=trajectories, metrics=metrics | self._shared_metrics(solutions, judged))

    def _verifier_turn(self, turn: Turn, prompts: Sequence[Prompt], players: Players) -> Played:
        """Verifications of one solution are a group; class weights keep the rarer outcome from being ignored (eq. 9)."""
        solutions, judged = self._solve_and_review(
            turn, prompts, players, n=1, verifications=self.verifications, ungraded=False
        )
        rows = [r for group in judged for r in group]
        labels = [bool(r.solution.correct) for r in rows]
        metrics = {"reward/outcome": fmean(s.trajectory.rewards["outcome"] for s in solutions) if solutions else 0.0}
        metrics |= self._shared_metrics(solutions, judged)
        if not rows:
            return Played(trajectories=[], metrics=metrics)
        self._counts = self._counts.updated(labels, self.class_weight_decay)
        weights = self._counts.weights(labels)
        trajectories = assign_advantages(
            [r.trajectory for r in rows], reward="verifier", estimator=self.estimator, weights=weights
        )
        metrics |= measure(trajectories) | {"groups_without_signal": without_signal(trajectories, "verifier")}
        return Played(trajectories=trajectories, metrics=metrics)

    def _alpha(self, update: int) -> float:
        return step_weight(
            self.alpha_schedule, update, start=self.alpha_start, floor=self.alpha_min, total=self.generator_updates
        )

    def _solve_and_review(
        self, turn: Turn, prompts: Sequence[Prompt], players: Players, *, n: int, verifications: int, ungraded: bool = True
    ) -> tuple[list[Solution], list[list[Reviewed]]]:  # fmt: skip
        """[P * n] solutions, and the verifications of each that has some coming (with `ungraded` false only of graded ones), in order."""
        own, others = (
            replace(
                players.samplings[role], n=count, seed=players.seed_for(turn.number, role), logprobs=role == turn.role
            )
            for role, count in ((GENERATOR, n), (VERIFIER, verifications))
        )
        reviews = self._reviewer().begin(players, others)

        def then(place: int, solution: Solution) -> None:
            if ungraded or solution.correct is not None:
                reviews.add(place, solution)

        solutions = solve(players, GENERATOR, prompts, own, then)
        return solutions, [group for _, group in sorted(reviews.finish().items())]

    def _reviewer(self) -> Reviewer:
        return Reviewer(role=VERIFIER, template=read_template(self.verifier_template), gamma=self.format_weight)

    def _shared_metrics(self, solutions: Sequence[Solution], judged: Sequence[Sequence[Reviewed]]) -> dict[str, float]:
        rows = [r for group in judged for r in group]
        dropped = {"reviews_dropped": float(sum(not group for group in judged))}
        return solution_metrics(solutions) | dropped | review_metrics(rows, self._labels())

    def _labels(self) -> StepLabels | None:
        return None if self.step_labels is None else find(self.step_labels)

    def _rounds(
        self, first: list[Solution], prompts: Sequence[Prompt], players: Players, seed: int
    ) -> Iterator[list[Solution]]:
        """The solutions at hand, then further draws for the same problems."""
        yield first
        for number in range(1, self.balanced_rounds):
            again = plain(players.samplings[GENERATOR], seed=players.seed_for("balanced", seed, number))
            yield solve(players, GENERATOR, prompts, again)


def _marked(solution: Solution, judged: Sequence[Reviewed]) -> Trajectory:
    """The solution with its one verification's verdicts, text and step rewards; unchanged when there is none."""
    if not judged:
        return solution.trajectory
    [one] = judged
    t, verdicts = solution.trajectory, list(one.review.verdicts)
    payload = {**t.payload, "verdicts": verdicts, "review": one.text}
    return replace(t, payload=payload, step_rewards=step_rewards(verdicts, len(t.steps)))
