"""The ranks of each role: which ranks of a run hold a role's model, train it and generate with its embedded engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # run_spec imports this module
    from megatron_rl.spec.run_spec import RoleSpec

ALL = "all"
_RANGE = re.compile(r"(\d+)-(\d+)")


def rank_sets(roles: Mapping[str, RoleSpec], ranks: int) -> tuple[dict[str, range], list[str]]:
    """Returns ({role: its ranks}, error messages). `ranks`: number of ranks of the run.

    The setting `roles.NAME.ranks` is `all`, a range such as 8-15 (first and last rank), or a number of ranks, which
    takes the first free ranks in the order of the roles. A rank is free if no range contains it and no earlier role's
    number took it. A role that shares the policy of another role has the ranks of that role. Roles with an error have
    all ranks.
    """
    owners = {name: role for name, role in roles.items() if role.owner == name}
    sets, problems = dict.fromkeys(owners, range(ranks)), list[str]()
    for name, role in owners.items():
        if isinstance(role.ranks, str) and role.ranks != ALL:
            if (found := _RANGE.fullmatch(role.ranks)) is None:
                problems.append(f"roles.{name}.ranks = {role.ranks!r}: give all, a number, or a range such as 8-15")
                continue
            first, last = int(found[1]), int(found[2])
            if first > last or last >= ranks:
                problems.append(f"roles.{name}.ranks = {role.ranks!r}: the run has the ranks 0 to {ranks - 1}")
                continue
            sets[name] = range(first, last + 1)
    taken = {
        rank for name, own in sets.items() if isinstance(owners[name].ranks, str) and len(own) < ranks for rank in own
    }
    for name, role in owners.items():
        if not isinstance(role.ranks, int):
            continue
        firsts = range(ranks - role.ranks + 1) if role.ranks > 0 else ()
        fitting = (
            range(first, first + role.ranks) for first in firsts if taken.isdisjoint(range(first, first + role.ranks))
        )
        if (own := next(fitting, None)) is None:
            problems.append(
                f"roles.{name}.ranks = {role.ranks}: of {ranks} ranks there are not so many free ones side by side; "
                "start more ranks, or give ranges that overlap"
            )
            continue
        sets[name] = own
        taken |= {*own}
    problems += _overlaps(sets)
    for name, role in roles.items():
        if role.owner != name:
            if role.ranks not in (ALL, roles[role.owner].ranks):
                problems.append(
                    f"roles.{name}.ranks = {role.ranks!r} with same_as: {role.owner}: the role uses the policy of "
                    f"{role.owner}, and has its ranks; leave it out"
                )
            sets[name] = sets[role.owner]
    return {name: sets[name] for name in roles}, problems


def words(ranks: range) -> str:
    """Returns a range of ranks as in the setting `roles.NAME.ranks`: 8-15 for the ranks 8 to 15."""
    return f"{ranks[0]}-{ranks[-1]}"


def _overlaps(sets: Mapping[str, range]) -> Iterator[str]:
    """Yields an error message for each pair of roles whose ranks overlap without one containing the other."""
    named = list(sets.items())
    for place, (name, own) in enumerate(named):
        for other, its in named[place + 1 :]:
            common = len({*own} & {*its})
            if 0 < common < min(len(own), len(its)):
                yield (
                    f"roles.{name}.ranks ({words(own)}) and roles.{other}.ranks ({words(its)}) overlap in a "
                    "part: make them equal, apart, or one a part of the other"
                )
