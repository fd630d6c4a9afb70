"""Servers at fixed addresses, which do not register themselves. The run registers each server while it responds."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence

from megatron_rl.engines.server import Server
from megatron_rl.engines.server_registry import BEAT_S, Announcement, Listing, ServerRegistry

# Number of consecutive failed checks after which a server is removed from the registry.
# If the server responds later, it may have been restarted, so it is registered as a new incarnation (start).
FAILURES = 2


class Addresses:
    """Monitors servers at fixed URLs, each in a separate thread. The server registry lists a server as long as the
    server responds. A server that was unreachable is registered as a new incarnation (start), so that it gets requests
    only after a weight sync (refit).
    """

    def __init__(
        self,
        registry: ServerRegistry,
        role: str,
        urls: Sequence[str],
        connect: Callable[[Listing], Server],
        *,
        look_s: float = BEAT_S,
    ) -> None:
        self._roster, self._connect, self._look_s = registry, connect, look_s
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(role, replica, url), name=f"{role}-{replica}", daemon=True)
            for replica, url in enumerate(urls)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops the threads and removes the servers from the registry."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, role: str, replica: int, url: str) -> None:
        while not self._closed.is_set():
            listing = Listing(
                role=role, replica=replica, url=url, incarnation=uuid.uuid4().hex, log=f"(of {url}: not here)"
            )
            server = self._connect(listing)
            try:
                while not self._closed.is_set() and not server.ready():
                    self._closed.wait(self._look_s)
                if not self._closed.is_set():
                    with Announcement(self._roster, listing, server.ready, beat_s=self._look_s) as announced:
                        while announced.failures < FAILURES and not self._closed.wait(self._look_s):
                            pass
            finally:
                server.close()
