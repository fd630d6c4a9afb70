"""Determines which matrices of a model can have a LoRA adapter, and which adapter settings a model does not support.

This module does not import torch, so that config checks, planning and the trainer can share it.
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

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # the file names of an adapter in peft's format
# Megatron modules of a layer whose matrices can have an adapter, in the order of computation.
# In a layer with experts, only the first two modules can have adapters.
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
# modules whose weights are split by columns over the tensor-parallel ranks
INWARD = ("self_attention.linear_proj", "mlp.linear_fc2")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # the allowed `lora.targets` of a model with experts
# Keys of peft's adapter_config.json that never change the result of a saved adapter.
# They are names, settings that matter only during training, and values that follow from the tensors.
_HARMLESS = {
    "peft_version", "base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode", "r",
    "lora_alpha", "target_modules", "exclude_modules", "layers_pattern", "lora_dropout", "eva_config", "megatron_core",
    "qalora_group_size",
}  # fmt: skip
# For other keys of adapter_config.json: the values with which the adapted weight is W + alpha / r B A.
# Unlisted keys, such as keys of later peft versions, must be off (null, false or empty).
# Unlisted values of init_lora_weights are initialisation methods that change W whenever peft loads the adapter.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (None, [], ["score"]),  # the head of a critic or reward model
}
_OFF = (None, False, [], {})


@dataclass(frozen=True)
class Projection:
    """A matrix [rows, columns] of a layer to which a LoRA adapter can be added. The adapter consists of the matrices A
    [r, columns] and B [rows, r]."""

    name: str  # name in lora.targets, e.g. q_proj
    module: str  # module in a Hugging Face layer, e.g. self_attn.q_proj
    linear: str  # Megatron module whose weight contains the matrix, alone or joined with others
    rows: int
    columns: int

    @property
    def inward(self) -> bool:
        """True if the matrix is split by columns over the tensor-parallel ranks, False if it is split by rows."""
        return self.linear in INWARD

    def elements(self, rank: int, tp: int = 1) -> float:
        """Returns the number of elements of A and B together on one of `tp` tensor-parallel ranks. `rank`: the LoRA
        rank r. One of A and B is sharded, and the other is replicated."""
        cut, replicated = (self.columns, self.rows) if self.inward else (self.rows, self.columns)
        return rank * (cut / tp + replicated)


def not_plain(config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of peft's adapter_config.json whose values may make the adapted weight different from W + alpha
    / r B A.

    These are all keys except those that are known to be harmless, are off (null, false or empty), or have a value
    listed in `_PLAIN`.
    """
    return [key for key, value in config.items() if key not in _HARMLESS and value not in _PLAIN.get(key, _OFF)]


def refusal(config: Mapping[str, Any], key: str) -> str:
    """Returns an error message that says why the value of `key` in adapter_config.json is not supported, and how to fix
    this. `config`: the contents of the file."""
    return (
        f"{CONFIG} says {key} = {config[key]!r}, which changes what the adapter computes, or is not known, and is not "
        "supported; give a plain LoRA adapter, or the model that peft's merge_and_unload makes"
    )


def target_names(config: Mapping[str, Any]) -> set[str] | None:
    """Returns the names of the matrices listed in adapter_config.json, without their parent modules.

    Returns None if the file has a pattern or "all-linear" in place of a list. In this case the names must be taken from
    the tensors.
    """
    targets = config.get("target_modules")
    return {str(name).rpartition(".")[2] for name in targets} if isinstance(targets, list) else None


@lru_cache(maxsize=4096)
def projections(sizes: Sizes, layer: int) -> tuple[Projection, ...]:
    """Returns the matrices in layer `layer` that can have an adapter. Matrices that one Megatron module joins have the
    same order as in the module's weight."""
    matrices = []
    for row in layer_rows(sizes, layer):
        linear = row.name.removesuffix(".weight")
        if linear not in LINEARS:
            continue
        for source in row.sources:
            module = source.name.removesuffix(".weight")
            matrices.append(Projection(module.rpartition(".")[2], module, linear, source.rows, source.columns))
    return tuple(matrices)


def linears(sizes: Sizes, layer: int) -> list[str]:
    """Returns the Megatron modules in layer `layer` whose matrices can have an adapter, in the order of LINEARS."""
    adaptable = {matrix.linear for matrix in projections(sizes, layer)}
    return [linear for linear in LINEARS if linear in adaptable]


def adapted(sizes: Sizes, layer: int, lora: Lora) -> list[Projection]:
    """Returns the matrices of layer `layer` that have an adapter with the LoRA settings of a role."""
    return [matrix for matrix in projections(sizes, layer) if matrix.name in lora.targets]


def num_elements(sizes: Sizes, lora: Lora) -> int:
    """Returns the number of trainable parameters that the adapters with these LoRA settings have in the whole model."""
    return int(sum(p.elements(lora.rank) for layer in range(sizes.num_layers) for p in adapted(sizes, layer, lora)))


def owners(roles: Mapping[str, RoleConfig], ranks: Mapping[str, range] | None = None) -> dict[str, str]:
    """Returns {role with LoRA adapters: role whose base model it shares in the trainer}. The second role is the role
    itself or an earlier role.

    Roles with the same model files, dtype, recomputation, layout and ranks share one base model, because adapters do
    not change the base model. `ranks`: {role: its ranks}; None: each role has all ranks.
    """
    ranks = ranks or {}
    base_of_role: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, role in roles.items():
        if role.lora is not None and role.has_policy:
            model = role.model
            # Training changes a head, so a role with a head does not share a model.
            alone = None if role.head is None and not role.loss.value_coef else name
            recomputation = model.recompute, model.recompute_modules
            key = model.path, model.dtype, recomputation, role.layout, ranks.get(name), alone
            base_of_role[name] = first.setdefault(key, name)
    return base_of_role


def adapter_problems(sizes: Sizes, role: RoleConfig, name: str) -> list[str]:
    """Returns one error message, with a fix, for each LoRA setting of a role that the role's model does not support.

    `name`: the name of the role's model in the messages.
    """
    lora = role.lora
    if lora is None:
        return []
    errors = []
    if sizes.experts and (others := [target for target in lora.targets if target not in ATTENTION]):
        errors.append(
            f"lora.targets = {list(lora.targets)}, and {name} has experts: its attention alone can have adapters, "
            f"{others[0]} cannot; set lora.targets to [{', '.join(ATTENTION)}]"
        )
    if sizes.kv_rank:
        errors.append(f"lora, and {name} attends through latents: adapters of these are not written; leave lora out")
    if role.model.fp8:
        errors.append("lora with model.fp8 = true: adapters are computed in the model's own dtype; set fp8 to false")
    if role.model.init == "random":
        errors.append("lora with model.init = 'random': adapters of random weights learn little; set it to pretrained")
    if errors or lora.path is None:
        return errors
    return _file_problems(lora, lora.path)


def _file_problems(lora: Lora, path: str) -> list[str]:
    """Returns one error message for each problem with the adapter at `path`, from which training starts. Only its
    adapter_config.json is checked, against the role's LoRA settings."""
    file = Path(path) / CONFIG
    try:
        config = read_object(file)
    except ConfigError as error:
        return [f"lora.path = {path}: {error}; give the directory of an adapter"]
    errors = [f"lora.path = {path}: its {refusal(config, key)}" for key in not_plain(config)]
    targets = target_names(config)
    compared: dict[str, tuple[Any, Any]] = {
        "rank": (config.get("r"), lora.rank),
        "alpha": (config.get("lora_alpha"), lora.alpha),
        "targets": (None, None) if targets is None else (sorted(targets), sorted(lora.targets)),
    }
    errors += [
        f"lora.{key} = {of_role}, and the adapter in lora.path = {path} has {of_file}: set lora.{key} to that"
        for key, (of_file, of_role) in compared.items()
        if of_file != of_role
    ]
    return errors
