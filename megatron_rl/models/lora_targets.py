"""Says which matrices of a model can have a low-rank adapter (LoRA), and which settings of adapters a model refuses.

Nothing here imports torch: config checks, planning and the trainer ask it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_rl.config.base import ConfigError, read_object
from megatron_rl.config.schema import Lora, RoleConfig
from megatron_rl.models.registry import layer_rows
from megatron_rl.models.sizes import Sizes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # an adapter's files, as peft names them
# Megatron's modules of a layer whose matrices can have one, in the order in which a layer computes them. A layer with
# experts has the first two.
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
INWARD = ("self_attention.linear_proj", "mlp.linear_fc2")  # those that tensor ranks cut by columns
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # the targets of a model with experts
# Keys of peft's adapter_config.json that do not change what a saved adapter computes, whatever their value is: names,
# settings of its training, and what the tensors say themselves.
_HARMLESS = {
    "peft_version", "base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode", "r",
    "lora_alpha", "target_modules", "exclude_modules", "layers_pattern", "lora_dropout", "eva_config", "megatron_core",
    "qalora_group_size",
}  # fmt: skip
# Values of the other keys under which an adapter is W + alpha / r B A. Keys that are not listed, such as those of later
# versions of peft, must be off. Ways to initialise that are not listed change W whenever peft loads the adapter.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_OFF = (None, False, [], {})


@dataclass(frozen=True)
class Projection:
    """One matrix [rows, columns] of a layer that can have an adapter: A [r, columns] and B [rows, r]."""

    name: str  # as in lora.targets, q_proj
    module: str  # its module in a Hugging Face layer, self_attn.q_proj
    linear: str  # the module of Megatron that computes it, with others where they are joined
    rows: int
    columns: int

    @property
    def inward(self) -> bool:
        """Says whether tensor ranks cut the matrix by columns. They cut the others by rows."""
        return self.linear in INWARD

    def elements(self, rank: int, tp: int = 1) -> float:
        """Returns the numbers of A and B on one of `tp` tensor ranks: the side that the ranks cut is shared out."""
        cut, whole = (self.columns, self.rows) if self.inward else (self.rows, self.columns)
        return rank * (cut / tp + whole)


def not_plain(told: Mapping[str, Any]) -> list[str]:
    """Returns the settings of peft's adapter_config.json under which an adapter may not be W + alpha / r B A: all that
    are neither harmless nor off."""
    return [key for key, value in told.items() if key not in _HARMLESS and value not in _PLAIN.get(key, _OFF)]


def refusal(told: Mapping[str, Any], key: str) -> str:
    """Returns why an adapter with this setting of adapter_config.json is refused, and what to do."""
    return (
        f"{CONFIG} says {key} = {told[key]!r}, which changes what the adapter computes, or is not known, and is not "
        "supported; give a plain LoRA adapter, or the model that peft's merge_and_unload makes"
    )


def target_names(told: Mapping[str, Any]) -> set[str] | None:
    """Returns the names of the matrices that adapter_config.json lists, without the modules around them; None where it
    has a pattern or the word all-linear, which say less than the tensors do."""
    targets = told.get("target_modules")
    return {str(name).rpartition(".")[2] for name in targets} if isinstance(targets, list) else None


@lru_cache(maxsize=4096)
def projections(sizes: Sizes, layer: int) -> tuple[Projection, ...]:
    """Returns the matrices of a layer that can have an adapter, in the order in which Megatron joins them."""
    found = []
    for row in layer_rows(sizes, layer):
        linear = row.name.removesuffix(".weight")
        if linear not in LINEARS:
            continue
        for source in row.sources:
            module = source.name.removesuffix(".weight")
            found.append(Projection(module.rpartition(".")[2], module, linear, source.rows, source.columns))
    return tuple(found)


def linears(sizes: Sizes, layer: int) -> list[str]:
    """Returns Megatron's modules of a layer whose matrices can have an adapter, in the order of LINEARS."""
    there = {found.linear for found in projections(sizes, layer)}
    return [linear for linear in LINEARS if linear in there]


def adapted(sizes: Sizes, layer: int, lora: Lora) -> list[Projection]:
    """Returns the matrices of a layer that have an adapter under these settings."""
    return [found for found in projections(sizes, layer) if found.name in lora.targets]


def num_elements(sizes: Sizes, lora: Lora) -> int:
    """Returns the number of trained numbers of a whole model with these adapters."""
    return int(sum(p.elements(lora.rank) for layer in range(sizes.num_layers) for p in adapted(sizes, layer, lora)))


def owners(roles: Mapping[str, RoleConfig]) -> dict[str, str]:
    """Returns {role with adapters: the role whose model in the trainer it computes with}, itself or one before it.

    Roles of the same model files, dtype, recomputation and layout share one: adapters leave it as it is.
    """
    found: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, role in roles.items():
        if role.lora is not None and role.has_policy:
            model = role.model
            key = model.path, model.dtype, model.recompute, model.recompute_modules, role.layout
            found[name] = first.setdefault(key, name)
    return found


def adapter_problems(sizes: Sizes, role: RoleConfig, name: str) -> list[str]:
    """Returns a sentence, with its cure, for each setting that a role with adapters may not have.

    `name`: what to call the role's model.
    """
    lora = role.lora
    if lora is None:
        return []
    found = []
    if sizes.experts and (others := [target for target in lora.targets if target not in ATTENTION]):
        found.append(
            f"lora.targets = {list(lora.targets)}, and {name} has experts: its attention alone can have adapters, "
            f"{others[0]} cannot; set lora.targets to [{', '.join(ATTENTION)}]"
        )
    if sizes.kv_rank:
        found.append(f"lora, and {name} attends through latents: adapters of these are not written; leave lora out")
    if role.model.fp8:
        found.append("lora with model.fp8 = true: adapters are computed in the model's own dtype; set fp8 to false")
    if role.model.init == "random":
        found.append("lora with model.init = 'random': adapters of random weights learn little; set it to pretrained")
    if found or lora.path is None:
        return found
    return _file_problems(lora, lora.path)


def _file_problems(lora: Lora, path: str) -> list[str]:
    """Returns what is wrong with the adapter that training is to start from, as far as its settings tell."""
    file = Path(path) / CONFIG
    try:
        told = read_object(file)
    except ConfigError as error:
        return [f"lora.path = {path}: {error}; give the directory of an adapter"]
    found = [f"lora.path = {path}: its {refusal(told, key)}" for key in not_plain(told)]
    targets = target_names(told)
    own: dict[str, tuple[Any, Any]] = {
        "rank": (told.get("r"), lora.rank),
        "alpha": (told.get("lora_alpha"), lora.alpha),
        "targets": (None, None) if targets is None else (sorted(targets), sorted(lora.targets)),
    }
    found += [
        f"lora.{key} = {asked}, and the adapter in lora.path = {path} has {there}: set lora.{key} to that"
        for key, (there, asked) in own.items()
        if there != asked
    ]
    return found
