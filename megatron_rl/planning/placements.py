"""Searches the ranks and layouts of all roles together, for given engines: which roles share a set of ranks, how large
each set is, and how each role is cut on its set.

The time and memory of a role depend on the role and the size of its set alone, so that they are computed once for each.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_rl.models.lora_targets import owners
from megatron_rl.planning.case import Case
from megatron_rl.planning.phases import generation_phases, role_seconds
from megatron_rl.planning.plan import engines_of, plan_role
from megatron_rl.spec.rank_sets import ALL, words
from megatron_rl.spec.run_spec import RoleSpec

APART = 40  # number of placements on several sets that are returned for one choice of engines
# largest number of ways to choose the sizes of a partition's sets; if there are more, sets consist of larger units
COMPOSITIONS = 20_000
COMBINATIONS = 150  # approximate number of combinations of layouts that are tried for roles on the same ranks


class Choice(NamedTuple):
    """A role with a layout on a number of ranks, and its estimate."""

    seconds: Sequence[float]  # for each iteration of a cycle: seconds of the role's scores and updates
    swaps: Sequence[float]  # for each iteration: those of `seconds` that are spent to let the role sleep and wake
    peak: float  # bytes on a GPU while the role trains
    asleep: float  # bytes that it keeps while another role trains
    role: RoleSpec
    ranks: int  # number of ranks


@dataclass(frozen=True)
class Block:
    """Roles on one set of ranks, with their layouts. `seconds`: for each iteration of a cycle, the seconds in which the
    set is busy."""

    ranks: int
    choices: Mapping[str, Choice]
    seconds: Sequence[float]


class Candidate(NamedTuple):
    seconds: float  # lower bound of the seconds of a cycle
    case: Case
    shared: bool  # whether all roles share all ranks


class Placements:
    """The candidates of a search. `variants`: (run, role, number of ranks) -> layouts of the role that may be tried."""

    def __init__(self, variants: Callable[[Case, str, int], Iterator[RoleSpec]]) -> None:
        self._variants = variants
        self._choices: dict[tuple[str, str, int], list[Choice]] = {}
        self._blocks: dict[tuple[str, tuple[str, ...], int], list[Block]] = {}

    def candidates(self, case: Case, keep: int) -> list[Candidate]:
        """Returns variants of the run `case`, which differ in the ranks and layouts of the roles: the `keep` fastest
        ones in which all roles share all ranks, and the APART fastest ones in which they do not."""
        servers, engines = engines_of(case)
        if any(server.sequences < 1 for server in servers.values()):
            return []
        generation = [sum(generation_phases(case, work, engines).values()) for work in case.work]
        base = owners(case.roles)
        units = [[name for name in case.held if base.get(name, name) == own] for own in case.held]
        units = [tuple(names) for names in units if names]
        found = [self._candidate(case, [block], generation) for block in self._block(case, sum(units, ()), case.ranks)]
        found = sorted(found, key=lambda candidate: candidate.seconds)[:keep]
        if case.colocated:
            return found
        apart = heapq.nsmallest(APART, self._apart(case, units), lambda blocks: _seconds(case, blocks, generation))
        return found + [self._candidate(case, blocks, generation) for blocks in apart]

    def _apart(self, case: Case, units: Sequence[tuple[str, ...]]) -> Iterator[list[Block]]:
        """Yields the ways to put the units of roles on two or more sets of whole nodes, or of ranks of one node."""
        for parts in _partitions(units):
            unit = 1 if case.ranks <= case.cluster.per_node else case.cluster.per_node
            while math.comb(case.ranks // unit - 1, len(parts) - 1) > COMPOSITIONS:
                unit *= 2
            for numbers in _compositions(case.ranks // unit, len(parts)):
                sizes = [number * unit for number in numbers]
                sizes[sizes.index(max(sizes))] += case.ranks % unit
                options = [self._block(case, names, size)[:1] for names, size in zip(parts, sizes, strict=True)]
                yield from map(list, itertools.product(*options))

    def _candidate(self, case: Case, blocks: Sequence[Block], generation: Sequence[float]) -> Candidate:
        seconds = _seconds(case, blocks, generation)
        roles, start = dict[str, RoleSpec](), 0
        for block in blocks:
            for name, choice in block.choices.items():
                ranks = words(range(start, start + choice.ranks)) if choice.ranks < case.ranks else ALL
                roles[name] = replace(choice.role, ranks=ranks, name=name)
            start += block.ranks
        return Candidate(seconds, case.with_roles(**roles), len(blocks) == 1 and len({*roles_ranks(roles)}) == 1)

    def _block(self, case: Case, names: tuple[str, ...], ranks: int) -> list[Block]:
        """Returns the ways to put some roles on one set of ranks, fastest first."""
        key = (_place(case), names, ranks)
        if key not in self._blocks:
            blocks = [*self._combined(case, dict.fromkeys(names, ranks), ranks)]
            critic = next((name for name in names if _actors(case, name) & {*names}), None)
            if critic is not None and len(names) == 2:  # a critic may stand on a part of its actor's ranks
                parts = (part for part in (ranks // 2, ranks // 4, ranks // 8) if part)
                for part in parts:
                    blocks += self._combined(case, dict.fromkeys(names, ranks) | {critic: part}, ranks)
            times = [work.times for work in case.work]
            blocks.sort(key=lambda block: sum(n * s for n, s in zip(times, block.seconds, strict=True)))
            self._blocks[key] = blocks
        return self._blocks[key]

    def _combined(self, case: Case, sizes: Mapping[str, int], ranks: int) -> Iterator[Block]:
        """Yields the combinations of the roles' layouts that fit into memory together."""
        limit, room = max(4, int(COMBINATIONS ** (1 / len(sizes)))), case.cluster.device.memory
        alone = len(sizes) == 1 and case.servers is not None  # then the role need not sleep
        shortest = [self._shortest(case, name, size, limit) for name, size in sizes.items()]
        for choices in itertools.product(*shortest):
            asleep = sum(choice.asleep for choice in choices)
            if any(asleep - choice.asleep + choice.peak > room for choice in choices):
                continue
            if alone:
                [one] = choices
                choices = [one._replace(role=replace(one.role, sleep=False), swaps=[0.0] * len(one.swaps))]
            parts = [[s + w for s, w in zip(one.seconds, one.swaps, strict=True)] for one in choices]
            yield Block(ranks, dict(zip(sizes, choices, strict=True)), [sum(own) for own in zip(*parts, strict=True)])

    def _shortest(self, case: Case, name: str, ranks: int, limit: int) -> list[Choice]:
        """Returns at most `limit` layouts of a role: the fastest, and some of those that need the least memory."""
        key = (_place(case), name, ranks)
        if key not in self._choices:
            self._choices[key] = [*_fitting(case, name, ranks, self._variants(case, name, ranks))]
        fitting = self._choices[key]
        small = sorted(fitting, key=lambda choice: choice.peak + choice.asleep)[: limit // 3]
        fast = [choice for choice in fitting if choice not in small]
        return [*fast[: limit - len(small)], *small]


def _seconds(case: Case, blocks: Sequence[Block], generation: Sequence[float]) -> float:
    """Returns a lower bound of the seconds of a cycle. `generation`: seconds of the rollouts of each iteration."""
    times = [work.times for work in case.work]
    if case.spec.loop.rollouts.ahead:
        engines = sum(n * s for n, s in zip(times, generation, strict=True))
        return max(engines, *(sum(n * s for n, s in zip(times, b.seconds, strict=True)) for b in blocks))
    busiest = [max(own) for own in zip(*(block.seconds for block in blocks), strict=True)]
    return sum(n * (g + b) for n, g, b in zip(times, generation, busiest, strict=True))


def roles_ranks(roles: Mapping[str, RoleSpec]) -> list[int | str]:
    return [role.ranks for role in roles.values()]


def _fitting(case: Case, name: str, ranks: int, variants: Iterator[RoleSpec]) -> list[Choice]:
    """Returns the layouts of a role on `ranks` ranks that fit into a GPU's memory without other roles, fastest first.
    A micro-batch that is not the configured one is left out if a larger one fits."""
    choices, fits = list[Choice](), set[object]()
    room, configured = case.cluster.device.memory, case.roles[name].micro_batch_tokens
    for variant in variants:
        shape = (variant.layout, variant.model)
        if shape in fits and variant.micro_batch_tokens != configured:
            continue
        changed = case.with_roles(**{name: replace(variant, ranks=ALL)})
        plan, reserve, actor = plan_role(changed, name, ranks)
        if reserve + plan.embedded + plan.training.peak > room:
            continue
        fits.add(shape)
        seconds = [role_seconds(changed, work, name, actor) for work in case.work]
        swaps = [own.get("sleep and wake", 0.0) for own in seconds]
        choices.append(
            Choice(
                seconds=[sum(own.values()) - swap for own, swap in zip(seconds, swaps, strict=True)], swaps=swaps,
                peak=reserve + plan.embedded + plan.training.peak, asleep=plan.asleep, role=variant, ranks=ranks,
            )
        )  # fmt: skip
    times = [work.times for work in case.work]
    return sorted(choices, key=lambda choice: sum(n * s for n, s in zip(times, choice.seconds, strict=True)))


def _place(case: Case) -> str:
    """Returns what of the engines the memory of a role depends on."""
    return "embedded" if case.servers is None else "colocated" if case.colocated else "apart"


def _actors(case: Case, name: str) -> set[str]:
    """Returns the roles whose samples a critic scores; an empty set for a role that is no critic."""
    scores = [score for work in case.work for score in work.scores if score.by == name]
    return {case.roles[score.draw.role].owner for score in scores} if case.roles[name].head == "value" else set()


def _partitions(units: Sequence[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yields the partitions of units of roles into two or more blocks. The roles of a unit stay together."""

    def split(rest: Sequence[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
        if not rest:
            yield []
            return
        for parts in split(rest[1:]):
            yield [rest[0], *parts]
            for place in range(len(parts)):
                yield [*parts[:place], rest[0] + parts[place], *parts[place + 1 :]]

    yield from (parts for parts in split(units) if len(parts) > 1)


def _compositions(total: int, count: int) -> Iterator[list[int]]:
    """Yields the ways to write `total` as a sum of `count` positive numbers."""
    for ends in itertools.combinations(range(1, total), count - 1):
        yield [end - start for start, end in zip((0, *ends), (*ends, total), strict=True)]
