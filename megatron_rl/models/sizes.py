"""Defines the sizes that determine the shapes of a model's tensors, and the features that determine its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from megatron_rl.config.model import Head

ALPHA, CLAMP = 1.702, 7.0  # constants of the activation "clamped_silu"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a decoder model, such as the number of layers."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # intermediate width of a dense feed-forward layer
    vocab: int
    tied: bool  # whether the output layer shares its weights with the embedding
    experts: int = 0  # number of experts per layer; 0 for a dense model
    expert_ffn: int = 0  # intermediate width of an expert
    shared_ffn: int = 0  # intermediate width of the shared expert; 0 if there is no shared expert
    dense_layers: int = 0  # number of leading layers without experts, in a model whose other layers have experts
    # Multi-head latent attention: keys and values of all heads are projected from one latent vector [kv_rank].
    # A head's query and key have head_dim elements, of which the last rope_dim elements are rotated.
    # All heads share the rotated part of the key.
    kv_rank: int = 0  # width of the key/value latent; 0 if attention has no latent
    q_rank: int = 0  # width of the query latent; 0 if queries are projected from the hidden state
    rope_dim: int = 0  # number of rotated elements of a head's query and key; 0 if all of head_dim are rotated
    value_dim: int = 0  # number of elements of a head's value; 0: same as head_dim
    # what the model's head computes, with one output per token; None for a language model, which has an output layer
    head: Head | None = None

    @property
    def rotated(self) -> int:
        """Returns the number of elements of a head's query and key that the rotary embedding rotates."""
        return self.rope_dim or self.head_dim

    @property
    def value_width(self) -> int:
        """Returns the number of elements of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def outputs(self) -> int:
        """Returns the number of outputs per token: the size of the vocabulary, or 1 if a head replaces the output
        layer."""
        return self.vocab if self.head is None else 1

    @property
    def expert_layers(self) -> int:
        """Returns the number of layers that have experts."""
        return self.num_layers - self.dense_layers if self.experts else 0

    @property
    def attention_weights(self) -> int:
        """Returns the number of elements of the weight matrices of one layer's attention, without norms and biases."""
        if not self.kv_rank:
            return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        queries = (self.q_rank or self.hidden) * self.heads * self.head_dim + self.hidden * self.q_rank
        both = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        keys = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * both
        return queries + keys + self.heads * self.value_dim * self.hidden

    @property
    def cached(self) -> int:
        """Returns the number of elements per token and layer in an engine's KV cache: keys and values, or the latent
        vector of latent attention."""
        return self.kv_rank + self.rope_dim if self.kv_rank else 2 * self.kv_heads * self.head_dim

    def cache_copies(self, tp: int) -> int:
        """Returns how many copies of a token's KV cache the `tp` ranks of an engine hold together.

        With latent attention, every rank holds the whole latent vector. Otherwise, key/value heads are duplicated if
        there are fewer heads than ranks.
        """
        return tp if self.kv_rank else max(1, tp // self.kv_heads)

    def with_head(self, head: Head | None) -> Self:
        """Returns the sizes of the same transformer with a head in place of the output layer. If `head` is None,
        returns these sizes unchanged."""
        return self if head is None else replace(self, head=head, tied=False)

    def is_sparse(self, layer: int) -> bool:
        """Checks whether layer `layer` has experts."""
        return bool(self.experts) and layer >= self.dense_layers


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary embedding: its base, and how its frequencies are scaled for long contexts."""

    theta: float = 10_000.0
    kind: str = "default"  # rope_type in config.json
    factor: float = 8.0  # ratio of scaled to original context length; not used by the kind "default"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads the rotary embedding from a config.json.

        Supports the keys of transformers 5 (rope_parameters) and of older files (rope_theta and rope_scaling).
        """
        rope = config.get("rope_parameters") or {
            "rope_theta": config.get("rope_theta", cls.theta),
            **(config.get("rope_scaling") or {}),
        }
        kind = rope.get("rope_type", rope.get("type", "default"))
        return cls(theta=float(rope["rope_theta"]), kind=kind, factor=float(rope.get("factor", cls.factor)))


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router chooses experts: a token goes to the experts with the largest scores, and the outputs of these
    experts are weighted by the scores."""

    chosen: int  # number of experts per token
    renormalised: bool  # whether the scores of the chosen experts are rescaled to sum to 1
    scores: Literal["softmax", "sigmoid"] = "softmax"  # function that turns the router's logits into scores
    # whether every expert has an untrained bias; score + bias determines the choice, the score the expert's weight
    biased: bool = False
    scale: float = 1.0  # factor that multiplies the weights of the chosen experts
    shared_gate: bool = True  # whether a gate scales the output of the shared expert
    # Group-limited routing: experts are divided into `groups` equal groups. With one group, there is no limit.
    # A token may only go to experts of the token's `groups_chosen` best groups.
    # The score of a group is the sum of its `group_best` largest expert scores.
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 1

    def within_groups(self, scores: Any) -> Any:
        """Returns a copy of the expert scores, a tensor [n, E], in which the scores of experts outside of the token's
        `groups_chosen` best groups are -inf. A group's score is the sum of its `group_best` highest expert scores."""
        by_group = scores.unflatten(-1, (self.groups, -1))  # [n, groups, E / groups]
        best = by_group.topk(self.group_best, dim=-1).values.sum(dim=-1).topk(self.groups_chosen, dim=-1).indices
        outside = best.new_ones(by_group.shape[:2]).bool().scatter_(1, best, False)
        return by_group.masked_fill(outside[..., None], -math.inf).flatten(1)


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """The sliding window and rotary embedding of a layer's attention. The layers of a model may be of several kinds."""

    rotary: Rotary = Rotary()
    # number of tokens that a token attends to, including itself; None: all earlier tokens
    window: int | None = None
    layer_type: str | None = None  # name of this kind of layer in config.json, if the model has several kinds


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features of a model's arithmetic that differ between families, or between the models of a family.

    Megatron-core settings, planning, the embedded engine and config checks depend on these features. The defaults are
    the values of Llama.
    """

    norm_eps: float = 1e-6
    norm_from_one: bool = False  # True if norms multiply by 1 + weight instead of weight
    norms_before: bool = True  # True if the inputs of attention and feed-forward are normalised
    # True if the outputs of attention and feed-forward are normalised before the residual addition
    norms_after: bool = False
    # activation function of the gate; "clamped_silu": activation of gpt-oss, whose rows of gate and up alternate
    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = "silu"
    qkv_bias: bool = False  # True if query, key and value projections have a bias
    bias: bool = False  # True if all projections have a bias, also those of routers and experts
    # True if each head has a learned score (sink) that takes part in the softmax over the keys and has no value
    sinks: bool = False
    qk_norm: bool = False  # True if queries and keys are normalised per head
    qk_norm_joint: bool = False  # True if queries and keys are normalised over all heads together
    softmax_scale: float | None = None  # factor of the attention scores; None: 1 / sqrt(head_dim)
    latent_eps: float = 1e-6  # epsilon of the norms of the latents in latent attention
    embedding_scale: float = 1.0  # factor of token embeddings, rounded to the model's dtype
    kinds: tuple[AttentionKind, ...] = (AttentionKind(),)
    pattern: tuple[int, ...] = ()  # for each layer, the index of its attention in `kinds`; empty: 0 for all
    routing: Routing | None = None  # None if the model has no experts

    def kind_of(self, layer: int) -> int:
        """Returns the index in `kinds` of the attention of layer `layer`."""
        return self.pattern[layer] if self.pattern else 0

    @property
    def experts_per_token(self) -> int:
        """Returns the number of experts per token; 0 for a dense model."""
        return 0 if self.routing is None else self.routing.chosen
