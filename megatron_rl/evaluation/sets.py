"""Loads the problem sets of `megatron-rl eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.data_settings import resolve
from megatron_rl.data.benchmarks import solution
from megatron_rl.data.problems import Problem
from megatron_rl.spec.evaluated_sets import EvaluatedSet
from megatron_rl.training.prompts import read_set

# Default prompt templates of sets that are not benchmarks. The first is for sets of problems that a model solves, the
# second for sets of solutions that a verifier judges.
GENERATOR_TEMPLATE, JUDGED_TEMPLATE = "tango_generator", "tango_verifier"


@dataclass(frozen=True, kw_only=True)
class LoadedSet:
    """A set of problems to evaluate on, with its problems and its prompt template."""

    settings: EvaluatedSet
    problems: list[Problem]
    judged: bool  # whether the set has solutions that a verifier judges
    template: str  # name or file of the prompt template


def read_sets(sets: Sequence[EvaluatedSet]) -> list[LoadedSet]:
    """Reads the problems of each set and determines the set's prompt template. Returns the loaded sets in the order of
    `sets`. Raises ConfigError if the path of a set contains no data, and DataError if no row of a set is usable or the
    share of bad rows is above the set's setting max_bad_share.
    """
    loaded = []
    for entry in sets:
        problems, bench = read_set(entry.source, entry.benchmark), entry.benchmark
        judged = bench.judged if bench is not None else "steps" in resolve(entry.source).fields
        if judged and bench is None:
            problems = [replace(p, values=solution(p.values)) for p in problems]
        default = JUDGED_TEMPLATE if judged else GENERATOR_TEMPLATE
        template = entry.template or (default if bench is None else bench.template)
        loaded.append(LoadedSet(settings=entry, problems=problems, judged=judged, template=template))
    return loaded
