"""A curriculum, which skips problems that are solved or too hard. The criterion is the share of correct solutions in
the last group that was sampled for the problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.base import Count, Share, config, refuse
from megatron_rl.data.problems import NothingLeft, place_of
from megatron_rl.recipes.dynamic_sampling import Group
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.training.iteration import PromptSource
from megatron_rl.types import Prompt


@config
class Rates:
    """Success rates at which problems are skipped. The success rate of a problem is the share of correct solutions in
    the last group that was sampled for the problem.
    """

    # problems with at least this success rate are never used again (ScaleRL, arXiv 2510.13786); null: no limit
    retire_at: Share | None = 0.9
    # problems with at most this success rate, for example 0.0, are skipped for some epochs; null: no problem is skipped
    rest_at: Share | None = None
    rest_epochs: Count = 1  # number of epochs for which a problem is skipped because of rest_at

    def problems(self) -> Iterator[str]:
        """Yields an error message if a problem could be both too hard and solved."""
        if self.retire_at is not None and self.rest_at is not None and self.rest_at >= self.retire_at:
            yield (
                f"recipe.args.curriculum.rest_at = {self.rest_at} is not below retire_at = {self.retire_at}: "
                "a problem cannot be too hard and solved"
            )


@config
class Curriculum(Rates):
    """Settings for skipping problems by success rate."""

    # {name of a source in data.sources: the source's rates}; other sources use the curriculum's own rates
    sources: dict[str, Rates] = field(default_factory=dict)

    def of(self, row: int | str) -> Rates:
        """Returns the success rates at which a problem is skipped. `row`: data row of the problem, see
        data.problems.place_of."""
        return self.sources.get(_source(row), self)

    def check(self, run: CheckedRun) -> None:
        """Raises ConfigError if the argument `sources` has a key that is not a name in the setting data.sources."""
        weights = run.data.weights
        refuse(
            *(
                f"recipe.args.curriculum.sources.{name}: there is no such source; data.sources has "
                f"{', '.join(weights) or 'none'}"
                for name in self.sources
                if name not in weights
            )
        )


@dataclass
class Record:
    """The state of a curriculum: the success rate of each data row for which a group was sampled. From the rates and
    the present settings follow the rows that are never used again (retired), and the rows that are skipped for some
    epochs (resting). A row is an index, or SOURCE/INDEX if the data has several sources.

    The state is saved with the recipe's state, together with the position in the data. So a resumed run skips the same
    problems, and a run that continues with other settings skips the problems that these settings select.
    """

    curriculum: Curriculum | None  # None if no problem is skipped; the rates are then kept unchanged
    # {row: (epoch, success rate) of the last group; of the first group that retired the row}
    rates: dict[int | str, tuple[int, float]] = field(default_factory=dict)

    def over(self, source: PromptSource) -> PromptSource:
        """Returns a source that yields the problems of `source` without the problems that the curriculum skips. The
        method `take` of the result raises NothingLeft if all problems (of one source) are skipped for good.
        """
        return source if self.curriculum is None else _Chosen(source, self)

    def learn(self, rates: Sequence[tuple[int, int | str, float]]) -> None:
        """Updates the state with the result of `success_rates`."""
        if self.curriculum is None:
            return
        for epoch, row, rate in rates:
            # a retired row can be sampled again: an update larger than the data set has a problem twice
            if not self.retired(row):
                self.rates[row] = (epoch, rate)

    def retired(self, row: int | str) -> bool:
        """Returns whether a row is never used again."""
        limit = None if self.curriculum is None else self.curriculum.of(row).retire_at
        return limit is not None and row in self.rates and self.rates[row][1] >= limit

    def rests_until(self, row: int | str) -> int:
        """Returns the epoch before which a row is skipped, because its problem was too hard; 0 if it is not skipped."""
        if self.curriculum is None or row not in self.rates:
            return 0
        limits, (epoch, rate) = self.curriculum.of(row), self.rates[row]
        return epoch + 1 + limits.rest_epochs if limits.rest_at is not None and rate <= limits.rest_at else 0

    def admits(self, prompt: Prompt) -> bool:
        epoch, row = place_of(prompt)
        return not self.retired(row) and epoch >= self.rests_until(row)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics `retired` and `resting`: the numbers of retired and of resting problems. If the data has
        several sources, also returns both numbers of each source, such as retired/math. Returns an empty dict if there
        is no curriculum."""
        if self.curriculum is None:
            return {}
        counts = Counter[str]({"retired": 0, "resting": 0})
        for row in self.rates:
            name = "retired" if self.retired(row) else "resting" if self.rests_until(row) else None
            if name is not None:
                counts.update({name, f"{name}/{_source(row)}".rstrip("/")})
        return {name: float(count) for name, count in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        if not self.rates:
            return {}
        epochs, rates = zip(*self.rates.values(), strict=True)
        return {"rows": list(self.rates), "epochs": list(epochs), "rates": list(rates)}  # columns are small as JSON

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        columns = (state.get(name, ()) for name in ("rows", "epochs", "rates"))
        self.rates = {row: (epoch, rate) for row, epoch, rate in zip(*columns, strict=True)}


def success_rates(groups: Sequence[Group]) -> list[tuple[int, int | str, float]]:
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
        since = dict[str, int]()  # {source: epoch of the first of the problems skipped in a row}
        curriculum = self.record.curriculum
        assert curriculum is not None, "Record.over returns a _Chosen only with a curriculum"

        def chosen(prompt: Prompt) -> bool:
            epoch, row = place_of(prompt)
            if self.record.admits(prompt):
                since.pop(_source(row), None)
                return fits(prompt)
            limits, first = curriculum.of(row), since.setdefault(_source(row), epoch)
            # true if problems were skipped for longer than a problem rests, so that all of them must be retired
            if epoch - first > 1 + (0 if limits.rest_at is None else limits.rest_epochs):
                retired = sum(map(self.record.retired, self.record.rates))
                raise NothingLeft(
                    f"no problem is left: {retired} are retired; end the run (run.iterations), "
                    "add data, or raise recipe.args.curriculum.retire_at"
                )
            return False

        return self.source.take(count, chosen)


def _source(row: int | str) -> str:
    """Returns the name of the source of a row; "" if there is one data set."""
    return row.rpartition("/")[0] if isinstance(row, str) else ""
