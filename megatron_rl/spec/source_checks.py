"""Checks the sources of a run's training problems."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import SOURCES
from megatron_rl.spec.evaluation_checks import grading_problems
from megatron_rl.spec.run_spec import RunSpec


def source_problems(spec: RunSpec) -> Iterator[str]:
    """Yields error messages about the reward functions and the prompt templates of the sources."""
    for name, own in spec.data.sources.items():
        place, reward = f"{SOURCES}.{name}", own.reward or spec.reward
        yield from grading_problems(place, reward, own.template)
        if reward.range != spec.reward.range:
            yield (
                f"{place}.reward.range = {list(reward.range)} with reward.range = {list(spec.reward.range)}: rewards "
                "of one run have one range; scale the scores, or set both to the same range"
            )
