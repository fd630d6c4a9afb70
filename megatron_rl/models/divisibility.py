"""Says which layouts a model allows: the one table of what must divide by what.

Config checks, the trainer, planning, its search, and the maps of weights ask it. So a layout that one of them refuses
is refused by all, in the same words: the value, what does not divide it, and the nearest numbers that would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

from megatron_rl.config.schema import Layout
from megatron_rl.models.registry import family_of
from megatron_rl.models.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The numbers of ranks by which a trainer's layout cuts a model."""

    tp: int = 1
    runs: int = 1  # of layers: pp x vpp. Layouts whose stages may be uneven leave it at 1
    ep: int = 1
    etp: int | None = None  # None: as many as tp
    sequence_parallel: bool = True

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Returns the axes of a config's layout."""
        return cls(
            tp=layout.tp,
            runs=layout.pp * (layout.vpp or 1),
            ep=layout.ep,
            etp=layout.etp,
            sequence_parallel=layout.sequence_parallel,
        )


class Violation(NamedTuple):
    """A size that does not divide by an axis of a layout."""

    key: str  # of config.json
    value: int
    axis: str
    ranks: int
    nearest: tuple[int, ...]  # the next smaller and the next larger number for this axis that the whole model allows

    def says(self, model: str) -> str:
        """Returns a sentence with the cure."""
        works = " and ".join(f"{self.axis} = {n}" for n in self.nearest)
        are = "nearest that works is" if len(self.nearest) == 1 else "nearest that work are"
        return f"{self.key} = {self.value} of {model} is not divisible by {self.axis} = {self.ranks}: the {are} {works}"


class _Rule(NamedTuple):
    """A field of Sizes that an axis must divide; a size of 0 is not there and divides by everything."""

    field: str
    axis: str
    either: bool = False  # it is enough that the size divides the ranks: engines repeat key/value heads


def _rules(sizes: Sizes, *, engine: bool = False, expert_parallel: bool = False) -> list[_Rule]:
    """Returns what the axes of a trainer divide, or the ranks of an `engine`, which with `expert_parallel` hold whole
    experts.

    Where every layer has experts, the dense width in config.json belongs to no layer. Attention through a latent has no
    key/value heads.
    """
    rules = [_Rule("heads", "tp")]
    if not sizes.kv_rank:
        rules.append(_Rule("kv_heads", "tp", either=engine))
    if not engine:
        rules.append(_Rule("num_layers", "pp x vpp"))
    if sizes.dense_layers or not sizes.experts:
        rules.append(_Rule("ffn", "tp"))
    if not sizes.experts:
        return rules
    if not engine:
        rules += [_Rule("experts", "ep"), _Rule("expert_ffn", "etp")]
    else:
        rules.append(_Rule("experts" if expert_parallel else "expert_ffn", "tp"))
    return [*rules, _Rule("shared_ffn", "tp")]


def trainer_violations(sizes: Sizes, axes: Axes) -> list[Violation]:
    """Returns every size that a trainer's layout does not divide."""
    ranks = {"tp": axes.tp, "pp x vpp": axes.runs, "ep": axes.ep, "etp": axes.tp if axes.etp is None else axes.etp}
    return [*_violations(sizes, _rules(sizes), ranks)]


def engine_violations(sizes: Sizes, tp: int, *, expert_parallel: bool = False) -> list[Violation]:
    """Returns every size that an engine of `tp` ranks does not divide."""
    return [*_violations(sizes, _rules(sizes, engine=True, expert_parallel=expert_parallel), {"tp": tp})]


def trainer_problems(sizes: Sizes, axes: Axes, model: str) -> list[str]:
    """Returns a sentence, with its cure, for everything that forbids a trainer's layout. `model`: what to call it.

    Beside what must divide, these are the rules of experts: a model without any has none to cut, and Megatron-core
    trains experts under tensor parallelism with sequence parallelism alone.
    """
    found = [violation.says(model) for violation in trainer_violations(sizes, axes)]
    if not sizes.experts and (axes.ep > 1 or axes.etp not in (None, 1) or (axes.etp or axes.tp) != axes.tp):
        found.append(f"{model} has no experts: set layout.ep = {axes.ep} to 1 and layout.etp = {axes.etp} to null")
    if sizes.experts and axes.tp > 1 and not axes.sequence_parallel:
        found.append(
            f"{model} has experts, and layout.tp = {axes.tp}: Megatron-core trains that only with sequence "
            "parallelism; set layout.sequence_parallel to true"
        )
    return found


def engine_problems(sizes: Sizes, tp: int, model: str, *, expert_parallel: bool = False) -> list[str]:
    """Returns a sentence, with its cure, for everything that forbids an engine's layout. `model`: what to call it."""
    if expert_parallel and not sizes.experts:
        return [f"{model} has no experts: set expert_parallel to false"]
    return [found.says(model) for found in engine_violations(sizes, tp, expert_parallel=expert_parallel)]


def allowed(sizes: Sizes, axis: str) -> Callable[[int], bool]:
    """Returns a function that says whether a trainer of this model may have so many ranks along `axis`."""
    return _allowed(sizes, [rule for rule in _rules(sizes) if rule.axis == axis])


def _violations(sizes: Sizes, rules: list[_Rule], ranks: dict[str, int]) -> Iterator[Violation]:
    """Yields the rules that are not kept, with the nearest numbers that keep all rules of the same axis."""
    keys = family_of(sizes).keys
    for rule in rules:
        number = ranks[rule.axis]
        if _keeps(sizes, rule, number):
            continue
        same = [other for other in rules if other.axis == rule.axis]
        works = _allowed(sizes, same)
        most = min(getattr(sizes, other.field) or number for other in same if not other.either)
        below = next((n for n in range(number - 1, 0, -1) if works(n)), None)
        above = next((n for n in range(number + 1, most + 1) if works(n)), None)
        nearest = tuple(n for n in (below, above) if n is not None)
        yield Violation(keys[rule.field], getattr(sizes, rule.field), rule.axis, number, nearest)


def _allowed(sizes: Sizes, rules: list[_Rule]) -> Callable[[int], bool]:
    return lambda ranks: all(_keeps(sizes, rule, ranks) for rule in rules)


def _keeps(sizes: Sizes, rule: _Rule, ranks: int) -> bool:
    size = getattr(sizes, rule.field)
    return size % ranks == 0 or (rule.either and ranks % size == 0)
