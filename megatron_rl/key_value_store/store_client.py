"""A client of the key-value store. Client and store prove to each other that they know the secret."""

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

GREETING_S = 10.0  # timeout in seconds for connecting, and for proving to each other that both sides know the secret
ANSWER_S = 60.0  # longest wait in seconds for the response of a busy store, in addition to the timeout of the request
RETRY_S = 0.2  # pause in seconds before the next attempt to connect


class KeyValueError(RuntimeError):
    """Raised when the store cannot be reached, has closed the connection, or refuses a request."""


class KeyValueStranger(KeyValueError):
    """Raised when the client and the store have different secrets."""


class KeyValueTimeout(KeyValueError):
    """Raised when requested keys are not in the store before the timeout of the request."""


class KeyValueClient:
    """A thread-safe client of one key-value store. Concurrent requests use different connections from a pool of
    connections.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        """Connects to the store at `host`:`port`. Repeats failed attempts for up to `timeout_s` seconds.

        Raises KeyValueError when no store answers within `timeout_s`, and KeyValueStranger when the store has another
        secret.
        """
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
        """Stores several values by key, atomically."""
        self._ask(Verb.SET, [part for key, value in values.items() for part in (key.encode(), value)])

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Waits until all keys exist, and returns their values in the order of the keys. Raises KeyValueTimeout after
        `timeout_s`.
        """
        return self._ask(Verb.GET, [_milliseconds(timeout_s), *(key.encode() for key in keys)], timeout_s)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Waits until all keys exist. Raises KeyValueTimeout after `timeout_s`."""
        self._ask(Verb.WAIT, [_milliseconds(timeout_s), *(key.encode() for key in keys)], timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist now."""
        return self._ask(Verb.CHECK, [key.encode() for key in keys]) == [b"1"]

    def add(self, key: str, number: int) -> int:
        """Adds `number` to the integer under `key`, which is 0 if the key does not exist. Returns the sum."""
        return int(self._ask(Verb.ADD, [key.encode(), str(number).encode()])[0])

    def remove(self, key: str) -> bool:
        """Removes a key. Returns whether the key existed."""
        return self._ask(Verb.REMOVE, [key.encode()]) == [b"1"]

    def clear(self, prefixes: Sequence[str]) -> int:
        """Removes all keys that begin with one of the prefixes. Returns the number of removed keys."""
        return int(self._ask(Verb.CLEAR, [prefix.encode() for prefix in prefixes])[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Stores `desired` if the value under `key` is `expected`. A missing key has the empty value.

        Returns the value under `key` after this operation, or `expected` if the key still does not exist.
        """
        return self._ask(Verb.COMPARE_SET, [key.encode(), expected, desired])[0]

    def append(self, key: str, value: bytes) -> None:
        """Appends `value` to the value under `key`. A missing key has the empty value."""
        self._ask(Verb.APPEND, [key.encode(), value])

    def num_keys(self) -> int:
        return int(self._ask(Verb.NUM_KEYS, [])[0])

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, verb: Verb, arguments: Sequence[bytes], wait_s: float = 0.0) -> list[bytes]:
        """Sends a request and returns the byte strings of the response, without the status.

        `wait_s`: number of seconds for which the store may wait until the requested keys exist. Raises KeyValueTimeout
        when the store reports that keys do not exist after `wait_s`, and KeyValueError for any other failure.
        """
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
        if status == bytes([Reply.DONE]):
            return answer
        kind, problem = KeyValueError, f"refuses: {b' '.join(answer).decode()[:200]}"
        if status == bytes([Reply.LATE]):
            kind, problem = KeyValueTimeout, f"did not get the keys within {wait_s:.1f} s"
        raise kind(f"the key-value store at {self.host}:{self.port} {problem}")


class _Connection:
    """A connection to the store, on which client and store have proved to each other that they know the secret."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        """Connects to the store, and exchanges proofs of the secret with it.

        Raises OSError when no key-value store answers, and KeyValueStranger when the store has another secret.
        """
        end = time.monotonic() + GREETING_S
        self._socket = socket.create_connection((host, port), timeout=GREETING_S)
        try:
            configure(self._socket)
            hello = self._receive(len(store_wire_format.HELLO) + store_wire_format.NONCE_BYTES, end)
            if not hello.startswith(store_wire_format.HELLO):
                raise ConnectionError(f"what listens at {host}:{port} is no store")
            theirs, nonce = hello[len(store_wire_format.HELLO) :], secrets.token_bytes(store_wire_format.NONCE_BYTES)
            self._socket.sendall(nonce + store_wire_format.client_signature(secret, theirs, nonce))
            try:
                proof = self._receive(store_wire_format.SIGNATURE_BYTES, end)
            except ConnectionError as error:
                raise KeyValueStranger(
                    f"the key-value store at {host}:{port} has another secret: it is another run's"
                ) from error
            if not hmac.compare_digest(proof, store_wire_format.store_signature(secret, theirs, nonce)):
                raise KeyValueStranger(f"what listens at {host}:{port} does not know this run's secret")
        except BaseException:
            self._socket.close()
            raise
        self._up, self._down = Seal(secret, b"up", theirs + nonce), Seal(secret, b"down", theirs + nonce)

    def ask(self, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Sends a request and returns the byte strings of the response, of which the first is the status.

        Raises OSError when the connection fails, and WireError for an invalid response. The connection cannot be used
        after an error.
        """
        end = time.monotonic() + timeout_s
        frame = self._up.frame(request)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(frame)
        length, tag = store_wire_format.HEAD.unpack(self._receive(store_wire_format.HEAD.size, end))
        answer = self._down.open(tag, self._receive(length, end)) if length <= store_wire_format.MAX_BODY else []
        if not answer:
            raise WireError(f"an empty answer, or one that is too long: {length} bytes")
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _receive(self, size: int, end: float) -> bytes:
        """Receives exactly `size` bytes. Raises TimeoutError if they have not arrived by the time `end`, as returned by
        time.monotonic().
        """
        received = bytearray()
        while len(received) < size:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(remaining_s)
            came = self._socket.recv(min(size - len(received), 1 << 20))
            if not came:
                raise ConnectionError("it has closed the connection")
            received += came
        return bytes(received)


def _milliseconds(seconds: float) -> bytes:
    return str(max(0, round(seconds * 1000))).encode()
