"""Checks which layouts a model allows: the single table of which sizes must be divisible by which axes.

Config checks, the trainer, planning, its search, and the weight maps all use this table. Therefore they refuse the same
layouts with the same message: the value, the number that does not divide it, and the nearest numbers that do.
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
    """The numbers of ranks over which a trainer's layout shards a model."""

    tp: int = 1
    runs: int = 1  # number of runs of layers: pp x vpp. It is 1 for layouts whose stages may be uneven
    ep: int = 1
    etp: int | None = None  # expert tensor parallelism; None: the same as tp
    sequence_parallel: bool = True

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Returns the axes of a layout in a config."""
        return cls(
            tp=layout.tp,
            runs=layout.pp * (layout.vpp or 1),
            ep=layout.ep,
            etp=layout.etp,
            sequence_parallel=layout.sequence_parallel,
        )


class Violation(NamedTuple):
    """A model size that is not divisible by an axis of a layout."""

    key: str  # key of config.json that holds the size
    value: int
    axis: str
    ranks: int
    # the next smaller and the next larger number of ranks that the whole model allows on this axis
    nearest: tuple[int, ...]

    def says(self, model: str) -> str:
        """Returns an error message with a fix. `model`: how to call the model in the message."""
        works = " and ".join(f"{self.axis} = {n}" for n in self.nearest)
        are = "nearest that works is" if len(self.nearest) == 1 else "nearest that work are"
        return f"{self.key} = {self.value} of {model} is not divisible by {self.axis} = {self.ranks}: the {are} {works}"


class _Rule(NamedTuple):
    """A field of Sizes that must be divisible by an axis. A size of 0 (not present in the model) is divisible by
    everything."""

    field: str
    axis: str
    either: bool = False  # whether it is also enough that the size divides the ranks: engines repeat key/value heads


def _rules(sizes: Sizes, *, engine: bool = False, expert_parallel: bool = False) -> list[_Rule]:
    """Returns the divisibility rules of a trainer, or of an engine if `engine` is True.

    `expert_parallel`: whether engine ranks hold whole experts.

    If every layer has experts, the dense width in config.json is not used by any layer. Latent attention has no
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
    """Returns the model sizes that are not divisible by a trainer's layout."""
    ranks = {"tp": axes.tp, "pp x vpp": axes.runs, "ep": axes.ep, "etp": axes.tp if axes.etp is None else axes.etp}
    return [*_violations(sizes, _rules(sizes), ranks)]


def engine_violations(sizes: Sizes, tp: int, *, expert_parallel: bool = False) -> list[Violation]:
    """Returns the model sizes that are not divisible by the `tp` ranks of an engine."""
    return [*_violations(sizes, _rules(sizes, engine=True, expert_parallel=expert_parallel), {"tp": tp})]


def trainer_problems(sizes: Sizes, axes: Axes, model: str) -> list[str]:
    """Returns one error message, with a fix, for every reason why the model does not allow a trainer's layout.

    `model`: how to call the model in the messages.

    Besides divisibility, this checks two rules for experts: a dense model has no experts to shard, and Megatron-core
    trains experts under tensor parallelism only with sequence parallelism.
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
    """Returns one error message, with a fix, for every reason why the model does not allow an engine's layout.

    `model`: how to call the model in the messages.
    """
    if expert_parallel and not sizes.experts:
        return [f"{model} has no experts: set expert_parallel to false"]
    return [found.says(model) for found in engine_violations(sizes, tp, expert_parallel=expert_parallel)]


def allowed(sizes: Sizes, axis: str) -> Callable[[int], bool]:
    """Returns a function that checks whether a trainer of this model may have a given number of ranks along `axis`."""
    return _allowed(sizes, [rule for rule in _rules(sizes) if rule.axis == axis])


def _violations(sizes: Sizes, rules: list[_Rule], ranks: dict[str, int]) -> Iterator[Violation]:
    """Yields the violated rules, with the nearest numbers of ranks that satisfy all rules of the same axis."""
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
