"""Means that could make Tango cheaper or better, each an arm of its own (results: docs/experiments/last_letter.md).

Further problems in place of those without signal, a verifier that is trained on solutions which it has judged already,
and verdicts that count by how often the verifier was correct. They hold nothing in checkpoints: a run that is resumed
begins without what they remember.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.dynamic_sampling import DynamicSampling, Group, Metrics, draw_groups, solve_groups
from megatron_rl.recipes.review import Judged
from megatron_rl.recipes.solutions import VERIFIER, Solution, Then, pass_over
from megatron_rl.recipes.tango import Tango
from megatron_rl.training.iteration import CreditContext, Iteration, PromptSource, RolloutContext, RolloutsByRole
from megatron_rl.types import Prompt, Rollout


class Given:
    """A source that gives these problems first."""

    def __init__(self, prompts: Sequence[Prompt], source: PromptSource) -> None:
        self._prompts: list[Prompt] | None = list(prompts)
        self._source = source

    @property
    def prompts_per_iteration(self) -> int:
        return self._source.prompts_per_iteration

    def take(self, count: int | None = None, fits: Callable[[Prompt], bool] = lambda prompt: True) -> list[Prompt]:
        prompts, self._prompts = self._prompts, None
        return self._source.take(count, fits) if prompts is None else prompts


@dataclass(kw_only=True)
class DynamicTango(Tango):
    """A run that trains as Tango does. Once nothing is verified, further problems are taken in place of those whose
    outcomes are all alike (DAPO, arXiv 2503.14476); before that, all problems that nobody solved have verdicts."""

    rounds: int = 10  # of taking problems, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        self._source: PromptSource | None = None  # of a generator's iteration in which nothing is verified
        # share of all problems that such an iteration took, whose outcomes were all alike
        self._alike: float | None = None

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        self._source = source if iteration.role == self.solver and self._outcomes_suffice() else None
        self._alike = None
        return super().rollout(iteration, source, context)

    def draw(
        self, context: RolloutContext, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over
    ) -> tuple[Sequence[Solution], dict[str, float]]:
        if self._source is None:
            return super().draw(context, prompts, sampling, then)

        def draw_round(number: int, more: Sequence[Prompt]) -> tuple[list[Group], Metrics]:
            seed = context.seed_for(sampling.seed, "round", number) if number else sampling.seed
            return solve_groups(context, self.solver, more, replace(sampling, seed=seed))

        groups, metrics = draw_groups(Given(prompts, self._source), draw_round, DynamicSampling(rounds=self.rounds))
        self._alike = metrics["alike"]
        solutions = [solution for group in groups for solution in group.solutions]
        for place, solution in enumerate(solutions):
            then(place, solution)
        return solutions, metrics

    def _share_with_signal(self, solutions: Sequence[Rollout]) -> float:
        return super()._share_with_signal(solutions) if self._alike is None else 1 - self._alike


@dataclass(kw_only=True)
class ReusingTango(Tango):
    """A run that trains as Tango does. The verifier's iteration is about solutions of the generator's last iteration
    that were verified there, one of each problem. As these are of problems that nobody solved, the verifier is then
    trained on wrong solutions alone. Where none was verified, solutions are drawn for the iteration, as in Tango."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last: list[Solution] = []
        self._reuses = False

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        self._reuses = iteration.role != self.solver and bool(self._last)
        try:
            return super().rollout(iteration, Given([], source) if self._reuses else source, context)
        finally:
            self._reuses = False

    def draw(
        self, context: RolloutContext, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over
    ) -> tuple[Sequence[Solution], dict[str, float]]:
        if not self._reuses:
            return super().draw(context, prompts, sampling, then)
        for place, solution in enumerate(self._last):
            then(place, solution)
        return self._last, {"tokens_drawn": 0.0}

    def verified(self, context: RolloutContext, solutions: Sequence[Solution], judged: Judged) -> list[Rollout]:
        pairs = reversed([*zip(solutions, judged, strict=True)])
        self._last = [*{s.rollout.group: s for s, own in pairs if own}.values()]
        return super().verified(context, solutions, judged)


@dataclass(kw_only=True)
class TrustedTango(Tango):
    """A run that trains as Tango does, with alpha times 2 b - 1, where b is the balanced accuracy of the verifier's
    final verdicts so far. Correct and wrong solutions begin with two verdicts each, one of which was correct."""

    def __post_init__(self) -> None:
        self._right, self._said = {True: 1, False: 1}, {True: 2, False: 2}  # by the outcome of the solution
        super().__post_init__()

    @property
    def trust(self) -> float:
        """2 b - 1, or 0 where that is negative."""
        return max(0.0, sum(self._right[outcome] / self._said[outcome] for outcome in (True, False)) - 1)

    def verified(self, context: RolloutContext, solutions: Sequence[Solution], judged: Judged) -> list[Rollout]:
        for verification in (v for own in judged for v in own):
            self._count(verification.item.correct, verification.opinion.agrees)
        context.add_metrics(self.solver, {"trust": self.trust})
        return super().verified(context, solutions, judged)

    def _credit_reviews(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        for rollout, label in zip(rollouts[VERIFIER], context.handed_over.get("labels", ()), strict=True):
            self._count(label, bool(rollout.rewards["agrees"]))
        return super()._credit_reviews(iteration, rollouts, context)

    def _count(self, correct: bool, agrees: bool) -> None:
        self._right[correct] += agrees
        self._said[correct] += 1

    def _alpha(self, update: int) -> float:
        return super()._alpha(update) * self.trust
