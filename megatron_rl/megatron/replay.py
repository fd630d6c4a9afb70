"""Replays routing: in training, a token goes to the experts that the engine chose for it when it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.types import FREE


class RouterReplay:
    """The replay of one layer's router, as core's `router_replay`. Core asks it for every choice of experts.

    A layer whose activations are recomputed asks twice: first without gradients, and then, in the backward pass, with
    them. By then other micro-batches may have come, but a chunk's micro-batches go backward in the order in which they
    went forward.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer  # number of the layer in the whole model
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
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, their numbers), both [n, k], from scores [n, E].

        Gradients reach the scores of the chosen experts. Where no choice is known the router's own is taken.
        """
        assert default_compute_topk is not None
        free = default_compute_topk(scores, topk, num_groups, group_topk)
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
    for layer in chunk.decoder.layers:
        layer.mlp.router.router_replay = RouterReplay(layer.layer_number - 1)


def show(chunk: Any, experts: Tensor | None, *, training: bool) -> None:
    """Tells the chunk's routers the choices [n, layers, k] of the micro-batch that goes forward next.

    None: nothing is replayed.
    """
    for router in _routers(chunk):
        router.show(experts, training=training)


def forget(chunk: Any) -> None:
    """Drops the choices of all micro-batches, also of those that an error left without their backward pass."""
    for router in _routers(chunk):
        router.forget()


def of_tokens(experts: Tensor, places: Tensor, *, parts: int, part: int) -> Tensor:
    """Returns the choices for the tokens that this rank's routers see, [S * L / parts, layers, k].

    `experts` is [N, layers, k] and `places` [S, L] are rows of it (-1: padding). Tokens come position by position, as
    core flattens [L, S, h]; of these this rank sees part `part` of the `parts` tensor ranks.
    """
    own = places.T.chunk(parts)[part].flatten()
    return experts[own.clamp(min=0)].masked_fill((own < 0)[:, None, None], FREE)


def _routers(chunk: Any) -> list[RouterReplay]:
    """Returns the replays that `install` put in place."""
    found = (getattr(getattr(layer.mlp, "router", None), "router_replay", None) for layer in chunk.decoder.layers)
    return [router for router in found if isinstance(router, RouterReplay)]
