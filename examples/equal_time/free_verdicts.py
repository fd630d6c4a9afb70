"""Tango whose verdicts are true and cost nothing: the most that a better or a cheaper verifier could win."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.algorithms.advantages import assign_advantages, step_rewards
from megatron_rl.recipes.base import Solution
from megatron_rl.recipes.review import Judged, Reviewed
from megatron_rl.recipes.tango import Tango
from megatron_rl.training.turns import Table, Turn
from megatron_rl.types import STEP, Marks, Rollout


@dataclass(kw_only=True)
class FreeVerdicts(Tango):
    """A run that trains `generator` as Tango does, with the labels of `step_labels` in place of a verifier's verdicts.

    No verification is asked for, so that `verifier` is loaded and does nothing. It is no method: where labels exist,
    no verifier is needed. It bounds what can be gained by verdicts, on a task whose labels are known.
    """

    def _reviewed(self, turn: Turn) -> Reviewed | None:
        return None

    def _credit_solutions(
        self, table: Table, turn: Turn, solutions: Sequence[Solution], judged: Judged
    ) -> list[Rollout]:
        marked = [s.rollout for s in solutions]
        failed: set[str] = set()
        if not self._outcomes_suffice():
            solved = {s.rollout.group for s in solutions if s.correct}
            failed = {s.rollout.group for s in solutions} - solved
            marked = [self._labelled(s) for s in solutions]
        table.note(self.solver, {"signal": self._signal})
        self._follow(solutions)
        alphas = [self._alpha(turn.update(self.solver)) * (s.rollout.group in failed) for s in solutions]
        return assign_advantages(
            marked, reward="outcome", estimator=self.estimator, alpha=alphas, steps=self.step_credit
        )

    def _labelled(self, solution: Solution) -> Rollout:
        """Gives each step of a solution the reward of its label."""
        assert self._labels is not None, "recipe.args.step_labels is given"
        rollout = solution.rollout
        marks = rollout.marks_of(STEP)
        labels = self._labels(solution.steps, rollout.payload)
        scores = step_rewards(labels, len(marks), refine=self.step_rewards, credit=self.step_credit)
        return replace(rollout, marks={**rollout.marks, STEP: Marks(marks.ranges, scores)})
