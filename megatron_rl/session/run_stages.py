"""Applies the settings of a run's stages to its policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.session import builders
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.training.device_memory import DeviceMemory


def in_stages(
    spec: RunSpec, policies: Mapping[str, MegatronPolicy], memory: DeviceMemory, say: Callable[[str], None]
) -> Callable[[int], None]:
    """Returns a function for every rank to call before an iteration with the iteration's index. It applies the settings
    of the iteration's stage to the policies, and replaces the reference models that are due
    (loss.reset_reference_every).
    """
    now = spec

    def begin(number: int) -> None:
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

    return begin
