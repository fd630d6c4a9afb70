"""Says which settings of a role its model does not allow, beside layouts (divisibility.py).

Config checks and the trainer both ask it, so that `megatron-rl check` refuses what a run would refuse when it starts.
"""

from __future__ import annotations

from megatron_rl.config.schema import ConfigError, Model, RoleConfig
from megatron_rl.models import core_settings
from megatron_rl.models.sizes import Features, Sizes

# Kinds of rotary embedding that have the same frequencies in every sequence of a model's context: trainer and embedded
# engine compute them once. Those of longrope depend on the length of the sequence.
ROTARY = ("default", "linear", "dynamic", "yarn", "llama3")


def setting_problems(
    sizes: Sizes, features: Features, settings: Model, name: str, *, router_replay: bool = False
) -> list[str]:
    """Returns a sentence, with its cure, for every setting that the model does not allow. `name`: what to call it.

    `settings` and `router_replay` are the role's. What a machine does not allow is not looked at.
    """
    found = [
        f"rope_type {kind.rotary.kind!r} of {name} is not supported: {', '.join(ROTARY)} are"
        for kind in features.kinds
        if kind.rotary.kind not in ROTARY
    ]
    if router_replay and not sizes.experts:
        found.append(f"router_replay = true, and {name} has no experts: set it to false")
    if settings.router_aux_loss and not sizes.experts:
        found.append(f"model.router_aux_loss = {settings.router_aux_loss}, and {name} has no experts: set it to 0")
    if settings.fp8 and core_settings.needs_own_layers(sizes, features):
        found.append(f"model.fp8 = true, and Transformer Engine's layers cannot compute {name}: set it to false")
    try:
        core_settings.routed(sizes, features, settings.router_aux_loss)
    except ConfigError as error:
        found.append(f"{name}: {error}")
    return found


def prefix_problems(role: RoleConfig) -> list[str]:
    """Returns a sentence, with its cure, for every setting of a role that `shared_prefixes` does not go with."""
    if not role.shared_prefixes:
        return []
    found = []
    if not role.packed:
        found.append(
            "shared_prefixes = true with packed = false: a padded row holds one whole sequence; set packed to true, or "
            "shared_prefixes to false"
        )
    if role.layout.cp > 1:
        found.append(
            f"shared_prefixes = true with layout.cp = {role.layout.cp}: context parallelism cuts whole sequences; set "
            "cp to 1, or shared_prefixes to false"
        )
    if role.model.router_aux_loss:
        found.append(
            f"shared_prefixes = true with model.router_aux_loss = {role.model.router_aux_loss}: that loss would count "
            "a prompt once and not once per sample, which is another loss; set it to 0, or shared_prefixes to false"
        )
    return found
