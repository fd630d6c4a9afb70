"""Checks the sources of a run's problems, the sets of its evaluations, and the metrics of its evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.config.schema import HELD_OUT, SOURCES, Reward
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.text import read_template


def evaluation_problems(spec: RunSpec) -> Iterator[str]:
    """Yields error messages about the sets of the evaluations, and about metrics that no evaluation can have."""
    settings, roles = spec.loop.evaluation, [] if spec.recipe is None else [*spec.recipe.roles()]
    for own in spec.data.held_out:
        if own.benchmark is not None and own.benchmark.judged:
            yield f"{HELD_OUT}: {own.name} has solutions to judge: evaluate on it with `megatron-rl eval`"
        yield from _grading_problems(f"{HELD_OUT}: {own.name}", own.reward, own.template)
    names = [own.name for own in spec.data.held_out]
    if clash := sorted({*names} & {*roles}):
        yield f"{HELD_OUT}: {clash[0]} is also the name of a role: give the set another name"
    followed = {"best": settings.best, "early_stop": settings.early_stop}
    for place, metric in {name: own.metric for name, own in followed.items() if own is not None}.items():
        role, *inner = metric.split("/")
        of = [own for own in spec.data.held_out if own.name == inner[0]] or spec.data.held_out if inner else []
        k = re.fullmatch(r"pass@(\d+)", inner[-1]) if inner else None
        if k is not None and any(int(k[1]) not in own.k or own.n == 1 for own in of):
            yield (
                f"evaluation.{place}.metric = {metric!r}: a set has n = 1, or no {k[1]} in its k; "
                "raise evaluation.n, and add it to evaluation.k"
            )
        if len(names) == 1 and inner[:1] == names:
            yield (
                f"evaluation.{place}.metric = {metric!r}: with one set the metric is called "
                f"{'/'.join([role, *inner[1:]])!r}"
            )
        if roles and role not in roles and inner:
            yield f"evaluation.{place}.metric = {metric!r}: name a metric of one of the roles {', '.join(roles)}"


def source_problems(spec: RunSpec) -> Iterator[str]:
    """Yields error messages about the reward functions and the prompt templates of the sources."""
    for name, own in spec.data.sources.items():
        place, reward = f"{SOURCES}.{name}", own.reward or spec.reward
        yield from _grading_problems(place, reward, own.template)
        for key in ("range", "max_failure_share"):
            if (found := vars(reward)[key]) != (wanted := vars(spec.reward)[key]):
                yield (
                    f"{place}.reward.{key} = {found} with reward.{key} = {wanted}: all rewards of a run have the same "
                    f"{key}; set both to one value"
                )


def _grading_problems(place: str, reward: Reward, template: str | None) -> Iterator[str]:
    """Yields error messages about the reward function and the prompt template of a set of problems, for a template that
    does not exist or has no {question}. `place`: name of the set for the messages."""
    try:
        plugins.look_at(Use(target=reward.target, args=reward.args))
        if template is not None and "{question}" not in read_template(template):
            yield f"{place}: template = {template!r}: the text has no {{question}}"
    except (ConfigError, FileNotFoundError) as error:
        yield f"{place}: {error}"
