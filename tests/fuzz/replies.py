"""What comes over a connection to a server, byte by byte: an answer, or that server's failure, within its time."""

from __future__ import annotations

import random
import socket
import threading
import time

from fuzzing import Tally, tally

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.http import Http, RequestRefused, ServerLost

LATE_S, LIMIT = 0.2, 100_000
HEADS = (
    *(b"HTTP/1.1 200 OK", b"HTTP/1.1 503 No\r\nRetry-After: 99999999999999", b"HTTP/9.9 -1 x", b"HTTP/1.0 200"),
    *(b"HTTP/1.1 200 " + b"y" * 70_000, b"GET / HTTP/1.1", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No"),
)
FIELDS = (
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999", b"Content-Length: x"),
    *(b"Transfer-Encoding: chunked", b"Content-Encoding: gzip", b"Connection: close", b"X: " + b"y" * 70_000),
)
BODIES = (
    *(b'{"a": 1}', b"[1,2]", b"5\r\n[1,2]\r\n0\r\n\r\n", b"ffffffffffffffff\r\n", b"[" * 3000, b"\x00\xff", b""),
    *(b"-5\r\n", b"x" * 200_000, b"8\r\n" * 3000),
)


def fuzz(seed: int, count: int) -> Tally:
    """Tries answers that are put together from good and bad pieces."""
    said: list[list[bytes]] = [[]]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening, said), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        return tally(seed, count, lambda rng: one(rng, url, said))


def serve(listening: socket.socket, said: list[list[bytes]]) -> None:
    """Answers every connection with the pieces of the day, and ends it, or leaves it open."""
    held = []
    while True:
        try:
            made, _ = listening.accept()
            made.settimeout(1.0)
            made.recv(4096)
            for piece in said[0]:
                made.sendall(piece)
            made.close() if said[0] and len(said[0]) % 2 else held.append(made)
        except OSError:
            if listening.fileno() < 0:
                return
        held = held[-3:]


def one(rng: random.Random, url: str, said: list[list[bytes]]) -> str:
    """Tries one answer."""
    head = HEADS[0] if rng.random() < 0.7 else rng.choice(HEADS)
    fields = [b"\r\n" + field for field in rng.sample(FIELDS, k=rng.choice([0, 1, 1, 2]))]
    said[0] = [head, *fields, b"\r\n\r\n", *rng.choices(BODIES, k=rng.randint(0, 2))]
    start = time.monotonic()
    try:
        Http(url, {}).call("GET", "/", timeout_s=LATE_S, max_bytes=LIMIT)
        outcome = "taken"
    except (ServerLost, RequestRefused, ConfigError) as error:
        outcome = type(error).__name__
        assert getattr(error, "retry_after_s", 0.0) < 10**7
    assert time.monotonic() - start < LATE_S + 2.0, "the deadline was not kept"
    return outcome
