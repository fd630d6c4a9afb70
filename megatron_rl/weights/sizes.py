"""Reads the sizes that decide the shapes of a model's tensors from a config.json. Lists the supported families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron_rl.config.schema import ConfigError


@dataclass(frozen=True)
class Family:
    """The differences of one model_type from the others, in the names of its tensors. See docs/adding_a_model.md."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: str | None = None  # the module of router and experts within a layer; None for a dense model
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # the matrices of an expert
    expert_ffn: str = "moe_intermediate_size"  # the key of config.json with an expert's width
    shared: str | None = None  # the module of an expert that sees every token
    renormalised: bool = (
        False  # whether the chosen experts' probabilities always sum to 1; otherwise norm_topk_prob says so
    )
    always_slides: bool = False  # whether sliding_window takes effect without use_sliding_window


FAMILIES = {
    "llama": Family(),
    "mistral": Family(always_slides=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts="mlp"),
    "qwen2_moe": Family(qkv_bias=True, experts="mlp", shared="mlp.shared_expert"),
    "mixtral": Family(
        experts="block_sparse_moe",
        parts=("w1", "w3", "w2"),
        expert_ffn="intermediate_size",
        renormalised=True,
        always_slides=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a decoder of one of the FAMILIES, in Hugging Face's terms."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of a dense layer
    vocab: int
    tied: bool  # whether the output weights are the embedding
    experts: int = 0  # experts per layer; 0 for a dense model
    expert_ffn: int = 0  # width of an expert
    shared_ffn: int = 0  # width of the shared expert; 0 where there is none

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family].qk_norm

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str = "config.json") -> Self:
        """Reads the contents of a config.json. Raises ConfigError, with the key, for what is missing or unsupported."""
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise ConfigError(f"{where}: model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        _refuse(config, where, family)
        try:
            moe: dict[str, int] = {}
            if family.experts is not None:
                # transformers 5 writes either key.
                count = "num_local_experts" if "num_local_experts" in config else "num_experts"
                moe = {"experts": int(config[count]), "expert_ffn": int(config[family.expert_ffn])}
                moe |= {"shared_ffn": int(config["shared_expert_intermediate_size"])} if family.shared else {}
            heads = int(config["num_attention_heads"])
            return cls(
                family=kind,
                num_layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                ffn=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                **moe,
            )
        except KeyError as error:
            raise ConfigError(f"{where}: {error} is missing, which a {kind} model must have") from None


def _refuse(config: Mapping[str, Any], where: str, family: Family) -> None:
    """Raises ConfigError for a setting that would otherwise be ignored and so make another model."""
    wanted: dict[str, Any] = {"mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
    wanted |= {"qkv_bias": True} if family.qkv_bias else {"attention_bias": False}
    if family.experts is not None:
        wanted |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
    for key, value in wanted.items():
        if config.get(key, value) not in (value, None):
            raise ConfigError(f"{where}: {key} = {config[key]!r} is not supported, only {value!r} is")
    window = config.get("sliding_window")
    if family.always_slides and window is not None and window < int(config.get("max_position_embeddings", window)):
        raise ConfigError(
            f"{where}: sliding_window = {window} is not supported, attention here is full: "
            "set it to null if no sequence is longer"
        )
