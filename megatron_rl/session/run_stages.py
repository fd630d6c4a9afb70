"""Applies the settings of a run's stages to its policies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.session import builders
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.training.update import Trainee

Around = Callable[[int], AbstractContextManager[None]]


def in_stages(
    spec: RunSpec, policies: Mapping[str, MegatronPolicy], trainees: dict[str, Trainee], *,
    say: Callable[[str], None], around: Around,
) -> Around:  # fmt: skip
    """Returns the callback `around` of the training loop (see loop.Hooks), which first gives the policies the settings
    of the iteration's stage. `trainees`: loss and settings of each policy, which are replaced when a stage begins."""
    now = spec

    @contextlib.contextmanager
    def begin(number: int) -> Iterator[None]:
        nonlocal now
        if (own := spec.at(number)) is not now:
            now = own
            for name, policy in policies.items():
                policy.adopt(own.roles[name])
                trainees[name] = builders.trainee(own.roles[name], own.run, policy, trainees[name].refit)
            changes = next((stage.overrides for stage in spec.stages if stage.spec is own), {})
            told = ", ".join(f"{name} = {value}" for name, value in changes.items())
            say(f"iteration {number + 1} begins a stage: {told or 'the settings outside of stages'}")
        with around(number):
            yield

    return begin
