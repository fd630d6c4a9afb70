"""The bytes between a key-value store and its clients: a greeting that proves the secret on both sides, then frames
with tags.

Greeting: the store sends `HELLO` and a nonce. The client sends a nonce and a signature of both; the store checks it and
sends a signature of its own. Each direction then has a key of its own, made of the secret and the nonces, and every
frame carries a tag under that key and the frame's number. So nothing that was recorded counts a second time, neither in
this connection nor in another, and nobody without the secret can put a frame into a connection.

A frame is: bytes of the body (4), tag (16), body. A body is a list of byte strings: their number (4), their lengths (4
each), the strings. Nothing of it is ever executed.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Sequence

HELLO = b"megatron_rl store 1\n"
NONCE_BYTES, SIGNATURE_BYTES, TAG_BYTES = 32, 32, 16
ANSWER_BYTES = NONCE_BYTES + SIGNATURE_BYTES  # a client's part of the greeting
HEAD = struct.Struct(f"<I{TAG_BYTES}s")  # of a frame
NUMBER = struct.Struct("<I")
COUNT = struct.Struct("<Q")
MAX_BODY = 256 << 20  # bytes; a longer frame is no frame


class WireError(ValueError):
    """Raised for bytes that are not of this protocol, or not of somebody who knows the secret."""


class Verb(enum.IntEnum):
    """The requests of a client. Behind the verb stand its arguments; `keys` are one or several."""

    SET = 1  # key, value, key, value, ...
    GET = 2  # milliseconds to wait, keys -> values
    WAIT = 3  # milliseconds to wait, keys
    CHECK = 4  # keys -> 1 where all are there, else 0
    ADD = 5  # key, number -> the sum, which is the new value as text
    REMOVE = 6  # key -> 1 where it was there, else 0
    COMPARE_SET = 7  # key, expected value, desired value -> the value now
    APPEND = 8  # key, what is put behind its value
    NUM_KEYS = 9  # -> the number of keys
    CLEAR = 10  # prefixes -> the number of keys that began with one of them; they are removed


class Reply(enum.IntEnum):
    """The first byte string of an answer."""

    DONE = 1
    LATE = 2  # the keys did not come in time
    REFUSED = 3  # the request makes no sense; a text says why


def client_signature(secret: bytes, store_nonce: bytes, client_nonce: bytes) -> bytes:
    """Returns the client's proof that it knows the secret, 32 bytes."""
    return hmac.digest(secret, b"client" + store_nonce + client_nonce, "sha256")


def store_signature(secret: bytes, store_nonce: bytes, client_nonce: bytes) -> bytes:
    """Returns the store's proof that it knows the secret, 32 bytes."""
    return hmac.digest(secret, b"store" + client_nonce + store_nonce, "sha256")


class Seal:
    """One direction of a connection: makes its frames on one side, and checks them on the other."""

    def __init__(self, secret: bytes, direction: bytes, nonces: bytes) -> None:
        """`direction`: b"up" to the store, b"down" from it. `nonces`: the store's, then the client's."""
        self._key = hmac.digest(secret, b"frames " + direction + nonces, "sha256")
        self._count = 0

    def frame(self, parts: Sequence[bytes]) -> bytes:
        """Returns the next frame."""
        body = join(parts)
        return HEAD.pack(len(body), self._tag(body)) + body

    def open(self, tag: bytes, body: bytes) -> list[bytes]:
        """Returns the byte strings of the next frame. Raises WireError when it is not of the other side."""
        if not hmac.compare_digest(tag, self._tag(body)):
            raise WireError("a frame has a wrong tag")
        return split(body)

    def _tag(self, body: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, COUNT.pack(self._count) + body, "sha256")[:TAG_BYTES]


def join(parts: Sequence[bytes]) -> bytes:
    """Returns the body of some byte strings. Raises WireError when it is too long."""
    body = b"".join([NUMBER.pack(len(parts)), *(NUMBER.pack(len(part)) for part in parts), *parts])
    if len(body) > MAX_BODY:
        raise WireError(f"{len(body)} bytes are more than a key-value store takes at once ({MAX_BODY})")
    return body


def split(body: bytes) -> list[bytes]:
    """Returns the byte strings of a body. Raises WireError for bytes that are none."""
    if len(body) < NUMBER.size:
        raise WireError(f"{len(body)} bytes are no body")
    (count,) = NUMBER.unpack_from(body)
    start = NUMBER.size * (count + 1)
    if start > len(body):
        raise WireError(f"{len(body)} bytes cannot hold {count} byte strings")
    lengths = struct.unpack_from(f"<{count}I", body, NUMBER.size)
    if start + sum(lengths) != len(body):
        raise WireError(f"a body has {len(body)} bytes, its lengths tell of {start + sum(lengths)}")
    parts = []
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return parts
