"""The wire protocol between a key-value store and its clients: a mutual proof of the secret, then authenticated frames.

Greeting: the store sends `HELLO` and a nonce. The client sends its nonce and a signature of both nonces. The store
checks the signature and answers with its signature. Each direction then has a separate key, derived from the secret and
the nonces. Every frame carries an authentication tag: an HMAC of the frame's index and body with this key. Therefore
recorded frames cannot be replayed, in this connection or another, and nobody without the secret can inject a frame.

A frame consists of the length of the body (4 bytes), the tag (16 bytes), and the body. A body encodes a list of byte
strings: the number of strings (4 bytes), the lengths of the strings (4 bytes each), and the strings. Received bytes are
never executed.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Sequence

HELLO = b"megatron_rl store 1\n"
NONCE_BYTES, SIGNATURE_BYTES, TAG_BYTES = 32, 32, 16
ANSWER_BYTES = NONCE_BYTES + SIGNATURE_BYTES  # number of bytes that a client sends in the greeting: nonce and signature
HEAD = struct.Struct(f"<I{TAG_BYTES}s")  # header of a frame: length of the body, and authentication tag
NUMBER = struct.Struct("<I")
COUNT = struct.Struct("<Q")
MAX_BODY = 256 << 20  # maximum length of a body in bytes


class WireError(ValueError):
    """Raised when received bytes violate the store's protocol or their sender does not know the secret, and when a body
    to send is too long.
    """


class Verb(enum.IntEnum):
    """The type of a client's request.

    The comment of a member lists the arguments of the request and the byte strings of the response. `keys` stands for
    one or more keys.
    """

    SET = 1  # arguments: key, value, key, value, ...
    GET = 2  # arguments: milliseconds to wait, keys; response: values
    WAIT = 3  # arguments: milliseconds to wait, keys
    CHECK = 4  # arguments: keys; response: 1 if all keys exist, else 0
    ADD = 5  # arguments: key, number to add; response: the new value (the sum) as decimal text
    REMOVE = 6  # argument: key; response: 1 if the key existed, else 0
    COMPARE_SET = 7  # arguments: key, expected value, desired value; response: the value after the operation
    APPEND = 8  # arguments: key, bytes to append to the value
    NUM_KEYS = 9  # no arguments; response: number of keys
    # removes all keys that begin with one of the prefixes; arguments: prefixes; response: number of removed keys
    CLEAR = 10


class Reply(enum.IntEnum):
    """The status of a response, sent as the first byte string of the response."""

    DONE = 1
    LATE = 2  # the requested keys did not exist before the timeout
    REFUSED = 3  # the request is invalid; an error message follows


def client_signature(secret: bytes, store_nonce: bytes, client_nonce: bytes) -> bytes:
    """Returns the client's proof that it knows the secret: an HMAC-SHA256 of both nonces (32 bytes)."""
    return hmac.digest(secret, b"client" + store_nonce + client_nonce, "sha256")


def store_signature(secret: bytes, store_nonce: bytes, client_nonce: bytes) -> bytes:
    """Returns the store's proof that it knows the secret: an HMAC-SHA256 of both nonces (32 bytes)."""
    return hmac.digest(secret, b"store" + client_nonce + store_nonce, "sha256")


class Seal:
    """The authentication of one direction of a connection. The sender creates frames (messages with an authentication
    tag) with one Seal, and the receiver checks the frames with another Seal that has the same key.

    Each instance counts its frames, so frames must be opened in the order in which they were created.
    """

    def __init__(self, secret: bytes, direction: bytes, nonces: bytes) -> None:
        """Derives the key of one direction of a connection.

        `direction`: b"up" for frames to the store, b"down" for frames from the store.
        `nonces`: the nonce of the store followed by the nonce of the client.
        """
        self._key = hmac.digest(secret, b"frames " + direction + nonces, "sha256")
        self._count = 0

    def frame(self, parts: Sequence[bytes]) -> bytes:
        """Returns the next frame (message with an authentication tag), whose body encodes the byte strings `parts`.
        Raises WireError when the body is too long.
        """
        body = join(parts)
        return HEAD.pack(len(body), self._tag(body)) + body

    def open(self, tag: bytes, body: bytes) -> list[bytes]:
        """Returns the byte strings in the next frame. Raises WireError if the authentication tag is wrong or the body
        is malformed.
        """
        if not hmac.compare_digest(tag, self._tag(body)):
            raise WireError("a frame has a wrong tag")
        return split(body)

    def _tag(self, body: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, COUNT.pack(self._count) + body, "sha256")[:TAG_BYTES]


def join(parts: Sequence[bytes]) -> bytes:
    """Encodes byte strings as the body of a frame. Raises WireError when the body is longer than MAX_BODY bytes."""
    body = b"".join([NUMBER.pack(len(parts)), *(NUMBER.pack(len(part)) for part in parts), *parts])
    if len(body) > MAX_BODY:
        raise WireError(f"{len(body)} bytes are more than a key-value store takes at once ({MAX_BODY})")
    return body


def split(body: bytes) -> list[bytes]:
    """Decodes the body of a frame into its byte strings. Raises WireError for a malformed body."""
    try:
        (count,) = NUMBER.unpack_from(body)
        lengths = struct.unpack_from(f"<{count}I", body, NUMBER.size)
    except struct.error as error:
        raise WireError(f"{len(body)} bytes are no body: {error}") from error
    start = NUMBER.size * (count + 1)
    if start + sum(lengths) != len(body):
        raise WireError(f"a body has {len(body)} bytes, its lengths tell of {start + sum(lengths)}")
    parts = []
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return parts
