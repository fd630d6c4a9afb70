"""Which servers there are: one small file each in a directory that all hosts of a job see, renewed while the server
lives.
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
    """A server as it announces itself."""

    role: str
    replica: int
    url: str
    incarnation: str  # of one start: a server that comes back has another, and no weights that count
    log: str
    node: str = ""  # of a Slurm job
    job: str = ""
    beat: int = 0  # goes up while it lives; clocks of different hosts are never compared

    def __post_init__(self) -> None:
        """Raises TypeError for what another program may have written."""
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value).__name__ != each.type:
                raise TypeError(f"{each.name} of a listing is {value!r}: it must be a {each.type}")

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


class ServerRegistry:
    """The directory of listings. Files are written whole or not at all.

    Only files of the users `owners` count (default: this user, or root), since a listing says where prompts are sent.
    """

    def __init__(self, directory: Path, *owners: int) -> None:
        self.directory, self._owners = directory, owners

    def read(self, role: str) -> list[Listing]:
        """Lists the servers of a role, by replica."""
        return sorted(
            (listing for listing in self.all(f"{role}-") if listing.role == role), key=lambda listing: listing.replica
        )

    def all(self, start: str = "") -> list[Listing]:
        """Lists the servers whose file's name begins with `start`. Files that are no listings, as another version may
        have written, and files of other users are left out.
        """
        found = []
        for path in sorted(self.directory.glob(f"{start}*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                found.append(Listing(**json.loads(atomic_files.read_own(path, *self._owners))))
        return found

    def has(self, listing: Listing) -> bool:
        """Tells whether there is a file of that name, readable or not."""
        return self._path(listing).exists()

    def write(self, listing: Listing) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / f".{listing.name}.{listing.incarnation}"  # process ids are those of one host
        draft.write_text(json.dumps(asdict(listing)))
        draft.replace(self._path(listing))

    def remove(self, listing: Listing) -> None:
        """Unless another incarnation has taken its place."""
        path = self._path(listing)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if json.loads(path.read_text())["incarnation"] == listing.incarnation:
                path.unlink()

    def _path(self, listing: Listing) -> Path:
        return self.directory / f"{listing.name}.json"


class Announcement:
    """Keeps a listing fresh from a thread of its own while `alive` says so; removes it at the end."""

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
        """Returns how long the server has given no sign of life."""
        return time.monotonic() - self._last

    def _beat(self) -> None:
        beat = 0
        while not self._done.wait(self._beat_s):
            if self._alive():
                beat, self._last = beat + 1, time.monotonic()
                try:
                    self._roster.write(replace(self._listing, beat=beat))
                except (
                    OSError
                ) as error:  # a disk that is full, a file server that is away: the next beat may come through
                    _log.warning("%s cannot renew its listing: %s", self._listing.name, error)
