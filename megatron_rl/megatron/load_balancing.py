"""The load-balancing loss of experts: a loss for routers that send a sequence's tokens to few experts.

For each sequence of T tokens and each layer with E experts, the loss is E * sum of f_e P_e over the experts e (Switch
Transformer, arXiv 2101.03961, eq. 4). f_e is the share of the sequence's choices that are e, and P_e is the mean
probability of e. The loss of an optimizer step is the mean over all its sequences, weighted by T.

The shares f are computed for each sequence (as in DeepSeek-V3, arXiv 2412.19437, eq. 17, and Megatron-core's
seq_aux_loss), so the loss does not depend on how sequences are split over micro-batches and replicas, or on padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batches.packed_batch import Batch
from megatron_rl.devices.host_to_device import upload
from megatron_rl.megatron import platform
from megatron_rl.megatron.router_replay import MicroBatchValue, routers

platform.install()

from megatron.core.transformer.moe.moe_utils import (  # noqa: E402
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)


@dataclass(frozen=True)
class Balance:
    """The tokens of a micro-batch that the load-balancing loss counts."""

    # [n] index of the sequence of each token that this rank's routers process; S for padding
    sequences: Tensor
    lengths: Tensor  # [S] number of tokens of each sequence, over all ranks that share the sequence
    weight: float  # factor of the sum, over the tokens of the micro-batch, of the loss of their sequence


class BalanceLoss:
    """Adds the gradient of the load-balancing loss of one layer. It is a forward hook of the layer's router."""

    def __init__(self) -> None:
        self.balance: MicroBatchValue[Balance] = MicroBatchValue()

    def __call__(self, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> Any:
        """Returns the router's output, whose backward pass adds the gradient of the loss."""
        balance = self.balance.take()
        if balance is None or not torch.is_grad_enabled():
            return output
        logits = router.gating(inputs[0]).view(-1, router.config.num_moe_experts)
        chosen, scores = compute_routing_scores_for_aux_loss(logits, router.topk, router.score_function)
        counts = scores.new_zeros(len(balance.lengths) + 1, scores.shape[1])  # [S + 1, E]
        counts.index_add_(0, balance.sequences, chosen.to(counts.dtype))
        counts[-1] = 0.0  # padding
        if router.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=router.tp_cp_group)
        counts[:-1] /= router.topk * balance.lengths[:, None]
        loss = balance.weight * scores.shape[1] * (counts[balance.sequences] * scores).sum()
        return MoEAuxLossAutoScaler.apply(output[0], loss), output[1]


def install(chunk: Any) -> None:
    """Adds the load-balancing loss to each router of a model chunk."""
    for _, router in routers(chunk):
        router.register_forward_hook(BalanceLoss())


def show(chunk: Any, balance: Balance | None, *, training: bool) -> None:
    """Sets the tokens that the load-balancing loss counts in the next forward pass. None: there is no loss."""
    for loss in _losses(chunk):
        loss.balance.show(balance, training=training)


def forget(chunk: Any) -> None:
    """Discards what `show` has set, including values of micro-batches whose backward pass did not run."""
    for loss in _losses(chunk):
        loss.balance.forget()


def balance_of(batch: Batch, places: Tensor, weight: float, *, parts: int, part: int, device: torch.device) -> Balance:
    """Returns the tokens that the load-balancing loss counts, for the tokens that this rank's routers process.

    `places` [S, L] has the packed position of each token, -1 for padding. With sequence parallelism over `parts`
    tensor-parallel ranks, this rank processes part number `part` of the tokens.
    `weight`: see Balance.weight.
    """
    packed = places.T.chunk(parts)[part].flatten()
    sequences = torch.bucketize(packed, batch.cu_seqlens[1:], right=True).masked_fill(packed < 0, batch.num_sequences)
    return Balance(upload(sequences, device), upload(batch.lengths, device), weight)


def _losses(chunk: Any) -> Iterator[BalanceLoss]:
    """Yields the `BalanceLoss` objects that `install` attached to a chunk's routers."""
    for _, router in routers(chunk):
        yield from (hook for hook in router._forward_hooks.values() if isinstance(hook, BalanceLoss))
