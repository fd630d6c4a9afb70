"""Applies the settings of a run's stages to its policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.session import builders
from megatron_rl.spec.run_spec import RoleSpec, StageSpec
from megatron_rl.training.device_memory import DeviceMemory


def in_stages(
    stages: Sequence[StageSpec],
    roles: Mapping[str, RoleSpec],
    resets: Mapping[str, int],
    policies: Mapping[str, MegatronPolicy],
    memory: DeviceMemory,
    say: Callable[[str], None],
) -> Callable[[int], None]:
    """Returns a function for every rank to call before an iteration with the iteration's index. It applies the settings
    of the iteration's stage to the policies of the rank, and replaces the reference models that are due
    (loss.reset_reference_every).

    `roles`: the settings of iterations outside of stages. `resets`: {role: iterations between two replacements}.
    """
    now: StageSpec | None = None

    def begin(number: int) -> None:
        nonlocal now
        if (stage := next((stage for stage in stages if number < stage.until), None)) is not now:
            now = stage
            for name, role in (roles if stage is None else stage.spec.roles).items():
                if policy := policies.get(name):
                    policy.adopt(role)
                    memory.trainees[name] = builders.with_settings(memory.trainees[name], role)
            changes = {} if stage is None else stage.overrides
            told = ", ".join(f"{name} = {value}" for name, value in changes.items())
            say(f"iteration {number + 1} begins a stage: {told or 'the settings outside of stages'}")
        for name in due_resets(resets, number):
            if name in policies:
                with memory.weights(name):
                    policies[name].reset_reference()
            say(f"iteration {number + 1}: the weights of {name} become its reference, and its optimizer begins anew")

    return begin


def due_resets(resets: Mapping[str, int], number: int) -> list[str]:
    """Returns the names of the policies whose reference models are replaced before the iteration with this index."""
    return [name for name, every in resets.items() if number and number % every == 0]
