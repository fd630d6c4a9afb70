"""Applies the settings of a run's stages to its policies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.session import builders
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.training.device_memory import DeviceMemory

Around = Callable[[int], AbstractContextManager[None]]


def in_stages(
    spec: RunSpec, policies: Mapping[str, MegatronPolicy], memory: DeviceMemory, *,
    say: Callable[[str], None], around: Around,
) -> Around:  # fmt: skip
    """Returns a callback for the field `around` of loop.Hooks, which wraps each iteration in a context manager. Before
    an iteration, the callback applies the settings of the iteration's stage to the policies, and replaces the reference
    models that are due (loss.reset_reference_every). `around`: another such callback, which wraps the iteration, too.
    """
    now = spec

    @contextlib.contextmanager
    def begin(number: int) -> Iterator[None]:
        nonlocal now
        if (own := spec.at(number)) is not now:
            now = own
            for name, policy in policies.items():
                policy.adopt(own.roles[name])
                memory.trainees[name] = builders.trainee(own.roles[name], own.run, policy, memory.trainees[name].refit)
            changes = next((stage.overrides for stage in spec.stages if stage.spec is own), {})
            told = ", ".join(f"{name} = {value}" for name, value in changes.items())
            say(f"iteration {number + 1} begins a stage: {told or 'the settings outside of stages'}")
        for name in [name for name, every in spec.reference_resets.items() if number and number % every == 0]:
            with memory.weights(name):
                policies[name].reset_reference()
            say(f"iteration {number + 1}: the weights of {name} become its reference, and its optimizer begins anew")
        with around(number):
            yield

    return begin
