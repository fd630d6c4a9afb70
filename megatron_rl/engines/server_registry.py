"""A registry of running servers: each server has a small file in a directory that all hosts of a job can read, and
renews the file while it lives.
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

from megatron_rl.run import atomic_files

BEAT_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A server's entry in the registry."""

    role: str
    replica: int
    url: str
    incarnation: str  # id of one start; a restarted server has a new id, and its weights are unknown until a refit
    log: str
    node: str = ""  # node of a Slurm job
    job: str = ""
    beat: int = 0  # increases while the server lives; clocks of different hosts are never compared

    def __post_init__(self) -> None:
        """Raises TypeError if a field has a wrong type, because another program may have written the file."""
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value).__name__ != each.type:
                raise TypeError(f"{each.name} of a listing is {value!r}: it must be a {each.type}")

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


class ServerRegistry:
    """A directory of listings. Files are written atomically.

    Only files of the users `owners` are read (default: this user, or root), because a listing determines where prompts
    are sent.
    """

    def __init__(self, directory: Path, *owners: int) -> None:
        self.directory, self._owners = directory, owners

    def read(self, role: str) -> list[Listing]:
        """Returns the servers of a role, sorted by replica."""
        return sorted(
            (listing for listing in self.all(f"{role}-") if listing.role == role), key=lambda listing: listing.replica
        )

    def all(self, start: str = "") -> list[Listing]:
        """Returns the servers whose file name begins with `start`. Ignores files of other users, and files that are not
        valid listings (another version may have written them).
        """
        found = []
        for path in sorted(self.directory.glob(f"{start}*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                found.append(Listing(**json.loads(atomic_files.read_own(path, *self._owners))))
        return found

    def has(self, listing: Listing) -> bool:
        """Returns whether the listing's file exists, readable or not."""
        return self._path(listing).exists()

    def write(self, listing: Listing) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # A process id would not be unique across hosts.
        draft = self.directory / f".{listing.name}.{listing.incarnation}"
        draft.write_text(json.dumps(asdict(listing)))
        draft.replace(self._path(listing))

    def remove(self, listing: Listing) -> None:
        """Removes a listing, unless another incarnation of the server has replaced it."""
        path = self._path(listing)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if json.loads(path.read_text())["incarnation"] == listing.incarnation:
                path.unlink()

    def _path(self, listing: Listing) -> Path:
        return self.directory / f"{listing.name}.json"


class Announcement:
    """A context manager that renews a listing from a separate thread while `alive` returns True, and removes it on
    exit.
    """

    def __init__(
        self, registry: ServerRegistry, listing: Listing, alive: Callable[[], bool], *, beat_s: float = BEAT_S
    ) -> None:
        self._roster, self._listing, self._alive, self._beat_s = registry, listing, alive, beat_s
        self._done, self._last = threading.Event(), time.monotonic()
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
        """Returns the time in seconds since the server last gave a sign of life."""
        return time.monotonic() - self._last

    def _beat(self) -> None:
        beat = 0
        while not self._done.wait(self._beat_s):
            if self._alive():
                beat, self._last = beat + 1, time.monotonic()
                try:
                    self._roster.write(replace(self._listing, beat=beat))
                # A full disk or an unavailable file server, for example: the next attempt may succeed.
                except OSError as error:
                    _log.warning("%s cannot renew its listing: %s", self._listing.name, error)
