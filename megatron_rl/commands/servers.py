"""What `train` and `serve` agree on: where servers are listed, and how one is spoken to. Light: every server's supervisor imports it."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config import Servers
from megatron_rl.engines.roster import Listing
from megatron_rl.engines.server import Server

ENGINES, TOKEN = "engines", "token"  # of a run directory: the roster's folder, and the token in it


def connect(settings: Servers, token: str, refit_timeout_s: float) -> Callable[[Listing], Server]:
    """What makes a client of a listed server."""
    from megatron_rl.engines.vllm import VllmServer

    return lambda listing: VllmServer(listing.url, token, settings, refit_timeout_s=refit_timeout_s)
