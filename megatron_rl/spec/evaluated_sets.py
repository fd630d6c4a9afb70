"""Resolves the problem sets of an evaluation: where their problems are, and how answers are sampled and graded. Used by
training runs and by `megatron-rl eval`. This module does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.evaluation import EvaluationSet, Reward
from megatron_rl.data.benchmarks import Benchmark, benchmark, source_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedSet:
    """A problem set of an evaluation, with all defaults filled in."""

    name: str  # name in metrics
    title: str  # name in tables
    benchmark: Benchmark | None  # the public benchmark; None: the user's own problems
    source: PromptSet
    reward: Reward
    template: str | None  # prompt template; None: the command's default template
    n: int
    k: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int


def evaluated_sets(
    sets: Sequence[EvaluationSet], defaults: Any, reward: Reward, *, drawn: Any = None
) -> tuple[EvaluatedSet, ...]:  # fmt: skip
    """Resolves the settings of problem sets. Returns the resolved sets in the same order.

    `defaults`: config section with the values of `n`, `k`, `template` and `limit` for sets in which these settings are
        null. Its setting `data_dir` is the directory with local files.
    `drawn`: config section with the values of `temperature`, `top_p` and `top_k` for sets in which these settings are
        null. If None, the section `defaults` is used.
    `reward`: the grader of the user's own sets. The worker count and the limits of `reward` also apply to the graders
        of benchmarks.

    Raises ConfigError for an unknown benchmark, and for a benchmark that is not on the hub if `data_dir` is null.
    """
    return tuple(_resolved(dataset, defaults, reward, defaults if drawn is None else drawn) for dataset in sets)


def _resolved(entry: EvaluationSet, defaults: Any, reward: Reward, drawn: Any) -> EvaluatedSet:
    limit = entry.limit or defaults.limit
    bench = None if entry.path else benchmark(entry.name)
    if bench is not None:
        source = source_of(bench, defaults.data_dir, limit=limit)
        source = dataclasses.replace(
            source, shuffle=entry.shuffle, chat=entry.chat, system=entry.system, max_bad_share=entry.max_bad_share
        )
        reward = dataclasses.replace(reward, target=bench.grader, args={}, range=(0.0, 1.0))
    else:
        shared = {field.name: getattr(entry, field.name) for field in dataclasses.fields(PromptSet)}
        source = PromptSet(**shared | {"path": _local(entry.path, defaults.data_dir), "limit": limit})
    numbers = {name: getattr(entry, name) for name in ("temperature", "top_p", "top_k")}
    return EvaluatedSet(
        name=entry.title, title=entry.title if bench is None else bench.title, benchmark=bench, source=source,
        reward=reward if entry.reward is None else entry.reward, template=entry.template or defaults.template,
        n=entry.n or defaults.n, k=entry.k or defaults.k,
        **{name: getattr(drawn, name) if value is None else value for name, value in numbers.items()},
    )  # fmt: skip


def _local(path: str, data_dir: str | None) -> str:
    """Returns the directory in `data_dir` to which `megatron-rl fetch` has copied the hub data set `path`, or `path` if
    there is no such directory."""
    fetched = None if data_dir is None or Path(path).exists() else Path(data_dir) / path
    return str(fetched) if fetched is not None and fetched.is_dir() else path
