"""A client of a store: shows the secret, checks that the key-value store knows it too, and asks."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from megatron_rl.key_value_store import store_wire_format
from megatron_rl.key_value_store.store_server import configure
from megatron_rl.key_value_store.store_wire_format import Reply, Seal, Verb, WireError

GREETING_S = 10.0  # the longest greeting
ANSWER_S = 60.0  # the longest wait for an answer beyond what was asked for: the store's process may be busy
RETRY_S = 0.2  # the pause before a key-value store is called again that could not be reached


class KeyValueError(RuntimeError):
    """Raised when the store cannot be reached, has gone, or refuses a request."""


class KeyValueStranger(KeyValueError):
    """Raised when this side and the store do not have the same secret."""


class KeyValueTimeout(KeyValueError):
    """Raised when keys did not come in time."""


class KeyValueClient:
    """Connections to one store. Many threads may use it: each request has a connection to itself while it lasts."""

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        """Connects. Raises KeyValueError when nobody answers within `timeout_s`, KeyValueStranger when the secret
        differs."""
        self.host, self.port, self._secret = host, port, secret
        self._lock, self._idle = threading.Lock(), list[_Connection]()
        end = time.monotonic() + timeout_s
        while True:
            try:
                self._idle.append(_Connection(host, port, secret))
                return
            except OSError as error:
                if time.monotonic() + RETRY_S > end:
                    raise KeyValueError(f"no key-value store at {host}:{port}: {error}") from error
            time.sleep(RETRY_S)

    def set(self, values: Mapping[str, bytes]) -> None:
        """Stores values."""
        self._ask(Verb.SET, [part for key, value in values.items() for part in (key.encode(), value)])

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Waits until all keys are there, and returns their values. Raises KeyValueTimeout when they do not come in
        time."""
        return self._ask(Verb.GET, [_milliseconds(timeout_s), *(key.encode() for key in keys)], timeout_s)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Waits until all keys are there. Raises KeyValueTimeout when they do not come in time."""
        self._ask(Verb.WAIT, [_milliseconds(timeout_s), *(key.encode() for key in keys)], timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Says whether all keys are there now."""
        return self._ask(Verb.CHECK, [key.encode() for key in keys]) == [b"1"]

    def add(self, key: str, number: int) -> int:
        """Adds to the number under a key, 0 at first. Returns the sum."""
        return int(self._ask(Verb.ADD, [key.encode(), str(number).encode()])[0])

    def remove(self, key: str) -> bool:
        """Removes a key. Says whether it was there."""
        return self._ask(Verb.REMOVE, [key.encode()]) == [b"1"]

    def clear(self, prefixes: Sequence[str]) -> int:
        """Removes all keys that begin with one of the prefixes. Returns their number."""
        return int(self._ask(Verb.CLEAR, [prefix.encode() for prefix in prefixes])[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Stores `desired` where `expected` is, or where nothing is and `expected` is empty. Returns the value now."""
        return self._ask(Verb.COMPARE_SET, [key.encode(), expected, desired])[0]

    def append(self, key: str, value: bytes) -> None:
        """Puts `value` behind what is under the key."""
        self._ask(Verb.APPEND, [key.encode(), value])

    def num_keys(self) -> int:
        """Returns the number of keys."""
        return int(self._ask(Verb.NUM_KEYS, [])[0])

    def close(self) -> None:
        """Ends the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, verb: Verb, arguments: Sequence[bytes], wait_s: float = 0.0) -> list[bytes]:
        """Returns the byte strings of the answer."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or _Connection(self.host, self.port, self._secret)
            status, *answer = connection.ask([bytes([verb]), *arguments], wait_s + ANSWER_S)
        except (OSError, WireError) as error:
            if connection is not None:
                connection.close()
            raise KeyValueError(f"the key-value store at {self.host}:{self.port} is gone: {error}") from error
        with self._lock:
            self._idle.append(connection)
        if status == bytes([Reply.LATE]):
            raise KeyValueTimeout(
                f"the key-value store at {self.host}:{self.port} did not get the keys within {wait_s:.1f} s"
            )
        if status != bytes([Reply.DONE]):
            raise KeyValueError(
                f"the key-value store at {self.host}:{self.port} refuses: {b' '.join(answer).decode()[:200]}"
            )
        return answer


class _Connection:
    """One connection that has been greeted."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        """Raises OSError when nobody answers as a key-value store does, KeyValueStranger when the secret differs."""
        end = time.monotonic() + GREETING_S
        self._socket = socket.create_connection((host, port), timeout=GREETING_S)
        try:
            configure(self._socket)
            hello = self._receive(len(store_wire_format.HELLO) + store_wire_format.NONCE_BYTES, end)
            if not hello.startswith(store_wire_format.HELLO):
                raise ConnectionError(f"what listens at {host}:{port} is no store")
            theirs, own = hello[len(store_wire_format.HELLO) :], secrets.token_bytes(store_wire_format.NONCE_BYTES)
            self._socket.sendall(own + store_wire_format.client_signature(secret, theirs, own))
            try:
                proof = self._receive(store_wire_format.SIGNATURE_BYTES, end)
            except ConnectionError as error:
                raise KeyValueStranger(
                    f"the key-value store at {host}:{port} has another secret: it is another run's"
                ) from error
            if not hmac.compare_digest(proof, store_wire_format.store_signature(secret, theirs, own)):
                raise KeyValueStranger(f"what listens at {host}:{port} does not know this run's secret")
        except BaseException:
            self._socket.close()
            raise
        self._up, self._down = Seal(secret, b"up", theirs + own), Seal(secret, b"down", theirs + own)

    def ask(self, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Returns the answer to a request. Raises OSError or WireError; the connection is of no use then."""
        end = time.monotonic() + timeout_s
        frame = self._up.frame(request)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(frame)
        length, tag = store_wire_format.HEAD.unpack(self._receive(store_wire_format.HEAD.size, end))
        if length > store_wire_format.MAX_BODY:
            raise WireError(f"an answer of {length} bytes")
        answer = self._down.open(tag, self._receive(length, end))
        if not answer:
            raise WireError("an empty answer")
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _receive(self, size: int, end: float) -> bytes:
        """Returns so many bytes. Raises TimeoutError when they have not all come at `end`."""
        found = bytearray()
        while len(found) < size:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(left)
            came = self._socket.recv(min(size - len(found), 1 << 20))
            if not came:
                raise ConnectionError("it has closed the connection")
            found += came
        return bytes(found)


def _milliseconds(seconds: float) -> bytes:
    return str(max(0, round(seconds * 1000))).encode()
