"""Values between ranks: those that travel come back as they were, and changed bytes give a value or CodecError."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import Tally, tally

from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.lib.frames import KINDS, LENGTH_BYTES, CodecError
from megatron_rl.messages.message_codec import pack, unpack
from megatron_rl.types import Stop

TREES = (
    *('["object","Sampling",[]]', '["object","Path",["/etc/passwd"]]', '["again",0]', '["again",-1]', '["array","9"]'),
    *('["array","0"]', '["bytes","0"]'),
    *('["enum","Stop","__class__"]', '["enum","Sampling","n"]', '["dict",[1]]', '["dict",[["list",[]],1]]'),
    *('["kind","object"]', '["torch","load"]', '["set",[["list",[]]]]', '["path",7]', '["list",7]'),
    *("[]", "[[]]", '{"a":1}', '["number",0]', "NaN"),
    *("[" * 5000 + "]" * 5000, '["list",' * 3000 + "[]" + "]" * 3000, '["object","Stop",["eos"]]', '["array",true]'),
)  # fmt: skip


def fuzz(seed: int, count: int) -> Tally:
    """Tries values, their bytes with some changed, headers of a stranger's, and pickles."""
    return tally(seed, count, one)


def one(rng: random.Random) -> str:
    """Tries one input."""
    way = rng.randrange(4)
    if way == 0:
        value = some(rng, 3)
        assert same(unpack(pack(value)), value), value
        return "came back"
    if way == 1:
        data = pack(some(rng, 3))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randint(0, len(data))] if rng.random() < 0.3 else data
    elif way == 2:
        kind, shape = (
            rng.choice([*KINDS, "object", "bytes", 7, None]),
            rng.choice([[-1], [2**62, 4], [1.5], "a", [0], 3]),
        )
        header = (
            f'{{"about": {rng.choice(TREES)}, "arrays": {json.dumps(rng.choice([[], [["0", kind, shape]]]))}}}'.encode()
        )
        data = bytearray(len(header).to_bytes(LENGTH_BYTES, "little") + header + rng.randbytes(rng.choice([0, 8])))
    else:
        data = bytearray(pickle.dumps(some(rng, 2)))
    try:
        unpack(data)
    except CodecError:
        return "refused"
    return "another value"


def some(rng: random.Random, depth: int) -> Any:
    """Returns a value that travels."""
    plain = [
        None,
        True,
        rng.randint(-(2**70), 2**70),
        rng.gauss(0, 1),
        "ü\ud800\0",
        "",
        b"\xff",
        Path("/a b"),
        Stop.EOS,
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(plain)
    parts = [some(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    array = np.frombuffer(rng.randbytes(12), "uint8").reshape(3, 4)
    many = [
        *(
            parts,
            tuple(parts),
            {i: part for i, part in enumerate(parts)},
            {str(i): part for i, part in enumerate(parts)},
        ),
        *(array, array.astype(rng.choice(KINDS)), np.float32(rng.random()), np.int32, [array, array], np.empty((0, 3))),
        *(Sampling(max_tokens=3, stop_tokens=(1, 2)), {1, 2}, frozenset("ab"), array[:, ::2].astype("int16")),
        Completion(tokens=np.arange(3), logprobs=np.zeros(3), stop=Stop.LENGTH, versions=[(0, 1)]),
    ]
    return rng.choice(many)


def same(a: Any, b: Any) -> bool:
    """Says whether two values are equal, of the same types throughout."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Completion):
        return same([getattr(a, n) for n in a.__slots__], [getattr(b, n) for n in b.__slots__])
    return a == b
