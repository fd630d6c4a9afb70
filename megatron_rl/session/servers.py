"""What `train` and `serve` agree on: where servers are listed, how one is started and spoken to.

Light: every supervisor imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from megatron_rl.config.schema import Servers, Sglang, Strategy, Vllm
from megatron_rl.engines.launch import Command
from megatron_rl.engines.roster import Listing
from megatron_rl.engines.server import Adapters, Server

ENGINES, TOKEN = "engines", "token"  # of a run directory: the roster's folder, and the token in it


@dataclass(frozen=True)
class About:
    """The facts that a client must know of its server's model.

    A client that asks for no completions needs none of them.
    """

    ends: frozenset[int] = frozenset()  # end-of-sequence tokens
    vocab: int = 0
    boundaries: Callable[[Strategy], frozenset[int]] | None = None  # of a tandem's strategies
    adapters: Adapters | None = None  # None: servers hold merged weights


def adapters_served(settings: Servers) -> bool:
    """Says whether servers compute with adapters beside a model, and refits bring adapters alone."""
    return isinstance(settings, Vllm) and settings.adapters == "served"


def command(settings: Servers) -> Callable[..., Command]:
    """Returns the function that makes the command line of a server of that kind."""
    return _module(settings).command


def connect(
    settings: Servers, token: str, refit_timeout_s: float, about: About | None = None
) -> Callable[[Listing], Server]:
    """Returns the function that makes a client of a listed server."""
    known = about or About()
    if isinstance(settings, Sglang):
        from megatron_rl.engines.sglang import SglangServer

        return lambda listing: SglangServer(
            listing.url, token, settings, ends=known.ends, vocab=known.vocab, refit_timeout_s=refit_timeout_s
        )
    from megatron_rl.engines.vllm import AdapterServer, VllmServer

    own = cast(Vllm, settings)  # there are only these two kinds
    if (adapters := known.adapters) is not None:
        return lambda listing: AdapterServer(
            listing.url,
            token,
            own,
            adapters=adapters,
            ends=known.ends,
            vocab=known.vocab,
            refit_timeout_s=refit_timeout_s,
        )
    return lambda listing: VllmServer(
        listing.url,
        token,
        own,
        ends=known.ends,
        vocab=known.vocab,
        refit_timeout_s=refit_timeout_s,
        boundaries=known.boundaries,
    )


def _module(settings: Servers) -> Any:
    if isinstance(settings, Sglang):
        from megatron_rl.engines import sglang as module
    else:
        from megatron_rl.engines import vllm as module
    return module
