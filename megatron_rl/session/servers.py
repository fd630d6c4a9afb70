"""What `train`, `serve` and `eval` agree on: where servers are listed, and how one is spoken to.

Light: every supervisor imports it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config.engines import Servers
from megatron_rl.engines.kind import ModelFacts, kind_of
from megatron_rl.engines.roster import Listing
from megatron_rl.engines.server import Server

ENGINES, TOKEN = "engines", "token"  # of a run directory: the roster's folder, and the token in it


def connect(
    settings: Servers, token: str, refit_timeout_s: float, facts: ModelFacts | None = None
) -> Callable[[Listing], Server]:
    """Returns the function that makes a client of a listed server."""
    client, known = kind_of(settings).client, facts or ModelFacts()
    return lambda listing: client(listing.url, token, settings, refit_timeout_s, known)
