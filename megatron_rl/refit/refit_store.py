"""A store for small messages between a trainer and its engines: JSON values in a key-value store on trainer rank 0."""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import secrets
import socket
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import pydantic

from megatron_rl.key_value_store.rank_store import RankStore
from megatron_rl.key_value_store.store_client import KeyValueClient, KeyValueError, KeyValueTimeout
from megatron_rl.key_value_store.store_server import KeyValueServer
from megatron_rl.refit.transport import TransportError

T = TypeVar("T")


class MessageError(TransportError):
    """Raised when a value on the refit store is not a message of the expected type."""


class Address(NamedTuple):
    """The address of a key-value store, and the secret that a client needs to access it."""

    host: str
    port: int
    secret: str  # hexadecimal text

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


class RefitStore:
    """A client of a key-value store with JSON values. Only processes that know the store's secret can access it.

    Values are parsed as JSON only, and are never executed. The reader of a value gives its type, and the value is
    validated: unknown keys and wrong types are errors.
    """

    def __init__(self, client: KeyValueClient, secret: bytes, prefix: str = "") -> None:
        self._client, self._secret = client, secret
        self.prefix = prefix  # added to all keys of this view

    @classmethod
    def host(cls, address: str) -> tuple[RefitStore, Address]:
        """Starts a store on this host that listens at `address` only. Returns (client, address of the store).

        The store is closed once the returned client, and all views and rank stores made from the client, are garbage
        collected. Raises TransportError when the store cannot listen at `address`.
        """
        secret = secrets.token_bytes(32)
        try:
            server = KeyValueServer(address, secret)
        except OSError as error:
            raise TransportError(f"a refit store cannot listen at {address}: {error}") from error
        store_address = Address(address, server.port, secret.hex())
        store = cls.join(store_address)
        weakref.finalize(store._client, server.close)
        return store, store_address

    @classmethod
    def join(cls, address: Address, timeout_s: float = 60) -> RefitStore:
        """Connects to the key-value store at `address`.

        Raises TransportError when no store answers within `timeout_s`, or when the store has another secret.
        """
        host, port, secret = address
        try:
            return cls(KeyValueClient(host, port, bytes.fromhex(secret), timeout_s), bytes.fromhex(secret))
        except KeyValueError as error:
            message = f"no refit store of this run at {host}:{port}: does the trainer run there? ({error})"
            raise TransportError(message) from error

    def way(self) -> tuple[str, int]:
        """Returns (IP address of this host on the interface that routes to the store, address family such as
        socket.AF_INET).
        """
        family, kind, _, _, place = socket.getaddrinfo(self._client.host, self._client.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # this sends nothing
            return probe.getsockname()[0], family

    def under(self, prefix: str) -> RefitStore:
        """Returns a view of this store that adds `prefix` and "/" to the front of all keys."""
        return RefitStore(self._client, self._secret, f"{self.prefix}{prefix}/")

    def sign(self, text: bytes) -> bytes:
        """Returns the HMAC-SHA256 of `text` with the secret of the store as key, 32 bytes."""
        return hmac.digest(self._secret, text, "sha256")

    def rank_store(self, timeout: timedelta) -> RankStore:
        """Returns a torch.distributed store for a process group. It accesses the same key-value store as this client,
        but does not add this client's prefix to keys. `timeout`: the default timeout of the returned store's waits."""
        return RankStore(self._client, timeout)

    def put(self, key: str, value: Any) -> None:
        """Stores a JSON value or a dataclass under `key`. Raises TransportError when the store no longer answers."""
        self.put_together({key: value})

    def put_together(self, values: Mapping[str, Any]) -> None:
        """Stores several values atomically. Raises TransportError when the store no longer answers."""
        with _gone():
            self._client.set(
                {self.prefix + key: json.dumps(value, default=asdict).encode() for key, value in values.items()}
            )

    def get(self, key: str, kind: type[T], timeout_s: float) -> T:
        """Waits for a value of type `kind` under `key` and returns it.

        Raises MessageError when the value has another type, and TransportError when there is no value after
        `timeout_s`, or when the store no longer answers.
        """
        value = self.peek(key, kind, timeout_s)
        if value is None:
            raise TransportError(f"the refit store got no value of {self.prefix + key!r} within {timeout_s:.1f} s")
        return value

    def has(self, key: str, timeout_s: float) -> bool:
        """Waits up to `timeout_s` until `key` exists. Returns whether it exists.

        Raises TransportError when the store no longer answers.
        """
        try:
            with _gone():
                self._client.wait([self.prefix + key], timeout_s)
        except KeyValueTimeout:
            return False
        return True

    def peek(self, key: str, kind: type[T], timeout_s: float = 0.0) -> T | None:
        """Returns the value of type `kind` under `key`, or None if the key does not exist within `timeout_s`. Values
        are never None.

        Raises MessageError when the value has another type, and TransportError when the store no longer answers.
        """
        try:
            with _gone():
                value = self._client.get([self.prefix + key], timeout_s)[0]
        except KeyValueTimeout:
            return None
        try:
            return _validator(kind).validate_json(value, strict=True, extra="forbid")
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            why = f"{place}: {first['msg']}" if place else first["msg"]
            raise MessageError(f"{self.prefix + key!r} on the refit store is no valid message ({why})") from None

    def remove(self, key: str) -> None:
        """Removes `key` if it exists."""
        with _gone():
            self._client.remove(self.prefix + key)

    def clear(self, prefixes: Iterable[str]) -> None:
        """Removes all keys that begin with one of the prefixes."""
        with _gone():
            self._client.clear([self.prefix + prefix for prefix in prefixes])


@functools.cache
def _validator(kind: type[T]) -> pydantic.TypeAdapter[T]:
    return pydantic.TypeAdapter(kind)


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """A context manager that converts errors of the key-value store in the `with` block to TransportError. Does not
    convert KeyValueTimeout, which the caller handles.
    """
    try:
        yield
    except KeyValueTimeout:
        raise
    except KeyValueError as error:
        raise TransportError(f"the refit store is gone: {error}") from error
