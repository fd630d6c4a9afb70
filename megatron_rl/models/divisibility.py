"""Checks which layouts a model allows. The rules say which sizes of a model each axis of a layout must divide.

Config checks, the trainer, planning, the layout search, and the weight maps all use these rules. Therefore they refuse
the same layouts with the same message. A message has the size, the number that does not divide the size, and the
nearest numbers that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_rl.config.schema import Layout
from megatron_rl.models.registry import family_of
from megatron_rl.models.sizes import Sizes


class Violation(NamedTuple):
    """A model size that is not divisible by the number of ranks on an axis of a parallel layout."""

    key: str  # key of config.json that holds the size
    value: int
    axis: str
    ranks: int
    # next smaller and next larger number of ranks on this axis by which all model sizes are divisible
    nearest: tuple[int, ...]

    def says(self, model: str) -> str:
        """Returns an error message that also says how to fix the layout. `model`: the name of the model in the
        message."""
        works = " and ".join(f"{self.axis} = {n}" for n in self.nearest)
        are = "nearest that works is" if len(self.nearest) == 1 else "nearest that work are"
        return f"{self.key} = {self.value} of {model} is not divisible by {self.axis} = {self.ranks}: the {are} {works}"


class _Rule(NamedTuple):
    """A rule that a field of Sizes must be divisible by the number of ranks on an axis. A size of 0 (not present in the
    model) is divisible by every number."""

    field: str
    axis: str
    # True if the number of ranks may also be a multiple of the size, because engines repeat key/value heads
    either: bool = False


def _rules(sizes: Sizes, *, engine: bool = False, expert_parallel: bool = False) -> list[_Rule]:
    """Returns the divisibility rules of a trainer, or of an engine if `engine` is True.

    `expert_parallel`: whether engine ranks hold whole experts instead of a part of every expert.

    There is no rule for a size that no layer uses: the dense feed-forward width if every layer has experts, and the
    number of key/value heads with latent attention.
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


def trainer_violations(sizes: Sizes, layout: Layout) -> list[Violation]:
    """Returns a Violation for each model size that is not divisible by the number of ranks on an axis of a trainer's
    layout."""
    runs = layout.pp * (layout.vpp or 1)
    ranks = {"tp": layout.tp, "pp x vpp": runs, "ep": layout.ep, "etp": layout.expert_tp}
    return [*_violations(sizes, _rules(sizes), ranks)]


def engine_violations(sizes: Sizes, tp: int, *, expert_parallel: bool = False) -> list[Violation]:
    """Returns a Violation for each model size that is not divisible by `tp`, the number of tensor-parallel ranks of an
    engine. `expert_parallel`: whether engine ranks hold whole experts."""
    return [*_violations(sizes, _rules(sizes, engine=True, expert_parallel=expert_parallel), {"tp": tp})]


def trainer_problems(sizes: Sizes, layout: Layout, model: str) -> list[str]:
    """Checks whether a model can be sharded for a trainer's layout. Returns one error message, with a fix, for each
    problem; an empty list if there is no problem.

    `model`: the name of the model in the messages.

    Besides divisibility, the function checks three rules: the layout of a dense model does not set ep or etp, a model
    with experts and tensor parallelism has sequence parallelism, and experts with biases are not split over ranks.
    """
    errors = [violation.says(model) for violation in trainer_violations(sizes, layout)]
    if not sizes.experts and (layout.ep > 1 or layout.etp not in (None, 1) or layout.expert_tp != layout.tp):
        errors.append(f"{model} has no experts: set layout.ep = {layout.ep} to 1 and layout.etp = {layout.etp} to null")
    if sizes.experts and layout.tp > 1 and not layout.sequence_parallel:
        errors.append(
            f"{model} has experts, and layout.tp = {layout.tp}: Megatron-core trains that only with sequence "
            "parallelism; set layout.sequence_parallel to true"
        )
    if sizes.experts and family_of(sizes).common.bias and layout.expert_tp > 1:
        errors.append(
            f"{model} has experts with biases, and layout.etp = {layout.etp} (null: tp): each of these ranks would add "
            "the bias; set layout.etp to 1"
        )
    return errors


def engine_problems(sizes: Sizes, tp: int, model: str, *, expert_parallel: bool = False) -> list[str]:
    """Checks whether a model can be sharded for an engine with `tp` tensor-parallel ranks. Returns one error message,
    with a fix, for each problem; an empty list if there is no problem.

    `model`: the name of the model in the messages.
    `expert_parallel`: whether engine ranks hold whole experts.
    """
    if expert_parallel and not sizes.experts:
        return [f"{model} has no experts: set expert_parallel to false"]
    if family_of(sizes).common.bias and tp > 1 and not expert_parallel:
        return [
            f"{model} has experts with biases, and engine.tp = {tp}: vLLM keeps these on its first rank alone, and "
            "refits send them to all; set engine.expert_parallel to true, or engine.tp to 1"
        ]
    return [violation.says(model) for violation in engine_violations(sizes, tp, expert_parallel=expert_parallel)]


def allowed(sizes: Sizes, axis: str) -> Callable[[int], bool]:
    """Returns a function that takes a number of ranks and checks whether a trainer of this model may have this number
    of ranks along `axis`, such as "tp"."""
    return _allowed(sizes, [rule for rule in _rules(sizes) if rule.axis == axis])


def _violations(sizes: Sizes, rules: list[_Rule], ranks: dict[str, int]) -> Iterator[Violation]:
    """Yields a Violation for each violated rule, with the nearest numbers of ranks that satisfy all rules of the same
    axis. `ranks` maps each axis to its number of ranks."""
    keys = family_of(sizes).keys
    for rule in rules:
        number = ranks[rule.axis]
        if _keeps(sizes, rule, number):
            continue
        same = [axis_rule for axis_rule in rules if axis_rule.axis == rule.axis]
        works = _allowed(sizes, same)
        most = min(getattr(sizes, axis_rule.field) or number for axis_rule in same if not axis_rule.either)
        below = next((n for n in range(number - 1, 0, -1) if works(n)), None)
        above = next((n for n in range(number + 1, most + 1) if works(n)), None)
        nearest = tuple(n for n in (below, above) if n is not None)
        yield Violation(keys[rule.field], getattr(sizes, rule.field), rule.axis, number, nearest)


def _allowed(sizes: Sizes, rules: list[_Rule]) -> Callable[[int], bool]:
    return lambda ranks: all(_keeps(sizes, rule, ranks) for rule in rules)


def _keeps(sizes: Sizes, rule: _Rule, ranks: int) -> bool:
    size = getattr(sizes, rule.field)
    return size % ranks == 0 or (rule.either and ranks % size == 0)
