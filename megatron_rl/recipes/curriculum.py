"""Which problems come again, by how often the policy solved them when it last tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema import ConfigError, config
from megatron_rl.data.problems import DataError, place_of
from megatron_rl.recipes.dynamic_sampling import Group
from megatron_rl.training.iteration import PromptSource
from megatron_rl.types import Prompt


@config
class Curriculum:
    """Problems are passed over by the success rate of their last group: the share of its solutions that is correct."""

    retire_at: float | None = 0.9  # from this rate on a problem never comes again (ScaleRL, arXiv 2510.13786); null: no
    rest_at: float | None = None  # up to this rate a problem rests for some epochs, such as 0.0; null: none rests
    rest_epochs: int = 1  # passes over the data in which it is left out

    def __post_init__(self) -> None:
        for name in ("retire_at", "rest_at"):
            rate = vars(self)[name]
            if rate is not None and not 0.0 <= rate <= 1.0:
                raise ConfigError(f"recipe.args.curriculum.{name} = {rate}: it is a success rate, from 0 to 1")
        if self.retire_at is not None and self.rest_at is not None and self.rest_at >= self.retire_at:
            raise ConfigError(
                f"recipe.args.curriculum.rest_at = {self.rest_at} is not below retire_at = {self.retire_at}: "
                "a problem cannot be too hard and solved"
            )
        if self.rest_epochs < 1:
            raise ConfigError(f"recipe.args.curriculum.rest_epochs = {self.rest_epochs}: give at least 1")


@dataclass
class Record:
    """The rows of the data that are retired, and those that rest, with the epoch in which they come again.

    Its state is a recipe's: it is taken after every iteration, also after one collected ahead, together with the place
    in the data, so that a resumed run passes over the same problems.
    """

    curriculum: Curriculum | None  # None: nothing is ever passed over
    retired: set[int] = field(default_factory=set)
    resting: dict[int, int] = field(default_factory=dict)

    def over(self, source: PromptSource) -> PromptSource:
        """Returns a source of the same problems without those that are passed over."""
        return source if self.curriculum is None else _Chosen(source, self)

    def learn(self, groups: Sequence[Group]) -> None:
        """Takes note of how often each problem was solved. A problem stays as it was when a grading of its group
        failed: a single graded sample of eight would retire it for ever."""
        if self.curriculum is None:
            return
        for group in groups:
            rate, (epoch, row) = group.success_rate, place_of(group.prompt)
            if rate is None or len(group.solutions) < group.drawn:
                continue
            self.resting.pop(row, None)
            if self.curriculum.retire_at is not None and rate >= self.curriculum.retire_at:
                self.retired.add(row)
            elif row in self.retired:  # an update that is larger than the data has a problem more than once
                continue
            elif self.curriculum.rest_at is not None and rate <= self.curriculum.rest_at:
                self.resting[row] = epoch + 1 + self.curriculum.rest_epochs

    def admits(self, prompt: Prompt) -> bool:
        epoch, row = place_of(prompt)
        return row not in self.retired and epoch >= self.resting.get(row, epoch)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of problems that are retired and that rest; none without a curriculum."""
        if self.curriculum is None:
            return {}
        return {"retired": float(len(self.retired)), "resting": float(len(self.resting))}

    def state_dict(self) -> dict[str, Any]:
        if self.curriculum is None:
            return {}
        return {"retired": sorted(self.retired), "resting": sorted(self.resting.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.retired, self.resting = set(state.get("retired", ())), dict(state.get("resting", ()))


@dataclass(frozen=True)
class _Chosen:
    """A source that passes over problems: implements iterations.PromptSource."""

    source: PromptSource
    record: Record

    def take(self, count: int | None = None) -> list[Prompt]:
        """Returns the next `count` problems that are admitted. Raises DataError when a whole epoch has none."""
        taken = self.source.take(count)
        wanted, since = len(taken), None
        kept: list[Prompt] = []
        while True:
            for prompt in taken:
                epoch = place_of(prompt)[0]
                if self.record.admits(prompt):
                    kept.append(prompt)
                    since = None
                elif since is None:
                    since = epoch
                elif epoch - since > 1 + self._longest_rest():  # at least one whole epoch, after every rest
                    raise DataError(
                        f"no problem is left: {len(self.record.retired)} are retired; end the run (run.iterations), "
                        "add data, or raise recipe.args.curriculum.retire_at"
                    )
            if len(kept) == wanted:
                return kept
            taken = self.source.take(wanted - len(kept))

    def _longest_rest(self) -> int:
        curriculum = self.record.curriculum
        return 0 if curriculum is None or curriculum.rest_at is None else curriculum.rest_epochs
