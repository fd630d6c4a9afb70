"""Small messages between a trainer and its engines: a key-value board on the trainer's first rank, with deadlines."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_rl.refit.base import TransportError

SIGNATURE = 64  # characters before a value
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.02  # between two looks for a key


class Address(NamedTuple):
    """What it takes to join a board."""

    host: str
    port: int
    secret: str  # hexadecimal

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


class Board:
    """JSON values under keys, in a torch TCPStore, which anybody may write to who reaches its port.

    What does not carry the secret's signature counts as nothing; what comes from it is never executed.
    """

    def __init__(self, store: Any, secret: bytes, prefix: str = "") -> None:
        self._store, self._secret, self._prefix = store, secret, prefix

    @classmethod
    def host(cls, address: str) -> tuple[Board, Address]:
        """Opens a board here that listens at `address` alone (by itself the store would at every interface). Raises TransportError."""
        try:
            family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(place, family=family, backlog=1024)
        except OSError as error:
            raise TransportError(f"a refit board cannot listen at {address}: {error}") from error
        port = listening.getsockname()[1]
        timeout = timedelta(seconds=60)
        store = dist.TCPStore(
            address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        secret = secrets.token_bytes(32)
        return cls(store, secret), Address(address, port, secret.hex())

    @classmethod
    def join(cls, address: Address, timeout_s: float = 60) -> Board:
        """Raises TransportError when nobody answers."""
        host, port, secret = address
        try:
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        except RuntimeError as error:
            raise TransportError(
                f"no refit board at {host}:{port}: does the trainer run there? ({_first_line(error)})"
            ) from error
        return cls(store, bytes.fromhex(secret))

    def way(self) -> tuple[str, int]:
        """-> (this host's own address on the way to the board's, its family)."""
        family, kind, _, _, place = socket.getaddrinfo(self._store.host, self._store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return probe.getsockname()[0], family

    def under(self, prefix: str) -> Board:
        return Board(self._store, self._secret, f"{self._prefix}{prefix}/")

    def sign(self, text: bytes) -> bytes:
        """[32] that only those who joined can make."""
        return hmac.digest(self._secret, text, "sha256")

    @property
    def store(self) -> Any:
        """The store under this board's prefix, for a process group's rendezvous."""
        return dist.PrefixStore(self._prefix, self._store)

    def put(self, key: str, value: Any) -> None:
        name, text = self._prefix + key, json.dumps(value)
        try:
            self._store.set(name, self._signature(name, text.encode()) + text)
        except RuntimeError as error:
            raise TransportError(f"the refit board is gone: {_first_line(error)}") from error

    def get(self, key: str, timeout_s: float) -> Any:
        """Waits for it. Raises TransportError when it does not come, or is not signed."""
        name = self._prefix + key
        try:
            self._store.wait([name], timedelta(seconds=timeout_s))
            text = self._signed(name)
        except RuntimeError as error:
            raise TransportError(
                f"no {name!r} on the refit board within {timeout_s:.1f} s ({_first_line(error)})"
            ) from error
        if text is None:
            raise TransportError(f"{name!r} on the refit board is not of this run: somebody else writes there")
        return json.loads(text)

    def _signed(self, name: str) -> bytes | None:
        """The text there; None when this run did not put it there."""
        found = self._store.get(name)
        signature, text = found[:SIGNATURE], found[SIGNATURE:]
        return text if hmac.compare_digest(signature, self._signature(name, text).encode()) else None

    def _signature(self, name: str, text: bytes) -> str:
        return self.sign(name.encode() + b"\0" + text).hex()

    def has(self, key: str, timeout_s: float) -> bool:
        """Whether it is there, or comes in time. Raises TransportError when the board is gone.

        Asks again and again: the store's own wait writes two warnings to standard error whenever its time is up.
        """
        end, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while self._look(key) is None:
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LAST_PAUSE_S)
        return True

    def peek(self, key: str) -> Any:
        """The value, or None when there is none now."""
        text = self._look(key)
        return None if text is None else json.loads(text)

    def _look(self, key: str) -> bytes | None:
        name = self._prefix + key
        try:
            return self._signed(name) if self._store.check([name]) else None
        except RuntimeError as error:
            raise TransportError(f"the refit board is gone: {_first_line(error)}") from error

    def remove(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
