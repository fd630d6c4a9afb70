"""Router replay: in training, a token is routed to the experts that the engine chose when it generated the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.models.sizes import Routing
from megatron_rl.types import FREE

# a function that chooses experts and has the signature of Megatron-core's function for this
Choose = Callable[..., tuple[Tensor, Tensor]]


class GroupLimit:
    """Group-limited routing: chooses a token's experts from the token's best expert groups only. It is attached as
    Megatron-core's `router_replay` hook.

    Megatron-core's own group limit scores a group by the sum of its k / groups_chosen best expert scores, but some
    model families use another number of expert scores.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    def get_replay_topk(self, scores: Tensor, topk: int, *unused: object) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, ids of the chosen experts), both [n, k], from scores [n, E].

        `unused`: Megatron-core's group limit and core's function that chooses experts; both are ignored.
        """
        return self._routing.within_groups(scores).topk(topk, dim=1)


class RouterReplay:
    """Makes one layer's router choose the experts that the inference engine chose for each token. It is attached as
    Megatron-core's `router_replay` hook, which core calls for every choice of experts.

    With activation recomputation, core calls the hook twice per micro-batch: first without gradients, and then with
    gradients in the backward pass. Other micro-batches may have run in between, so the choices are queued: the backward
    passes of a chunk run in the order of the forward passes.
    """

    def __init__(self, layer: int, own: GroupLimit | None = None) -> None:
        self._layer = layer  # index of the layer in the whole model
        self._own = own  # chooses experts that are not replayed; None: Megatron-core does
        self._now: Tensor | None = None  # expert choices [n, k] of the micro-batch whose forward pass is next
        self._again: list[Tensor | None] = []  # queue of expert choices for recomputation in backward passes
        self._training = False

    def show(self, experts: Tensor | None, *, training: bool) -> None:
        """Sets the expert choices to replay in the next forward pass. `experts` is [n, layers, k], or None to replay
        nothing."""
        self._now, self._training = (None if experts is None else experts[:, self._layer]), training

    def forget(self) -> None:
        """Discards the expert choices of all micro-batches."""
        self._now, self._again = None, []

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, ids of the chosen experts), both [n, k], from scores [n, E].

        Gradients flow to the scores of the chosen experts. If the inference engine's choice for a token is unknown
        (FREE), the router itself chooses.
        """
        choose = default_compute_topk if self._own is None else self._own.get_replay_topk
        assert choose is not None
        free = choose(scores, topk, num_groups, group_topk)
        wanted, recomputes = self._now, torch.is_grad_enabled()
        if recomputes and self._again:
            wanted = self._again.pop(0)
        elif self._training and not recomputes:
            self._again.append(wanted)
        if wanted is None:
            return free
        wanted = wanted.to(scores.device, torch.int64)
        chosen = torch.where(wanted == FREE, free[1], wanted)
        return scores.gather(1, chosen), chosen


def install(chunk: Any) -> None:
    """Attaches a `RouterReplay` to each router of a model chunk."""
    for number, router in routers(chunk):
        router.router_replay = RouterReplay(number, router.router_replay)


def limit(chunk: Any, routing: Routing) -> None:
    """Makes the routers of a model chunk choose experts within groups (`GroupLimit`). Call it before `install`."""
    for _, router in routers(chunk):
        router.router_replay = GroupLimit(routing)


def show(chunk: Any, experts: Tensor | None, *, training: bool) -> None:
    """Sets the expert choices [n, layers, k] that the chunk's routers replay in the next forward pass.

    If `experts` is None, nothing is replayed.
    """
    for router in _replays(chunk):
        router.show(experts, training=training)


def forget(chunk: Any) -> None:
    """Discards the expert choices that the chunk's routers hold, including choices of micro-batches whose backward pass
    did not run because of an error."""
    for router in _replays(chunk):
        router.forget()


def pooled(experts: Tensor, repeats: Sequence[tuple[int, int, int]]) -> Tensor:
    """Returns the expert choices [N, layers, k] with gaps in shared prefixes filled. An unknown choice (FREE) in the
    first copy of a prefix is taken from the next copy of the prefix in which the choice is known.

    `repeats` lists (start of the first copy, start of another copy, length), as in Batch.repeats.
    """
    out = experts.clone()
    for first, start, length in repeats:
        own, other = out[first : first + length], experts[start : start + length]
        own.copy_(torch.where(own == FREE, other, own))
    return out


def of_tokens(experts: Tensor, places: Tensor, *, parts: int, part: int) -> Tensor:
    """Returns the expert choices for the tokens that this rank's routers process, [S * L / parts, layers, k].

    `experts` is [N, layers, k], and `places` [S, L] has the row in `experts` of each token, -1 for padding. The result
    is in the order in which Megatron-core flattens hidden states [L, S, h]. With sequence parallelism over `parts`
    tensor-parallel ranks, this rank processes part number `part` of the tokens.
    """
    own = places.T.chunk(parts)[part].flatten()
    return experts[own.clamp(min=0)].masked_fill((own < 0)[:, None, None], FREE)


def routers(chunk: Any) -> Iterator[tuple[int, Any]]:
    """Yields (index of the layer in the whole model, router) for each layer of a chunk that has experts."""
    for layer in chunk.decoder.layers:
        if hasattr(layer.mlp, "router"):
            yield layer.layer_number - 1, layer.mlp.router


def _replays(chunk: Any) -> list[RouterReplay]:
    """Returns the `RouterReplay` objects that `install` attached to a chunk's routers."""
    found = (router.router_replay for _, router in routers(chunk))
    return [replay for replay in found if isinstance(replay, RouterReplay)]
