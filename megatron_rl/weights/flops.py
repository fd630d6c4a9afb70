"""Counts a model's floating-point operations (FLOPs), for plans, the logged MFU of updates, and benchmarks.

A multiplication and an addition count as two operations. Matmuls with weights and the two matmuls of attention are
counted. Norms, rotary embedding and softmax are not counted, as is usual for MFU. Recomputation of activations is not
counted either, because it is not part of the model's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.schema import Lora
from megatron_rl.models.shape import Shape
from megatron_rl.weights import counting
from megatron_rl.weights.counting import Parallel


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """The floating-point operations of the matmuls with weights, for one token in a forward pass."""

    layers: float  # operations of all layers, without their experts
    experts: float  # operations of the experts that the token is routed to
    head: float  # operations of the output layer, or of the head of a model without an output layer


@dataclass(frozen=True, kw_only=True)
class PassFlops:
    """The floating-point operations for a batch of sequences. `forward`: a forward pass. `training`: a forward pass and
    a backward pass together.
    """

    forward: float
    training: float


def of_token(shape: Shape) -> TokenFlops:
    """Returns the floating-point operations of the matmuls with weights, for one token in a forward pass."""
    sizes, sparse = shape.sizes, shape.sizes.expert_layers
    routing = shape.features.routing
    gated = sizes.shared_ffn and (routing is None or routing.shared_gate)
    router = sizes.hidden * (sizes.experts + (1 if gated else 0))
    weights = sizes.num_layers * sizes.attention_weights
    weights += (sizes.num_layers - sparse) * 3 * sizes.hidden * sizes.ffn
    weights += sparse * (3 * sizes.hidden * sizes.shared_ffn + router)
    return TokenFlops(
        layers=2.0 * weights,
        experts=2.0 * sparse * shape.active * 3 * sizes.hidden * sizes.expert_ffn,
        head=2.0 * sizes.outputs * sizes.hidden,
    )


def attention(shape: Shape, lengths: np.ndarray | Sequence[float]) -> np.ndarray:
    """Returns the floating-point operations [S] of causal attention in a forward pass over whole sequences of `lengths`
    [S] tokens.

    Only unmasked scores are counted, which is half of all pairs of tokens. In a layer with a sliding window, a token
    attends to at most `window` tokens.
    """
    sizes = np.asarray(lengths, np.float64)
    met = np.zeros_like(sizes)
    kinds = [shape.features.kinds[shape.features.kind_of(layer)].window for layer in range(shape.sizes.num_layers)]
    for window in dict.fromkeys(kinds):
        met += kinds.count(window) * seen(sizes, window)
    return 2.0 * shape.sizes.heads * (shape.sizes.head_dim + shape.sizes.value_width) * met


def seen(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Returns the number of attended (query, key) pairs of tokens in sequences of `lengths`, [S].

    A pair of a token with itself counts as half a pair.
    """
    inside = lengths if window is None else np.minimum(lengths, window)
    return inside * inside / 2 + (lengths - inside) * (inside - 0.5)


def count(
    shape: Shape,
    lengths: np.ndarray,
    *,
    shared: np.ndarray | None = None,
    labels: float | None = None,
    lora: Lora | None = None,
) -> PassFlops:
    """Returns the floating-point operations of forward and training passes over sequences of `lengths` [S] tokens.

    `shared` [S]: the number of leading tokens of each sequence that are not computed, because an earlier sequence
    starts with the same tokens.
    `labels`: the number of tokens that go through the output layer; None means all computed tokens.
    `lora`: LoRA settings; None if the whole model is trained.

    A backward pass has twice the operations of the forward pass: it computes gradients with respect to inputs and with
    respect to weights. For weights that LoRA freezes, no weight gradients are computed.
    """
    per_token = of_token(shape)
    behind = np.zeros_like(lengths) if shared is None else shared
    tokens = float(lengths.sum() - behind.sum())
    scores = float((attention(shape, lengths) - attention(shape, behind)).sum())
    products = tokens * (per_token.layers + per_token.experts) + (tokens if labels is None else labels) * per_token.head
    added = None if lora is None else tokens * of_adapters(shape, lora)
    return PassFlops(forward=products + (added or 0.0) + scores, training=training(products, scores, added))


def of_adapters(shape: Shape, lora: Lora) -> float:
    """Returns the floating-point operations of the matmuls with LoRA matrices, for one token in a forward pass."""
    return 2.0 * counting.adapter_elements(shape, Parallel(world=1), lora)


def training(products: float, scores: float, adapters: float | None) -> float:
    """Returns the floating-point operations of a forward and a backward pass together.

    The arguments are numbers of operations in the forward pass.
    `products`: operations of the matmuls with weights.
    `scores`: operations of attention.
    `adapters`: operations of the matmuls with LoRA matrices; None if the whole model is trained.
    """
    return 3 * (products + scores) if adapters is None else 2 * products + 3 * (adapters + scores)
