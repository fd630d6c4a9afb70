"""Messages that a process with an engine's secret may send: in a refit, in the server registry and to an engine. Each
is taken or costs its sender; the trainer and the other engines go on."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from fuzzing import Tally, tally
from hostile_engines import READY, VOTE, Refits, refits, staged_engine

from megatron_rl.engines.server_registry import Listing, ServerRegistry
from megatron_rl.refit.engine_side import StagedEngineSide
from megatron_rl.refit.refit_store import RefitStore

ODD: list[Any] = [
    *(None, True, -1, 5, 2**70, 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x", "cpu", "\ud800", "\0"),
    *([], {}, [[]], [1, 2], {"": 1}, {"-1": "x"}, {"99": READY["location"]}, "x" * 10_000, [None] * 300),
]
BYTES = (b"", b"{", b"\xff", b"[" * 9999, b'{"a":' * 9999, b"NaN", b"1" * 9999, b'"\\ud800"', b"\0" * 100, b"nul")
GO = {
    "engines": {"0": READY["location"]}, "trainer": [["host", "trainer", "cpu", ""]], "epoch": 1,
    "order": {"version": 1, "verify": "full", "sums_on": "host", "base": {}, "keeps_sent": False},
}  # fmt: skip
LISTING = dataclasses.asdict(Listing(role="solver", replica=0, url="http://h:1", incarnation="i", log="l"))


def fuzz(seed: int, count: int) -> Tally:
    """Tries changed messages at a trainer, at an engine with staging memory, and in a server registry."""
    store, _ = RefitStore.host("127.0.0.1")
    side = staged_engine(store)
    with refits() as run, tempfile.TemporaryDirectory() as place:

        def one(rng: random.Random) -> str:
            match rng.randrange(3):
                case 0:
                    return at_trainer(rng, run)
                case 1:
                    return at_engine(rng, store, side)
            return in_registry(rng, Path(place))

        found = tally(seed, count, one, timed=False)
    side.close()
    return found


def changed(rng: random.Random, message: Any) -> Any:
    """Returns a message with one odd value, a key more or a key less, or other bytes."""
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(BYTES)
    if kind < 0.3:
        return rng.choice(ODD)
    message = json.loads(json.dumps(message))
    holder = message
    while True:
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not places:
            return rng.choice(ODD)
        at = rng.choice(places)
        if isinstance(holder[at], (dict, list)) and holder[at] and rng.random() < 0.6:
            holder = holder[at]
            continue
        break
    if isinstance(holder, dict) and rng.random() < 0.3:
        holder[rng.choice(["", "more", "99", "-1", "version"])] = rng.choice(ODD)
    elif rng.random() < 0.3:
        del holder[at]
    else:
        holder[at] = rng.choice(ODD)
    return message


def at_trainer(rng: random.Random, run: Refits) -> str:
    """Sends messages of engine rank 1 to a trainer. The refit ends, and rank 0 has the weights."""
    kinds = {"ready": READY, "vote": VOTE, "pulse": 3, "hello": "incarnation"}
    odd = rng.choices([*kinds], weights=[6, 1, 1, 1])[0]
    messages: dict[str, Any] = {"hello": "incarnation", "ready": 5}
    if odd == "vote" or (odd == "pulse" and rng.random() < 0.3):  # otherwise the engine is left out at the roll call
        messages |= {"ready": READY | {"location": ["host", f"{rng.random()}", "cpu", ""]}, "vote": VOTE}
    messages[odd] = rng.choice([*ODD, *BYTES]) if odd in ("pulse", "hello") else changed(rng, kinds[odd])
    begin = time.monotonic()
    metrics = run.refit(**messages)
    assert time.monotonic() - begin < 30.0, "the refit waited for the engine"
    return f"trainer: {odd}, {'left out' if metrics['refit/failed_engines'] else 'taken'}"


def at_engine(rng: random.Random, store: RefitStore, side: StagedEngineSide) -> str:
    """Sends messages of a trainer to an engine rank. Its thread goes on with the next refit."""
    number = store.get("next", int, 1.0)
    go = changed(rng, GO)
    store.put(f"{number}/ticket", True)
    store._client.set({f"{number}/go": encoded(go)})
    store.get(f"{number}/ready/0", dict, 20.0)
    store.put_together({"next": number + 1, f"{number}/verdict": {"committed": []}})
    assert side._thread.is_alive(), "the engine receives no more refits"
    return "engine: left out"


def in_registry(rng: random.Random, place: Path) -> str:
    """Writes a changed listing. It is read as a listing with fields of the right types, or left out."""
    (place / "solver-0.json").write_bytes(encoded(changed(rng, LISTING)))
    registry = ServerRegistry(place)
    found = registry.read("solver")
    assert all(type(listing.url) is str and type(listing.replica) is int for listing in found)
    registry.remove(Listing(**LISTING))
    return f"registry: {'read' if found else 'left out'}"


def encoded(value: Any) -> bytes:
    """Returns a message as JSON; bytes as they are."""
    return value if isinstance(value, bytes) else json.dumps(value).encode()
