"""Carries small messages between a trainer and its engines, over a key-value board on the trainer's first rank."""

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

SIGNATURE = 64  # every stored value begins with a signature of so many characters
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.02  # the pause between two looks for a key grows from the first to the last


class Address(NamedTuple):
    """The address of a board, with the secret that whoever joins it needs."""

    host: str
    port: int
    secret: str  # hexadecimal

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


class Board:
    """JSON values under keys, in a torch TCPStore. Anybody who reaches its port can write to that.

    A value without the signature that the secret makes counts as absent. Nothing that comes from the store is ever
    executed.
    """

    def __init__(self, store: Any, secret: bytes, prefix: str = "") -> None:
        self._store, self._secret, self._prefix = store, secret, prefix

    @classmethod
    def host(cls, address: str) -> tuple[Board, Address]:
        """Opens a board on this host that listens at `address` only. Raises TransportError.

        A TCPStore that opens its own socket would listen at every interface.
        """
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
        """Joins the board at `address`. Raises TransportError when nobody answers there."""
        host, port, secret = address
        try:
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        except RuntimeError as error:
            raise TransportError(
                f"no refit board at {host}:{port}: does the trainer run there? ({_first_line(error)})"
            ) from error
        return cls(store, bytes.fromhex(secret))

    def way(self) -> tuple[str, int]:
        """Returns (this host's own address on the interface that leads to the board, the address family)."""
        family, kind, _, _, place = socket.getaddrinfo(self._store.host, self._store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # this sends nothing
            return probe.getsockname()[0], family

    def under(self, prefix: str) -> Board:
        """Returns a view of this board whose keys all begin with `prefix`."""
        return Board(self._store, self._secret, f"{self._prefix}{prefix}/")

    def sign(self, text: bytes) -> bytes:
        """Returns a signature of `text`, 32 bytes, that only those who know the secret can make."""
        return hmac.digest(self._secret, text, "sha256")

    @property
    def store(self) -> Any:
        """Returns the store under this board's prefix, for a process group's rendezvous."""
        return dist.PrefixStore(self._prefix, self._store)

    def put(self, key: str, value: Any) -> None:
        """Stores `value` under `key`. Raises TransportError when the board is gone."""
        name, text = self._prefix + key, json.dumps(value)
        try:
            self._store.set(name, self._signature(name, text.encode()) + text)
        except RuntimeError as error:
            raise TransportError(f"the refit board is gone: {_first_line(error)}") from error

    def get(self, key: str, timeout_s: float) -> Any:
        """Waits for the value under `key` and returns it.

        Raises TransportError when none comes in time, or it is not signed.
        """
        name = self._prefix + key
        try:
            self._store.wait([name], timedelta(seconds=timeout_s))
            text = self._signed(name)
        except RuntimeError as error:
            raise TransportError(
                f"no {name!r} on the refit board within {timeout_s:.1f} s ({_first_line(error)})"
            ) from error
        if text is None:
            raise TransportError(f"{name!r} on the refit board is not of this run: another process writes to that port")
        return json.loads(text)

    def _signed(self, name: str) -> bytes | None:
        """Returns the text under a key that exists; None when its signature is not this run's."""
        found = self._store.get(name)
        signature, text = found[:SIGNATURE], found[SIGNATURE:]
        return text if hmac.compare_digest(signature, self._signature(name, text).encode()) else None

    def _signature(self, name: str, text: bytes) -> str:
        return self.sign(name.encode() + b"\0" + text).hex()

    def has(self, key: str, timeout_s: float) -> bool:
        """Says whether the key is there, or comes within `timeout_s`. Raises TransportError when the board is gone.

        Looks again and again, because the store's own wait writes two warnings to standard error whenever its time is
        up.
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
        """Returns the value under `key`, or None when there is none now."""
        text = self._look(key)
        return None if text is None else json.loads(text)

    def _look(self, key: str) -> bytes | None:
        name = self._prefix + key
        try:
            return self._signed(name) if self._store.check([name]) else None
        except RuntimeError as error:
            raise TransportError(f"the refit board is gone: {_first_line(error)}") from error

    def remove(self, key: str) -> None:
        """Removes `key`, if it is there."""
        self._store.delete_key(self._prefix + key)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
