"""Defines the base class of a model family: how config.json is read, the model's parameters, and its arithmetic.

The defaults are Llama's: norms before attention and before a gated feed-forward layer, rotary embedding, no biases. A
family with another architecture overrides what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

from megatron_rl.config.base import refusing
from megatron_rl.config.schema import ConfigError
from megatron_rl.models import blocks
from megatron_rl.models.rows import OuterRows, Row
from megatron_rl.models.sizes import AttentionKind, Features, Rotary, Routing, Sizes

KEYS = {  # field of Sizes -> key of config.json
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
}
# fields of Sizes that are positive in every model
ALWAYS = ("num_layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
MOST, MOST_LAYERS = 10**8, 10**4  # upper bounds for a size and for the number of layers in a config.json
# Kinds of rotary embedding whose frequencies do not depend on the sequence length. Trainer and engines compute the
# frequencies once. The frequencies of the kinds "longrope" and "dynamic" depend on the length of each sequence.
ROTARY = ("default", "linear", "yarn", "llama3")
# {key of config.json that changes a model's arithmetic: the only supported value}.
# A missing key, or null as the value, is also accepted.
SETTLED: Mapping[str, Any] = {
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
}
# {key of config.json: the value with which every layer has experts}
EVERY_LAYER: Mapping[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}


def requires_keys(model_type: str, where: str) -> AbstractContextManager[None]:
    """Context manager that converts a KeyError to a ConfigError. The message says that the config.json named `where`
    lacks a key that a model of type `model_type` must have."""
    return refusing(lambda error: f"{where}: {error} is missing, which a {model_type} model must have", KeyError)


class Family:
    """A model family: all models with the same `model_type` in config.json. An instance reads the config.json of such
    models, describes their layers and parameters, and has no state."""

    model_type: ClassVar[str]
    keys: ClassVar[Mapping[str, str]] = KEYS
    settled: ClassVar[Mapping[str, Any]] = SETTLED
    has_experts: ClassVar[bool] = False
    has_shared_expert: ClassVar[bool] = False
    # Features that all models of the family have. The method `features` adds the features that a config.json sets.
    common: ClassVar[Features] = Features()
    # Public models of a family that a plug-in adds, as {name: contents of config.json}.
    # With these contents, a run can be planned without the models' files.
    # The public models of the built-in families are in known.yaml.
    known: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Checks the contents of a config.json and returns the sizes of the model.

        `where`: the config's file or name, for error messages.

        Raises ConfigError, which names the key, if a key is missing or its value is not supported. Ignoring an
        unsupported value would result in a different model.
        """
        for field, key in self.keys.items():
            value, least = config.get(key), int(field in ALWAYS)
            most = MOST_LAYERS if field == "num_layers" else MOST
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise ConfigError(f"{where}: {key} = {str(value)[:40]}: give a whole number from {least} to {most}")
        for key, value in self.settled.items():
            if config.get(key, value) not in (value, None):
                raise ConfigError(f"{where}: {key} = {config[key]!r} is not supported, only {value!r} is")
        prefix, wrong = f"{where} is not the config.json of a {self.model_type} model", (AttributeError, OverflowError)
        with (
            requires_keys(self.model_type, where),
            refusing(lambda error: f"{prefix}: {error}", *wrong, TypeError, ValueError),
        ):
            sizes, features = self.sizes(config), self.features(config)
        for kind in (kind.rotary.kind for kind in features.kinds):
            if kind not in ROTARY:
                cure = (
                    f"; set it to default if no sequence is longer than {_positions(config)} tokens, which is the same"
                )
                raise ConfigError(
                    f"{where}: rope_type {kind!r} is not supported: {', '.join(ROTARY)} are"
                    + cure * (kind == "dynamic")
                )
        return sizes

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        """Returns the sizes of the model described by a supported config.json. Raises KeyError if a key is missing."""
        fields = ["experts", "expert_ffn"] if self.has_experts else []
        fields += ["shared_ffn"] if self.has_shared_expert else []
        fields += ["num_layers", "hidden", "heads", "ffn", "vocab"]
        counts: dict[str, Any] = {field: int(config[self.key(field, config)]) for field in fields}
        return Sizes(
            family=self.model_type,
            kv_heads=int(config.get(self.keys["kv_heads"]) or counts["heads"]),
            head_dim=int(config.get(self.keys["head_dim"]) or counts["hidden"] // counts["heads"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            **counts,
        )

    def key(self, field: str, config: Mapping[str, Any]) -> str:
        """Returns the key of `config`, the contents of a config.json, that holds the value of a field of Sizes."""
        if field == "experts" and "num_local_experts" in config:
            return "num_local_experts"  # transformers 5 uses either key
        return self.keys[field]

    def features(self, config: Mapping[str, Any]) -> Features:
        """Returns the features of the model that the contents of a config.json describe: kinds of attention, routing,
        and other properties of its arithmetic.

        Raises KeyError for a model with experts if the number of experts per token is missing.
        """
        return replace(
            self.common,
            norm_eps=float(config.get("rms_norm_eps", self.common.norm_eps)),
            kinds=self.kinds(config),
            routing=self.routing(config) if self.has_experts else None,
        )

    def kinds(self, config: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
        """Returns the kinds of attention (sliding window and rotary embedding) of the model that the contents of a
        config.json describe."""
        return (AttentionKind(rotary=Rotary.read(config)),)

    def routing(self, config: Mapping[str, Any]) -> Routing:
        """Returns how the routers of a model with experts choose the experts of a token."""
        return Routing(
            chosen=int(config["num_experts_per_tok"]), renormalised=bool(config.get("norm_topk_prob", False))
        )

    def leaves_out(self, sizes: Sizes, tensor: str) -> bool:
        """Checks whether a tensor of a public checkpoint is not part of the model and can be skipped."""
        return tensor.endswith("rotary_emb.inv_freq")

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the `Row`s (descriptions of Megatron parameters) of layer `number`, in the order of computation."""
        rows = blocks.attention(sizes, bias=self.common.qkv_bias, head_norms=self.common.qk_norm)
        if not self.has_experts:
            return rows + blocks.feed_forward(sizes)
        rows += blocks.experts(sizes)
        return rows + blocks.shared_expert(sizes) if self.has_shared_expert else rows

    def ends(self, sizes: Sizes) -> OuterRows:
        """Returns the `Row`s (descriptions of Megatron parameters) of the embedding, the final norm and the output
        layer."""
        return blocks.ends(sizes)


def _positions(config: Mapping[str, Any]) -> str:
    """Returns the number of tokens up to which the rotary embedding "dynamic" equals "default", and its key in
    config.json."""
    return f"max_position_embeddings = {config.get('max_position_embeddings')}"


def windowless(config: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if the sliding window in a config.json is shorter than the model's maximum context."""
    window = config.get("sliding_window")
    if window is not None and window < int(config.get("max_position_embeddings", window)):
        raise ConfigError(
            f"{where}: sliding_window = {window} is not supported, attention here is full: "
            "set it to null if no sequence is longer"
        )
