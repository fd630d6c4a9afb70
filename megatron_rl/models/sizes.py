"""Holds the sizes that decide the shapes of a model's tensors, and the features that decide its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a decoder of one of the families, in Hugging Face's terms."""

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
    dense_layers: int = 0  # layers in front that have no experts, in a model whose others do
    # Attention through a latent: keys and values of all heads are made of one vector of kv_rank elements. A head's
    # query and key have head_dim elements, of which the last rope_dim are rotated; all heads share the key's rotated
    # ones.
    kv_rank: int = 0  # 0: no latent
    q_rank: int = 0  # width of the vector that queries are made of; 0: they are made of the hidden state
    rope_dim: int = 0  # 0: all of head_dim
    value_dim: int = 0  # elements of a head's value; 0: head_dim

    @property
    def rotated(self) -> int:
        """Returns how many elements of a head's query and key a rotary embedding turns."""
        return self.rope_dim or self.head_dim

    @property
    def value_width(self) -> int:
        """Returns the elements of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def expert_layers(self) -> int:
        """Returns how many layers have experts."""
        return self.num_layers - self.dense_layers if self.experts else 0

    @property
    def attention_weights(self) -> int:
        """Returns the number of weights of one layer's attention, norms and biases aside."""
        if not self.kv_rank:
            return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        queries = (self.q_rank or self.hidden) * self.heads * self.head_dim + self.hidden * self.q_rank
        both = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        keys = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * both
        return queries + keys + self.heads * self.value_dim * self.hidden

    @property
    def cached(self) -> int:
        """Returns how many numbers an engine keeps of one token in a layer: keys and values, or their latent."""
        return self.kv_rank + self.rope_dim if self.kv_rank else 2 * self.kv_heads * self.head_dim

    def cache_copies(self, tp: int) -> int:
        """Returns how often the ranks of an engine keep these numbers: a latent belongs to all heads."""
        return tp if self.kv_rank else max(1, tp // self.kv_heads)

    def is_sparse(self, layer: int) -> bool:
        """Says whether a layer has experts."""
        return bool(self.experts) and layer >= self.dense_layers


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary embedding: its base, and how its frequencies are scaled for long contexts."""

    theta: float = 10_000.0
    kind: str = "default"  # rope_type of config.json
    factor: float = 8.0  # by which a scaled context is longer; not used by the kind "default"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads it as transformers 5 writes it (rope_parameters) or as older files spell it (rope_theta and
        rope_scaling)."""
        told = config.get("rope_parameters") or {
            "rope_theta": config.get("rope_theta", cls.theta),
            **(config.get("rope_scaling") or {}),
        }
        kind = told.get("rope_type", told.get("type", "default"))
        return cls(theta=float(told["rope_theta"]), kind=kind, factor=float(told.get("factor", cls.factor)))


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The way a router chooses experts: those of the largest scores, whose outputs it weighs by these."""

    chosen: int  # experts of a token
    renormalised: bool  # whether the chosen ones' scores are made to sum to 1
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    biased: bool = False  # every expert has a bias, which is not trained: added to the scores for the choice alone
    scale: float = 1.0  # of the weights
    shared_gate: bool = True  # whether a gate weighs what a shared expert adds
    # Experts stand in so many groups. A token sees those of its groups_chosen best groups alone; a group is as good as
    # the sum of its group_best largest scores. One group: no limit.
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """The reach of a layer's attention, and its rotary embedding. The layers of a model may be of several kinds."""

    rotary: Rotary = Rotary()
    window: int | None = None  # a token sees so many, itself and those right before it; None: all before it
    layer_type: str | None = None  # config.json's word for such layers, where there are several kinds


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features of a model's arithmetic that differ between families, or between models of one.

    Settings of Megatron-core, planning, the embedded engine and checks read them; what a family does not name is as in
    Llama.
    """

    norm_eps: float = 1e-6
    norm_from_one: bool = False  # norms multiply by 1 + weight
    norms_before: bool = True  # what attention and feed-forward read is normalised
    norms_after: bool = False  # what attention and feed-forward add is normalised
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gate
    qkv_bias: bool = False  # query, key and value have a bias
    qk_norm: bool = False  # queries and keys are normalised, head by head
    qk_norm_joint: bool = False  # queries and keys are normalised, over all heads at once
    softmax_scale: float | None = None  # of attention's scores; None: 1 / sqrt(head_dim)
    latent_eps: float = 1e-6  # of the norms of latents, whatever norm_eps is
    embedding_scale: float = 1.0  # by which embedded tokens are multiplied, rounded to the model's dtype
    kinds: tuple[AttentionKind, ...] = (AttentionKind(),)
    pattern: tuple[int, ...] = ()  # the kind of every layer, as a place in `kinds`; empty: all are of the first
    routing: Routing | None = None  # None: the model has no experts

    def kind_of(self, layer: int) -> int:
        """Returns the place in `kinds` of a layer's attention."""
        return self.pattern[layer] if self.pattern else 0

    @property
    def experts_per_token(self) -> int:
        """Returns how many experts a token sees; 0 for a dense model."""
        return 0 if self.routing is None else self.routing.chosen
