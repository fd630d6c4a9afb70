"""The feed-forward layers of the embedded engine. In a layer with experts, a router sends every token to some of them.
If the model family has a shared expert, every token is also processed by the shared expert.

N tokens   h hidden size   E experts   k experts of one token   f width of a feed-forward or an expert
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.engines.embedded.engine_weights import ExpertWeights
from megatron_rl.models.sizes import ALPHA, CLAMP, Routing


def add_experts(x: Tensor, y: Tensor, layer: ExpertWeights, routing: Routing) -> Tensor:
    """Adds the output of a mixture-of-experts layer to `x` [N, h] in place. `y`: [N, h], the normalized input. Returns
    the indices of the chosen experts [N, k].
    """
    weights, chosen = route(y, layer, routing)
    # Sorts the N k (token, expert) pairs by expert. `order`: [N k], index of each sorted pair in `chosen.flatten()`.
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(len(layer.router), device=y.device)
    # [E], index in the sorted order at which the (token, expert) pairs of each expert end
    ends = torch.searchsorted(experts, numbers, right=True).int()
    rows = y.index_select(0, order // routing.chosen)
    inner = F.grouped_mm(rows, layer.gate_up.mT, offs=ends)
    inner = gated(inner) if layer.gate_up_bias is None else clamped(inner + layer.gate_up_bias[experts])
    made = F.grouped_mm(inner, layer.down.mT, offs=ends)  # [N k, h]
    if layer.down_bias is not None:
        made += layer.down_bias[experts]
    by_token = made.index_select(0, order.argsort()).unflatten(0, (-1, routing.chosen))
    x.add_((by_token * weights[..., None]).sum(dim=1))
    if layer.shared is not None:
        own = layer.shared.layer
        shared = F.linear(gated(F.linear(y, own.gate_up)), own.down)
        gate = layer.shared.gate
        x.add_(shared) if gate is None else x.addcmul_(shared, F.linear(y, gate).sigmoid_())
    return chosen


def route(y: Tensor, layer: ExpertWeights, routing: Routing) -> tuple[Tensor, Tensor]:
    """Chooses the experts of every token [N, h]. Returns their weights [N, k] float32 and their indices [N, k] int64,
    with the highest score first.

    The weights are softmax scores over all experts, or sigmoid scores, as in transformers' routers. Logits are float32
    also in a bfloat16 model, as in the trainer: rounded logits would send tokens near a tie to other experts.
    """
    offset = None if layer.router_bias is None else layer.router_bias.float()
    logits = F.linear(y.float(), layer.router.float(), offset)
    scores = logits.softmax(dim=-1) if routing.scores == "softmax" else logits.sigmoid()
    liked = scores if layer.bias is None else scores + layer.bias
    if routing.groups > 1:
        liked = routing.within_groups(liked)
    chosen = liked.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * routing.scale, chosen


def clamped(fused: Tensor) -> Tensor:
    """Computes the activation function of gpt-oss. The elements of the gate and up projections alternate in `fused`.
    [N, 2 f] -> [N, f]
    """
    gate, up = fused[..., ::2].clamp(max=CLAMP), fused[..., 1::2].clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def gated(fused: Tensor, activation: str = "silu") -> Tensor:
    """Multiplies the activated gate projection by the up projection. [N, 2 f] -> [N, f]"""
    gate, up = fused.chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active.mul_(up)
