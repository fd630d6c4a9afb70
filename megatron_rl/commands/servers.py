"""What `train` and `serve` agree on: where servers are listed, and how one is spoken to. Light: every server's supervisor imports it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megatron_rl.config import Servers
from megatron_rl.engines.roster import Listing
from megatron_rl.engines.server import Server

ENGINES, TOKEN = "engines", "token"  # of a run directory: the roster's folder, and the token in it


def connect(
    settings: Servers, token: str, refit_timeout_s: float, ends: Collection[int] = ()
) -> Callable[[Listing], Server]:  # fmt: skip
    """What makes a client of a listed server. `ends`: the model's end-of-sequence tokens; who asks nothing to be written needs none."""
    from megatron_rl.engines.vllm import VllmServer

    return lambda listing: VllmServer(listing.url, token, settings, ends=ends, refit_timeout_s=refit_timeout_s)
