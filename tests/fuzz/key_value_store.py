"""A store: requests give what torch's own store gives, and bytes of strangers change nothing and stop nothing."""

from __future__ import annotations

import random
import socket
import struct
from datetime import timedelta

import torch.distributed as dist
from fuzzing import Tally, tally

from megatron_rl.key_value_store import store_wire_format
from megatron_rl.key_value_store.rank_store import RankStore
from megatron_rl.key_value_store.store_client import KeyValueClient
from megatron_rl.key_value_store.store_server import KeyValueServer

SECRET = b"a secret of this run"
BODIES: tuple[list[bytes], ...] = (  # of requests that make no sense
    *([], [b""], [b"\x63"], [b"\x02"], [b"\x02", b"x", b"kept"], [b"\x01", b"odd"], [b"\x05", b"kept", b"1"]),
    *([b"\x03", b"\xff\xfe"], [b"\x02", b"9" * 9999, b"k"], [b"\x02", b"9" * 400, b"k"], [b"\x07", b"a"]),
)
KEYS = ("a", "b", "ü", "")


def fuzz(seed: int, count: int) -> Tally:
    """Tries sequences of requests, and connections of strangers and of clients that break the protocol."""
    server = KeyValueServer("127.0.0.1", SECRET)
    own = KeyValueClient("127.0.0.1", server.port, SECRET, 10.0)
    own.set({"kept": b"as it was"})
    try:
        return tally(seed, count, lambda rng: one(rng, server, own))
    finally:
        own.close()
        server.close()


def one(rng: random.Random, server: KeyValueServer, own: KeyValueClient) -> str:
    """Tries one input."""
    if rng.random() < 0.4:
        return compare(rng, own)
    said = rng.random() < 0.5 and hostile_client(rng, server) or stranger(rng, server)
    assert own.get(["kept"], 0.0) == [b"as it was"] and own.num_keys() == 1
    return said


def compare(rng: random.Random, own: KeyValueClient) -> str:
    """Tries a sequence of operations on the key-value store and on a HashStore."""
    kept = RankStore(own, timedelta(seconds=5))  # a PrefixStore over it keeps its C++ half alone
    ours = dist.PrefixStore("compared", kept)
    store = dist.PrefixStore("compared", dist.HashStore())
    for _ in range(rng.randint(1, 12)):
        key, value = rng.choice(KEYS), rng.choice(["1", "", "x" * 1000, "ü"])
        verb = rng.choice(["set", "add", "check", "delete", "compare", "append", "get"])
        answers = []
        for each in (ours, store):
            if verb == "set":
                answers.append(each.set(key, value))
            elif verb == "add":
                each.set(key + "#", "7")
                answers.append(each.add(key + "#", len(value)))
            elif verb == "check":
                answers.append(each.check([key, "a"]))
            elif verb == "delete":
                answers.append(each.delete_key(key))
            elif verb == "compare" and store.check([key]):
                answers.append(each.compare_set(key, value, "new"))
            elif verb == "append":
                answers.append(each.append(key, value))
            elif verb == "get" and store.check([key]):
                answers.append((each.get(key), each.multi_get([key, key])))
        assert not answers or answers[0] == answers[1], (verb, key, value, answers)
    for key in (*KEYS, *(key + "#" for key in KEYS)):
        ours.delete_key(key)
    return "as torch's store"


def stranger(rng: random.Random, server: KeyValueServer) -> str:
    """Sends what somebody without the secret might."""
    parts = [rng.randbytes(rng.choice([1, 31, 63, 64, 65, 200])), b"GET / HTTP/1.1\r\n\r\n", bytes(64)]
    parts += [b"\xce\xf7\x85\x3c" + rng.randbytes(60), struct.pack("<I", 2**32 - 1) + bytes(80)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10.0) as made:
        if rng.random() < 0.5:
            made.recv(rng.randint(1, 52))
        try:
            made.sendall(rng.choice(parts))
            if rng.random() < 0.2:
                made.shutdown(socket.SHUT_WR)
        except OSError:
            return "cut"
    return "sent"


def hostile_client(rng: random.Random, server: KeyValueServer) -> str:
    """Greets as a client does, then sends frames that are changed, cut, too long, or make no sense."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10.0) as made:
        said = b""
        while len(said) < 52:
            said += made.recv(52 - len(said))
        theirs, nonce = said[20:], rng.randbytes(32)
        made.sendall(nonce + store_wire_format.client_signature(SECRET, theirs, nonce))
        seal = store_wire_format.Seal(SECRET, b"up", theirs + nonce)
        body = rng.choice(BODIES)
        frame = bytearray(seal.frame(body))
        way = rng.randrange(3)
        if way == 1:
            frame[rng.randrange(len(frame))] ^= 1 + rng.randrange(255)
        try:
            made.sendall(frame[: rng.randint(0, len(frame))] if way == 2 else frame)
        except OSError:
            return "cut"
    return ("made no sense", "changed", "cut short")[way]
