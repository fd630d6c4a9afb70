"""Means that could make Tango cheaper or better, each an arm of its own (docs/last_letter.md has what they came to).

Further problems in place of those without signal, a verifier that is trained on solutions which it has judged already,
and verdicts that count by how often the verifier was right. They hold nothing in checkpoints: a run that is resumed
begins without what they remember.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.engines.base import Sampling
from megatron_rl.recipes.base import Solution, Then, pass_over
from megatron_rl.recipes.review import Judged
from megatron_rl.recipes.sampling import DynamicSampling, Figures, Group, draw_groups, solve_groups
from megatron_rl.recipes.tango import Tango
from megatron_rl.training.turns import Source, Table, Turn
from megatron_rl.types import Prompt, Rollout


class Given:
    """A source that gives these problems first."""

    def __init__(self, prompts: Sequence[Prompt], source: Source) -> None:
        self._prompts: list[Prompt] | None = list(prompts)
        self._source = source

    def take(self, count: int | None = None) -> list[Prompt]:
        prompts, self._prompts = self._prompts, None
        return self._source.take(count) if prompts is None else prompts


@dataclass(kw_only=True)
class DynamicTango(Tango):
    """A run that trains as Tango does. Once nothing is verified, further problems are taken in place of those whose
    outcomes are all alike (DAPO, arXiv 2503.14476); before that, all problems that nobody solved have verdicts."""

    rounds: int = 10  # of taking problems, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        self._source: Source | None = None  # of a generator's turn in which nothing is verified
        self._alike: float | None = None  # share of all problems that such a turn took, whose outcomes were all alike

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        self._source = source if turn.role == self.solver and self._outcomes_suffice() else None
        try:
            return super().play(turn, source, table)
        finally:
            self._source = self._alike = None

    def draw(
        self, table: Table, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over
    ) -> tuple[Sequence[Solution], dict[str, float]]:
        if self._source is None:
            return super().draw(table, prompts, sampling, then)

        def draw_round(number: int, more: Sequence[Prompt]) -> tuple[list[Group], Figures]:
            seed = table.seed_for(sampling.seed, "round", number) if number else sampling.seed
            return solve_groups(table, self.solver, more, replace(sampling, seed=seed))

        groups, figures = draw_groups(Given(prompts, self._source), draw_round, DynamicSampling(rounds=self.rounds))
        self._alike = figures["alike"]
        solutions = [solution for group in groups for solution in group.solutions]
        for place, solution in enumerate(solutions):
            then(place, solution)
        return solutions, figures

    def _share_with_signal(self, solutions: Sequence[Solution]) -> float:
        return super()._share_with_signal(solutions) if self._alike is None else 1 - self._alike


@dataclass(kw_only=True)
class ReusingTango(Tango):
    """A run that trains as Tango does. The verifier's turn is about solutions of the generator's last turn that were
    verified there, one of each problem. As these are of problems that nobody solved, the verifier is then trained on
    wrong solutions alone. Where none was verified, solutions are drawn for the turn, as in Tango."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last: list[Solution] = []
        self._reuses = False

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        self._reuses = turn.role != self.solver and bool(self._last)
        try:
            return super().play(turn, Given([], source) if self._reuses else source, table)
        finally:
            self._reuses = False

    def draw(
        self, table: Table, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over
    ) -> tuple[Sequence[Solution], dict[str, float]]:
        if not self._reuses:
            return super().draw(table, prompts, sampling, then)
        for place, solution in enumerate(self._last):
            then(place, solution)
        return self._last, {"tokens_drawn": 0.0}

    def _credit_solutions(
        self, table: Table, turn: Turn, solutions: Sequence[Solution], judged: Judged
    ) -> list[Rollout]:
        pairs = reversed([*zip(solutions, judged, strict=True)])
        self._last = [*{s.rollout.group: s for s, own in pairs if own}.values()]
        return super()._credit_solutions(table, turn, solutions, judged)


@dataclass(kw_only=True)
class TrustedTango(Tango):
    """A run that trains as Tango does, with alpha times 2 b - 1, where b is the balanced accuracy of the verifier's
    final verdicts so far. Right and wrong solutions begin with two verdicts each, one of which was right."""

    def __post_init__(self) -> None:
        self._right, self._said = {True: 1, False: 1}, {True: 2, False: 2}  # by the outcome of the solution
        super().__post_init__()

    @property
    def trust(self) -> float:
        """2 b - 1, or 0 where that is negative."""
        return max(0.0, sum(self._right[outcome] / self._said[outcome] for outcome in (True, False)) - 1)

    def _credit_solutions(
        self, table: Table, turn: Turn, solutions: Sequence[Solution], judged: Judged
    ) -> list[Rollout]:
        self._count(judged)
        table.note(self.solver, {"trust": self.trust})
        return super()._credit_solutions(table, turn, solutions, judged)

    def _credit_reviews(self, table: Table, solutions: Sequence[Solution], judged: Judged) -> list[Rollout]:
        self._count(judged)
        return super()._credit_reviews(table, solutions, judged)

    def _count(self, judged: Judged) -> None:
        for verification in (v for own in judged for v in own):
            self._right[verification.item.correct] += verification.opinion.agrees
            self._said[verification.item.correct] += 1

    def _alpha(self, update: int) -> float:
        return super()._alpha(update) * self.trust
