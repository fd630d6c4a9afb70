"""Router replay: in training, a token is routed to the experts that the engine chose when it generated the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron_rl.models.sizes import Routing
from megatron_rl.types import FREE

# a function that chooses experts and has the signature of Megatron-core's function for this
Choose = Callable[..., tuple[Tensor, Tensor]]
T = TypeVar("T")


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


class MicroBatchValue(Generic[T]):
    """A value that a layer's router needs for the micro-batch of its current forward pass.

    With activation recomputation, a router runs twice per micro-batch: first without gradients, and then with gradients
    in the backward pass. Other micro-batches may have run in between, so the values are queued: the backward passes of
    a chunk run in the order of the forward passes.
    """

    def __init__(self) -> None:
        self._now: T | None = None  # value of the micro-batch whose forward pass is next
        self._again: list[T | None] = []  # queue of values for recomputation in backward passes
        self._training = False

    def show(self, value: T | None, *, training: bool) -> None:
        """Sets the value that the next forward pass takes. `training`: whether a backward pass may follow."""
        self._now, self._training = value, training

    def forget(self) -> None:
        """Discards the values of all micro-batches."""
        self._now, self._again = None, []

    def take(self) -> T | None:
        """Returns the value of the current forward pass. Call it exactly once in each forward pass of the router."""
        recomputes = torch.is_grad_enabled()
        if recomputes and self._again:
            return self._again.pop(0)
        if self._training and not recomputes:
            self._again.append(self._now)
        return self._now


class RouterReplay:
    """Makes one layer's router choose the experts that the inference engine chose for each token. It is attached as
    Megatron-core's `router_replay` hook, which core calls for every choice of experts.
    """

    def __init__(self, layer: int, group_limit: GroupLimit | None = None) -> None:
        self._layer = layer  # index of the layer in the whole model
        self._group_limit = group_limit  # chooses experts that are not replayed; None: Megatron-core does
        self._experts: MicroBatchValue[Tensor] = MicroBatchValue()  # expert choices [n, k]

    def show(self, experts: Tensor | None, *, training: bool) -> None:
        """Sets the expert choices to replay in the next forward pass. `experts` is [n, layers, k], or None to replay
        nothing."""
        self._experts.show(None if experts is None else experts[:, self._layer], training=training)

    def forget(self) -> None:
        """Discards the expert choices of all micro-batches."""
        self._experts.forget()

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
        choose = default_compute_topk if self._group_limit is None else self._group_limit.get_replay_topk
        assert choose is not None
        free = choose(scores, topk, num_groups, group_topk)
        if (experts := self._experts.take()) is None:
            return free
        experts = experts.to(scores.device, torch.int64)
        chosen = torch.where(experts == FREE, free[1], experts)
        return scores.gather(1, chosen), chosen


def install(chunk: Any) -> None:
    """Attaches a `RouterReplay` to each router of a model chunk, unless another role that shares the model has done
    so."""
    for number, router in routers(chunk):
        if not isinstance(router.router_replay, RouterReplay):
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
    filled = experts.clone()
    for first, start, length in repeats:
        first_copy, next_copy = filled[first : first + length], experts[start : start + length]
        first_copy.copy_(torch.where(first_copy == FREE, next_copy, first_copy))
    return filled


def of_tokens(experts: Tensor, places: Tensor, *, parts: int, part: int) -> Tensor:
    """Returns the expert choices for the tokens that this rank's routers process, [S * L / parts, layers, k].

    `experts` is [N, layers, k], and `places` [S, L] has the row in `experts` of each token, -1 for padding. The result
    is in the order in which Megatron-core flattens hidden states [L, S, h]. With sequence parallelism over `parts`
    tensor-parallel ranks, this rank processes part number `part` of the tokens.
    """
    positions = places.T.chunk(parts)[part].flatten()
    return experts[positions.clamp(min=0)].masked_fill((positions < 0)[:, None, None], FREE)


def routers(chunk: Any) -> Iterator[tuple[int, Any]]:
    """Yields (index of the layer in the whole model, router) for each layer of a chunk that has experts."""
    for layer in chunk.decoder.layers:
        if hasattr(layer.mlp, "router"):
            yield layer.layer_number - 1, layer.mlp.router


def _replays(chunk: Any) -> list[RouterReplay]:
    """Returns the `RouterReplay` objects that `install` attached to a chunk's routers."""
    replays = (router.router_replay for _, router in routers(chunk))
    return [replay for replay in replays if isinstance(replay, RouterReplay)]
