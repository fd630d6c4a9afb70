"""A registry of running servers. Each server has a small file in a directory that all hosts of a job can read. The file
is renewed as long as the server is running.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megatron_rl.lib.regular_files import read_own
from megatron_rl.run.atomic_files import write_text

BEAT_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The entry of one server in the server registry."""

    role: str
    replica: int
    url: str
    # id of one start of the server; a restarted server has a new id and unknown weights until a weight sync (refit)
    incarnation: str
    log: str
    node: str = ""  # node of a Slurm job
    job: str = ""
    beat: int = 0  # heartbeat counter, increased while the server runs; a counter, because clocks of hosts may differ

    def __post_init__(self) -> None:
        """Raises TypeError if a field has a wrong type: the values may come from a file that another program has
        written.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value).__name__ != each.type:
                raise TypeError(f"{each.name} of a listing is {value!r}: it must be a {each.type}")

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


class ServerRegistry:
    """A directory with one file (a listing) per server. Files are written atomically.

    Only files of the users `owners` are read (default: this user, or root), because a listing determines where prompts
    are sent.
    """

    def __init__(self, directory: Path, *owners: int) -> None:
        self.directory, self._owners = directory, owners

    def read(self, role: str) -> list[Listing]:
        """Returns the listings of the servers of a role, sorted by replica."""
        return sorted(
            (listing for listing in self.all(f"{role}-") if listing.role == role), key=lambda listing: listing.replica
        )

    def all(self, start: str = "") -> list[Listing]:
        """Returns the listings whose file name begins with `start`. Ignores files of other users, and files that are
        not valid listings (another version of this package may have written them).
        """
        found = []
        for path in sorted(self.directory.glob(f"{start}*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                found.append(Listing(**json.loads(read_own(path, *self._owners))))
        return found

    def has(self, listing: Listing) -> bool:
        """Returns whether the file of the listing exists, readable or not."""
        return self._path(listing).exists()

    def write(self, listing: Listing) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # The file name contains the incarnation, because a process id would not be unique across hosts.
        # Not durable: no server outlives a power cut, and a slow disk must not delay a heartbeat.
        write_text(self._path(listing), json.dumps(asdict(listing)), writer=listing.incarnation, durable=False)

    def remove(self, listing: Listing) -> None:
        """Removes the file of a listing, unless another incarnation (start) of the server has replaced it."""
        path = self._path(listing)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if json.loads(read_own(path, *self._owners))["incarnation"] == listing.incarnation:
                path.unlink()

    def _path(self, listing: Listing) -> Path:
        return self.directory / f"{listing.name}.json"


class Announcement:
    """A context manager that registers a server. Until exit, a separate thread renews the server's listing while
    `alive` returns True. On exit, removes the listing.
    """

    def __init__(
        self, registry: ServerRegistry, listing: Listing, alive: Callable[[], bool], *, beat_s: float = BEAT_S
    ) -> None:
        self._roster, self._listing, self._alive, self._beat_s = registry, listing, alive, beat_s
        self._done, self._last = threading.Event(), time.monotonic()
        self.failures = 0  # number of times that `alive` has returned False since it last returned True
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Announcement:
        self._roster.write(self._listing)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._roster.remove(self._listing)

    def silent_s(self) -> float:
        """Returns the seconds since `alive` last returned True."""
        return time.monotonic() - self._last

    def _beat(self) -> None:
        beat = 0
        while not self._done.wait(self._beat_s):
            if not self._alive():
                self.failures += 1
                continue
            beat, self.failures, self._last = beat + 1, 0, time.monotonic()
            try:
                self._roster.write(replace(self._listing, beat=beat))
            # For example, the disk is full or the file server is unavailable: the next attempt may succeed.
            except OSError as error:
                _log.warning("%s cannot renew its listing: %s", self._listing.name, error)
