"""Checks problem sets, the sources of a run's problems, and the problem sets and metrics of a run's evaluations."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use, refusal_of
from megatron_rl.config.data_settings import ALL, TEST, TRAIN, generated_name, generated_names, resolve
from megatron_rl.config.data_sources import SOURCES, Source
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.evaluation import NO_SCALE, OF_CORRECT, Evaluation
from megatron_rl.config.schema import HELD_OUT, Reward
from megatron_rl.spec.evaluated_sets import EvaluatedSet
from megatron_rl.spec.run_spec import DataSpec, Spec
from megatron_rl.texts.text import read_template


def data_problems(spec: Spec) -> Iterator[str]:
    """Yields error messages about all problem sets of a specification."""
    for name, source in spec.sets.items():
        yield from _set_problems(name, source)


def run_data_problems(data: DataSpec, evaluation: Evaluation, recipe: Any, reward: Reward) -> Iterator[str]:
    """Yields error messages about the evaluations and the sources of a training run. `reward`: of the run."""
    yield from _evaluation_problems(data.held_out, evaluation, recipe)
    yield from _source_problems(data.sources, reward)
    yield from _overlaps(data)


def _evaluation_problems(held_out: Sequence[EvaluatedSet], evaluation: Evaluation, recipe: Any) -> Iterator[str]:
    """Yields error messages about the problem sets of the evaluations, and about metrics in `best` and `early_stop`
    that no evaluation computes."""
    roles = [] if recipe is None else [*recipe.roles()]
    yield from evaluation.conflicts()
    for dataset in held_out:
        if dataset.benchmark is not None and dataset.benchmark.judged:
            yield f"{HELD_OUT}: {dataset.name} has solutions to judge: evaluate on it with `megatron-rl eval`"
        yield from _grading_problems(f"{HELD_OUT}: {dataset.name}", dataset.reward, dataset.template)
    names = [dataset.name for dataset in held_out]
    if clash := sorted({*names} & {*roles}):
        yield f"{HELD_OUT}: {clash[0]} is also the name of a role: give the set another name"
    followed = {"best": evaluation.best, "early_stop": evaluation.early_stop}
    for place, metric in {name: setting.metric for name, setting in followed.items() if setting is not None}.items():
        role, *inner = metric.split("/")
        of = [s for s in held_out if s.name == inner[0]] or held_out if inner else []
        k = re.fullmatch(r"pass@(\d+)", inner[-1]) if inner else None
        if k is not None and any(int(k[1]) not in dataset.k or dataset.n == 1 for dataset in of):
            yield (
                f"evaluation.{place}.metric = {metric!r}: a set has n = 1, or no {k[1]} in its k; "
                "raise evaluation.n, and add it to evaluation.k"
            )
        if inner and OF_CORRECT.fullmatch(inner[-1]) and any(dataset.reward.threshold is None for dataset in of):
            yield f"evaluation.{place}.metric = {metric!r}: {NO_SCALE}, or name {role}/reward as the metric"
        if len(names) == 1 and inner[:1] == names:
            yield (
                f"evaluation.{place}.metric = {metric!r}: with one set the metric is called "
                f"{'/'.join([role, *inner[1:]])!r}"
            )
        if roles and role not in roles and inner:
            yield f"evaluation.{place}.metric = {metric!r}: name a metric of one of the roles {', '.join(roles)}"


def _source_problems(sources: Mapping[str, Source], run_reward: Reward) -> Iterator[str]:
    """Yields error messages about the reward functions and the prompt templates of the sources (data.sources)."""
    for name, source in sources.items():
        place, reward = f"{SOURCES}.{name}", source.reward or run_reward
        yield from _grading_problems(place, source.reward, source.template)
        for key in ("range", "max_failure_share"):
            if (value := vars(reward)[key]) != (shared := vars(run_reward)[key]):
                yield (
                    f"{place}.reward.{key} = {value} with reward.{key} = {shared}: all rewards of a run have the same "
                    f"{key}; set both to one value"
                )


def _grading_problems(place: str, reward: Reward | None, template: str | None) -> Iterator[str]:
    """Yields error messages about a reward function that does not exist or does not take its arguments, and about a
    prompt template that does not exist or has no {question}. `place`: name of the problem set for the messages."""
    if reward is not None:
        yield from refusal_of(plugins.look_at, Use(target=reward.target, args=reward.args), place=f"{place}: ")
    try:
        if template is not None and "{question}" not in read_template(template):
            yield f"{place}: template = {template!r}: the text has no {{question}}"
    except (ConfigError, FileNotFoundError) as error:
        yield f"{place}: {error}"


def _set_problems(name: str, source: PromptSet) -> Iterator[str]:
    """Yields error messages about the settings of a prompt set. `name`: name of the setting that describes the set."""
    yield from refusal_of(resolve, source, place=f"{name}: ")
    try:
        re.compile(source.answer_pattern or "")
    except re.error as error:
        yield f"{name}.answer_pattern = {source.answer_pattern!r} is not a regular expression: {error}"
    path = f"{name}.path = {source.path!r}"
    if generated_name(source.path) is None:
        if source.generated is not None:
            yield f"{name}.generated is set, but {path} is not generated: write reasoning_gym:NAME"
        return
    for key, value in {"settings": source.settings, "subset": source.subset, "file": source.file}.items():
        if value is not None:
            yield f"{name}.{key} = {value!r} with {path}: generated problems have none; set it to null"
    if source.split not in (TRAIN, TEST, ALL):
        yield f"{name}.split = {source.split!r}: generated problems have {TRAIN}, {TEST} and {ALL}"
    if importlib.util.find_spec("reasoning_gym") is None:
        yield f"{path}: reasoning-gym is not installed; run `pip install reasoning-gym`"


def _overlaps(data: DataSpec) -> list[str]:
    """Returns an error message for each pair of a training set and an evaluation set that may have questions in common.
    Only sets that reasoning-gym generates are checked."""
    return [
        f"{HELD_OUT}.{held.name} may have questions of {name}: both are of {', '.join(sorted(common))}; set "
        f"{name}.split to {TRAIN} and the split of {held.name} to {TEST}, which have none in common"
        for name, source in data.training.items()
        for held in data.held_out
        if (common := generated_names(source) & generated_names(held.source))
        and {source.split, held.source.split} != {TRAIN, TEST}
    ]
