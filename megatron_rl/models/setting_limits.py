"""Finds the settings of a role that the role's model does not support, except layouts (see divisibility.py).

Config checks and the trainer share these checks. Therefore `megatron-rl check` refuses the settings that a run would
refuse at its start.
"""

from __future__ import annotations

from megatron_rl.config.base import refusal_of
from megatron_rl.config.schema import Model, RoleConfig
from megatron_rl.models import core_settings
from megatron_rl.models.sizes import Features, Sizes


def setting_problems(
    sizes: Sizes, features: Features, settings: Model, name: str, *, router_replay: bool = False
) -> list[str]:
    """Returns one error message, with a fix, for each setting of a role that the role's model does not support. Returns
    an empty list if all settings are supported.

    `settings`: the `model` section of the role.
    `router_replay`: the role's setting of the same name.
    `name`: the name of the model in the messages.

    Limits of the hardware are not checked.
    """
    errors = list[str]()
    if router_replay and not sizes.experts:
        errors.append(f"router_replay = true, and {name} has no experts: set it to false")
    if settings.router_aux_loss and not sizes.experts:
        errors.append(f"model.router_aux_loss = {settings.router_aux_loss}, and {name} has no experts: set it to 0")
    if settings.attention_backend == "flash" and features.sinks:
        errors.append(
            f"model.attention_backend = 'flash', and {name} has attention sinks, which torch's flash attention cannot "
            "compute: set it to auto"
        )
    if settings.fp8 and core_settings.needs_own_layers(sizes, features):
        errors.append(f"model.fp8 = true, and Transformer Engine's layers cannot compute {name}: set it to false")
    return errors + refusal_of(core_settings.routed, sizes, features, place=f"{name}: ")


def prefix_problems(role: RoleConfig) -> list[str]:
    """Returns one error message, with a fix, for every setting of a role that is incompatible with `shared_prefixes`
    (computing a prompt that several rollouts share only once)."""
    cp, aux_loss = role.layout.cp, role.model.router_aux_loss
    reasons = {
        f"layout.cp = {cp}: context parallelism cuts whole sequences; set cp to 1": cp > 1,
        f"model.router_aux_loss = {aux_loss}: that loss would count a prompt once and not once per sample, which is "
        "another loss; set it to 0": aux_loss > 0,
    }
    return [
        f"shared_prefixes = true with {reason}, or shared_prefixes to false"
        for reason, holds in reasons.items()
        if holds and role.shared_prefixes
    ]
