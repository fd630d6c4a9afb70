"""Which servers there are: one small file each in a directory that all hosts of a job see, renewed while the server lives."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

BEAT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A server as it announces itself."""

    role: str
    replica: int
    url: str
    incarnation: str  # of one start: a server that comes back has another, and no weights that count
    log: str
    beat: int = 0  # goes up while it lives; clocks of different hosts are never compared

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


class Roster:
    """The directory. Files are written whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, role: str) -> list[Listing]:
        """Of a role, by replica. Files that are not listings are left out: one may be of another version of this program."""
        found = []
        for path in sorted(self.directory.glob(f"{role}-*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(Listing(**json.loads(path.read_text())))
        return sorted((listing for listing in found if listing.role == role), key=lambda listing: listing.replica)

    def write(self, listing: Listing) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / f".{listing.name}.{os.getpid()}"
        draft.write_text(json.dumps(asdict(listing)))
        draft.replace(self._path(listing))

    def remove(self, listing: Listing) -> None:
        """Unless another incarnation has taken its place."""
        path = self._path(listing)
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(path.read_text())["incarnation"] == listing.incarnation:
                path.unlink()

    def _path(self, listing: Listing) -> Path:
        return self.directory / f"{listing.name}.json"


class Announcement:
    """Keeps a listing fresh from a thread of its own while `alive` says so; removes it at the end."""

    def __init__(self, roster: Roster, listing: Listing, alive: Callable[[], bool]) -> None:
        self._roster, self._listing, self._alive = roster, listing, alive
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Announcement:
        self._roster.write(self._listing)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._roster.remove(self._listing)

    def _beat(self) -> None:
        beat = 0
        while not self._done.wait(BEAT_S):
            if self._alive():
                beat += 1
                self._roster.write(replace(self._listing, beat=beat))
