"""A curriculum, which skips problems based on the share of correct solutions that the policy last generated for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.base import Count, Share
from megatron_rl.config.schema import config
from megatron_rl.data.problems import DataError, place_of
from megatron_rl.recipes.dynamic_sampling import Group
from megatron_rl.training.iteration import PromptSource
from megatron_rl.types import Prompt


@config
class Curriculum:
    """Settings for skipping problems by success rate, the share of correct solutions in the last group that was sampled
    for a problem.
    """

    # problems with at least this success rate are never used again (ScaleRL, arXiv 2510.13786); null: off
    retire_at: Share | None = 0.9
    # problems with at most this success rate, for example 0.0, are skipped for some epochs; null: no problem is skipped
    rest_at: Share | None = None
    rest_epochs: Count = 1  # number of epochs for which such a problem is skipped

    def problems(self) -> Iterator[str]:
        """Yields an error message if a problem could be both too hard and solved."""
        if self.retire_at is not None and self.rest_at is not None and self.rest_at >= self.retire_at:
            yield (
                f"recipe.args.curriculum.rest_at = {self.rest_at} is not below retire_at = {self.retire_at}: "
                "a problem cannot be too hard and solved"
            )


@dataclass
class Record:
    """The state of a curriculum: the data rows that are never used again (retired), and the rows that are skipped for
    some epochs (resting).

    The state is saved with the recipe's state, together with the position in the data. So a resumed run skips the same
    problems.
    """

    curriculum: Curriculum | None  # None if no problem is ever skipped
    retired: set[int] = field(default_factory=set)
    resting: dict[int, int] = field(default_factory=dict)

    def over(self, source: PromptSource) -> PromptSource:
        """Returns a source that yields the problems of `source` without the problems that the curriculum skips. The
        method `take` of the result raises DataError if all problems of an epoch are skipped.
        """
        return source if self.curriculum is None else _Chosen(source, self)

    def learn(self, rates: Sequence[tuple[int, int, float]]) -> None:
        """Updates the state with the result of `success_rates`."""
        if self.curriculum is None:
            return
        for epoch, row, rate in rates:
            self.resting.pop(row, None)
            if self.curriculum.retire_at is not None and rate >= self.curriculum.retire_at:
                self.retired.add(row)
            elif row in self.retired:  # if an update is larger than the data set, a problem occurs more than once
                continue
            elif self.curriculum.rest_at is not None and rate <= self.curriculum.rest_at:
                self.resting[row] = epoch + 1 + self.curriculum.rest_epochs

    def admits(self, prompt: Prompt) -> bool:
        epoch, row = place_of(prompt)
        return row not in self.retired and epoch >= self.resting.get(row, epoch)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of retired and resting problems as metrics; an empty dict if there is no curriculum."""
        if self.curriculum is None:
            return {}
        return {"retired": float(len(self.retired)), "resting": float(len(self.resting))}

    def state_dict(self) -> dict[str, Any]:
        if self.curriculum is None:
            return {}
        return {"retired": sorted(self.retired), "resting": sorted(self.resting.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.retired, self.resting = set(state.get("retired", ())), dict(state.get("resting", ()))


def success_rates(groups: Sequence[Group]) -> list[tuple[int, int, float]]:
    """Returns (epoch, data row, success rate) of each group. Leaves out groups in which a grading failed. Otherwise a
    single graded sample of eight could retire the problem for the whole run.
    """
    return [
        (*place_of(group.prompt), group.success_rate)
        for group in groups
        if group.success_rate is not None and len(group.solutions) == group.drawn
    ]


@dataclass(frozen=True)
class _Chosen:
    """A source of problems that skips retired and resting problems; implements iteration.PromptSource."""

    source: PromptSource
    record: Record

    @property
    def prompts_per_iteration(self) -> int:
        return self.source.prompts_per_iteration

    def take(self, count: int | None = None, fits: Callable[[Prompt], bool] = lambda prompt: True) -> list[Prompt]:
        since, curriculum = None, self.record.curriculum
        longest_rest = 0 if curriculum is None or curriculum.rest_at is None else curriculum.rest_epochs

        def chosen(prompt: Prompt) -> bool:
            nonlocal since
            epoch = place_of(prompt)[0]
            if self.record.admits(prompt):
                since = None
                return fits(prompt)
            since = epoch if since is None else since
            # true once at least one whole epoch has passed after the last resting problem returned
            if epoch - since > 1 + longest_rest:
                raise DataError(
                    f"no problem is left: {len(self.record.retired)} are retired; end the run (run.iterations), "
                    "add data, or raise recipe.args.curriculum.retire_at"
                )
            return False

        return self.source.take(count, chosen)
