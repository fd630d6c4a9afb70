"""Serialises values sent between the ranks of a run: JSON values, arrays, and instances of the classes in TRAVELLERS.
Pickle is not used, so bytes of an untrusted sender can produce a wrong value but never run code.

A packed value is a frame (frames.py): a tree of JSON values, and arrays. In the tree, texts, numbers, true, false and
null represent themselves; every other value is a list whose first item names the value's type.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.sampling import Completion, Sampling, TandemSampling, TopScores
from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.batches.replica_batch import Outline, StepTotals
from megatron_rl.batches.rollout_buffer import Counts, Form, Value
from megatron_rl.lib import frames
from megatron_rl.lib.frames import KINDS, CodecError
from megatron_rl.run.checkpoint import Checkpoint
from megatron_rl.types import Author, Rollout, Stop

# Dataclasses, named tuples and enums that may be sent between ranks. Add new classes to this tuple.
# Sending an object of any other class raises TypeError.
TRAVELLERS: tuple[type, ...] = (
    *(Rule, Counts, Form, Value, Outline, StepTotals, Completion, Sampling, TandemSampling, TopScores),
    *(Checkpoint, Author, Stop, Rollout),
)
DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.bfloat16, torch.float16)}
PLAIN = frozenset({str, int, float, bool, type(None)})
COLLECTIONS: Mapping[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}


def pack(value: Any, travellers: Sequence[type] = TRAVELLERS) -> bytearray:
    """Serialises a value. Returns the bytes. Raises TypeError, with the name of the type, if the value has a type that
    cannot be serialised.
    """
    packer = _Packer(travellers)
    tree = packer.tree(value)
    return frames.pack(tree, packer.arrays)


def unpack(packed: bytes | bytearray | memoryview, travellers: Sequence[type] = TRAVELLERS) -> Any:
    """Deserialises bytes that `pack` returned. Returns the value, whose arrays are copies. Raises CodecError for bytes
    that do not hold a valid value.
    """
    tree, arrays = frames.unpack(packed)
    try:
        return _Unpacker({name: array.copy() for name, array in arrays.items()}, travellers).value(tree)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise CodecError(f"a packed value is wrong: {type(error).__name__} {error}") from error


class _Packer:
    """Converts one value to a tree of JSON values and a list of arrays. An array or object that occurs several times in
    the value is serialised once.
    """

    def __init__(self, travellers: Sequence[type]) -> None:
        self._travellers = frozenset(travellers)
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[int, str] = {}  # id() of an array -> its name
        # id() of an object -> number of the object in the tree; an object gets its number when its conversion ends
        self._objects: dict[int, int] = {}
        self._held: list[Any] = []  # references that keep objects alive, so that no id() is reused

    def tree(self, value: Any) -> Any:
        """Converts a value, or a part of the value, to a tree of JSON values."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind.__name__ in COLLECTIONS and kind is COLLECTIONS[kind.__name__]:
            plain = PLAIN.issuperset(map(type, value))
            return [kind.__name__, [*value] if plain else [self.tree(part) for part in value]]
        if kind is dict:
            return ["dict", [self.tree(part) for item in value.items() for part in item]]
        if kind is np.ndarray:
            return ["array", self._array(value)]
        if kind in self._travellers:
            return ["enum", kind.__name__, value.name] if issubclass(kind, enum.Enum) else self._object(kind, value)
        return self._rarer(kind, value)

    def _rarer(self, kind: type, value: Any) -> list[Any]:
        if isinstance(value, np.generic):
            return ["number", self._array(np.asarray(value))]
        if kind in (bytes, bytearray):
            return ["bytes", self._array(np.frombuffer(value, np.uint8))]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if isinstance(value, torch.dtype):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, type) and issubclass(value, np.generic):
            return ["kind", np.dtype(value).name]
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} does not travel between ranks: send numbers, texts, lists, "
            "dicts, arrays, or a class of message_codec.TRAVELLERS"
        )

    def _object(self, kind: type, value: Any) -> list[Any]:
        if id(value) in self._objects:
            return ["again", self._objects[id(value)]]
        tuples = issubclass(kind, tuple)
        parts = value if tuples else [getattr(value, field.name) for field in dataclasses.fields(kind)]
        encoded = ["object", kind.__name__, [self.tree(part) for part in parts]]
        self._objects[id(value)] = len(self._objects)
        self._held.append(value)
        return encoded

    def _array(self, value: np.ndarray) -> str:
        name = self._names.setdefault(id(value), str(len(self.arrays)))
        self.arrays[name] = value
        return name


class _Unpacker:
    """Converts a tree of JSON values, and the arrays, back to the value. An invalid tree raises one of the exceptions
    that `unpack` converts to CodecError.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], travellers: Sequence[type]) -> None:
        self._travellers = {kind.__name__: kind for kind in travellers}
        self._objects: list[Any] = []
        self._readers: Mapping[str, Callable[..., Any]] = {
            "dict": self._dict,
            "array": arrays.__getitem__,
            "object": self._object,
            "again": lambda number: self._objects[range(len(self._objects))[number]],
            "enum": lambda name, member: self._travellers[name].__members__[member],  # a class without members raises
            "number": lambda name: arrays[name][()],
            "bytes": lambda name: arrays[name].tobytes(),
            "path": Path,
            "torch": DTYPES.__getitem__,
            "kind": lambda name: np.dtype(KINDS[KINDS.index(name)]).type,
        }

    def value(self, tree: Any) -> Any:
        """Converts a tree of JSON values, or a part of it, to the value."""
        if type(tree) in PLAIN:
            return tree
        name, *parts = tree
        if name not in COLLECTIONS:
            return self._readers[name](*parts)
        (members,) = parts
        return COLLECTIONS[name](members if PLAIN.issuperset(map(type, members)) else map(self.value, members))

    def _dict(self, members: Sequence[Any]) -> dict[Any, Any]:
        values = [self.value(part) for part in members]
        return dict(zip(values[::2], values[1::2], strict=True))

    def _object(self, name: str, members: Sequence[Any]) -> Any:
        kind = self._travellers[name]
        values = [self.value(part) for part in members]
        if issubclass(kind, tuple):
            decoded = kind(*values)
        else:  # `fields` raises TypeError for an enum
            fields = [field.name for field in dataclasses.fields(kind)]
            decoded = kind(**dict(zip(fields, values, strict=True)))
        self._objects.append(decoded)
        return decoded
