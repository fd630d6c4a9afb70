"""Replays routing: in training, a token goes to the experts that the engine chose for it when it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.models.sizes import Routing
from megatron_rl.types import FREE

Choose = Callable[..., tuple[Tensor, Tensor]]  # what core calls for a choice, and its own


class GroupLimit:
    """The choice within a token's best groups of experts, as core's `router_replay`.

    Core's own takes a group for as good as the sum of its k / groups_chosen best scores, which is not what every family
    does.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, their numbers), both [n, k], from scores [n, E]."""
        own = self._routing
        by_group = scores.unflatten(1, (own.groups, -1))  # [n, groups, E / groups]
        best = by_group.topk(own.group_best, dim=-1).values.sum(-1).topk(own.groups_chosen, dim=-1).indices
        out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return by_group.masked_fill(out[..., None], -torch.inf).flatten(1).topk(topk, dim=1)


class RouterReplay:
    """The replay of one layer's router, as core's `router_replay`. Core asks it for every choice of experts.

    A layer whose activations are recomputed asks twice: first without gradients, and then, in the backward pass, with
    them. By then other micro-batches may have come, but a chunk's micro-batches go backward in the order in which they
    went forward.
    """

    def __init__(self, layer: int, own: GroupLimit | None = None) -> None:
        self._layer = layer  # number of the layer in the whole model
        self._own = own  # the router's own choice; None: core's
        self._now: Tensor | None = None
        self._again: list[Tensor | None] = []
        self._training = False

    def show(self, experts: Tensor | None, *, training: bool) -> None:
        """Sets the choices of the micro-batch that goes forward next."""
        self._now, self._training = (None if experts is None else experts[:, self._layer]), training

    def forget(self) -> None:
        """Drops the choices of all micro-batches."""
        self._now, self._again = None, []

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, their numbers), both [n, k], from scores [n, E].

        Gradients reach the scores of the chosen experts. Where no choice is known the router's own is taken.
        """
        choose = default_compute_topk if self._own is None else self._own.get_replay_topk
        assert choose is not None
        free = choose(scores, topk, num_groups, group_topk)
        wanted = self._wanted()
        if wanted is None:
            return free
        wanted = wanted.to(scores.device, torch.int64)
        chosen = torch.where(wanted == FREE, free[1], wanted)
        return scores.gather(1, chosen), chosen

    def _wanted(self) -> Tensor | None:
        """Returns the choices for the pass that asks now, None where nothing is replayed."""
        if torch.is_grad_enabled():
            return self._again.pop(0) if self._again else self._now
        if self._training:
            self._again.append(self._now)
        return self._now


def install(chunk: Any) -> None:
    """Makes the routers of a model chunk ask for replayed choices. Without this core's routers are as they were."""
    for number, router in routers(chunk):
        router.router_replay = RouterReplay(number, router.router_replay)


def limit(chunk: Any, routing: Routing) -> None:
    """Makes the routers of a model chunk choose within groups of experts. Comes before `install`."""
    for _, router in routers(chunk):
        router.router_replay = GroupLimit(routing)


def show(chunk: Any, experts: Tensor | None, *, training: bool) -> None:
    """Tells the chunk's routers the choices [n, layers, k] of the micro-batch that goes forward next.

    None: nothing is replayed.
    """
    for router in _replays(chunk):
        router.show(experts, training=training)


def forget(chunk: Any) -> None:
    """Drops the choices of all micro-batches, also of those that an error left without their backward pass."""
    for router in _replays(chunk):
        router.forget()


def pooled(experts: Tensor, repeats: Sequence[tuple[int, int, int]]) -> Tensor:
    """Returns the choices [N, layers, k] with those of shared prefixes at the first sequence that has them.

    They are the choices of the first sequence for whose tokens they are known. `repeats`: see Batch.repeats.
    """
    out = experts.clone()
    for first, start, length in repeats:
        own, other = out[first : first + length], experts[start : start + length]
        own.copy_(torch.where(own == FREE, other, own))
    return out


def of_tokens(experts: Tensor, places: Tensor, *, parts: int, part: int) -> Tensor:
    """Returns the choices for the tokens that this rank's routers see, [S * L / parts, layers, k].

    `experts` is [N, layers, k] and `places` [S, L] are rows of it (-1: padding). Tokens come position by position, as
    core flattens [L, S, h]; of these this rank sees part `part` of the `parts` tensor ranks.
    """
    own = places.T.chunk(parts)[part].flatten()
    return experts[own.clamp(min=0)].masked_fill((own < 0)[:, None, None], FREE)


def routers(chunk: Any) -> Iterator[tuple[int, Any]]:
    """Yields (number of the layer in the whole model, router) of the layers that have experts."""
    for layer in chunk.decoder.layers:
        if hasattr(layer.mlp, "router"):
            yield layer.layer_number - 1, layer.mlp.router


def _replays(chunk: Any) -> list[RouterReplay]:
    """Returns the replays that `install` put in place."""
    found = (router.router_replay for _, router in routers(chunk))
    return [replay for replay in found if isinstance(replay, RouterReplay)]
