"""Values as bytes between the ranks of a run: JSON, raw arrays, and the classes of a table. Nothing is pickled, so that
bytes of a stranger can give a wrong value but never run code.

A packed value is: bytes of the header (4), the header, the raw bytes of arrays one after the other. The header is
{"tree": ..., "arrays": [[kind, shape], ...]}. In the tree a text, number, true, false or null stands for itself, and
everything else is a list whose first member says what it is (`_Packer`, `_Unpacker`).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.authors import Rule
from megatron_rl.batches.flat import Counts, Form, Value
from megatron_rl.batches.work import Outline, StepTotals
from megatron_rl.engines.base import Completion, Sampling, TandemSampling, TopScores
from megatron_rl.run.checkpoint import Checkpoint
from megatron_rl.types import Author, Stop

# Dataclasses, named tuples and enums that travel between ranks. Others are refused by name; add them here.
TRAVELLERS: tuple[type, ...] = (
    *(Rule, Counts, Form, Value, Outline, StepTotals, Completion, Sampling, TandemSampling, TopScores),
    *(Checkpoint, Author, Stop),
)
KINDS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
TORCH_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
PLAIN = frozenset({str, int, float, bool, type(None)})
LENGTH_BYTES = 4
BYTES = "bytes"  # the kind of a byte string among the arrays


class PackingError(ValueError):
    """Raised for bytes that are no packed value."""


def pack(value: Any, travellers: Sequence[type] = TRAVELLERS) -> bytearray:
    """Returns the bytes of a value. Raises TypeError, with the name of its type, for one that does not travel."""
    packer = _Packer(travellers)
    header = json.dumps({"tree": packer.tree(value), "arrays": packer.named}).encode()
    return bytearray().join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *packer.raw])


def unpack(packed: bytes | bytearray | memoryview, travellers: Sequence[type] = TRAVELLERS) -> Any:
    """Returns the value. Its arrays have memory of their own. Raises PackingError for bytes that are no value."""
    data = memoryview(packed)
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if not LENGTH_BYTES < start <= len(data):
        raise PackingError(f"{len(data)} bytes are no packed value: its header would end at byte {start}")
    try:
        header = json.loads(bytes(data[LENGTH_BYTES:start]))
        return _Unpacker(_arrays(header["arrays"], data[start:]), travellers).value(header["tree"])
    except PackingError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise PackingError(f"the header of a packed value is wrong: {type(error).__name__} {error}") from error


def _arrays(named: Sequence[Any], data: memoryview) -> list[Any]:
    """Returns the arrays and byte strings that the header names."""
    found: list[Any] = []
    start = 0
    for kind, shape in named:
        if kind != BYTES and kind not in KINDS:
            raise PackingError(f"arrays of kind {str(kind)[:40]!r} do not travel")
        if any(type(size) is not int or size < 0 for size in shape):
            raise PackingError(f"an array cannot have the shape {str(shape)[:80]}")
        end = start + math.prod(shape) * (1 if kind == BYTES else np.dtype(kind).itemsize)
        if end > len(data):
            raise PackingError(f"{len(data)} bytes of arrays came where more than that were told of")
        own = data[start:end]
        found.append(bytes(own) if kind == BYTES else np.frombuffer(own, kind).reshape(shape).copy())
        start = end
    if start != len(data):
        raise PackingError(f"{len(data)} bytes of arrays came where {start} were told of")
    return found


class _Packer:
    """Makes the tree of one value. An array or object that the value holds at several places is sent once."""

    def __init__(self, travellers: Sequence[type]) -> None:
        self._travellers = frozenset(travellers)
        self.named: list[list[Any]] = []
        self.raw: list[Any] = []
        self._arrays: dict[int, int] = {}  # id of an array -> its number
        self._objects: dict[int, int] = {}
        self._held: list[Any] = []  # so that no id comes back

    def tree(self, value: Any) -> Any:
        """Returns the tree of a value, or of a part of it."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list or kind is tuple:
            return self._sequence("list" if kind is list else "tuple", value)
        if kind is dict:
            return ["dict", [self.tree(part) for item in value.items() for part in item]]
        if kind is np.ndarray:
            return ["array", self._array(value)]
        if kind in self._travellers:
            return self._traveller(kind, value)
        return self._rarer(kind, value)

    def _sequence(self, name: str, value: Sequence[Any]) -> list[Any]:
        if PLAIN.issuperset(map(type, value)):
            return [name, value]
        return [name, [self.tree(part) for part in value]]

    def _traveller(self, kind: type, value: Any) -> list[Any]:
        if issubclass(kind, enum.Enum):
            return ["enum", kind.__name__, value.name]
        number = self._objects.get(id(value))
        if number is not None:
            return ["again", number]
        if issubclass(kind, tuple):
            parts: Sequence[Any] = value
        else:
            parts = [getattr(value, field.name) for field in dataclasses.fields(kind)]
        found = ["object", kind.__name__, [self.tree(part) for part in parts]]
        self._objects[id(value)] = len(self._objects)  # by the order in which objects are complete
        self._held.append(value)
        return found

    def _rarer(self, kind: type, value: Any) -> list[Any]:
        if isinstance(value, np.generic):
            return ["number", self._array(np.asarray(value))]
        if kind in (bytes, bytearray):
            self.named.append([BYTES, [len(value)]])
            self.raw.append(value)
            return ["array", len(self.named) - 1]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if kind in (set, frozenset):
            return [kind.__name__, [self.tree(part) for part in value]]
        if isinstance(value, torch.dtype) and value in TORCH_KINDS:
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, type) and issubclass(value, np.generic) and np.dtype(value).name in KINDS:
            return ["kind", np.dtype(value).name]
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} does not travel between ranks: send numbers, texts, lists, "
            "dicts, arrays, or a class of packing.TRAVELLERS"
        )

    def _array(self, value: np.ndarray) -> int:
        number = self._arrays.get(id(value))
        if number is None:
            if value.dtype.name not in KINDS or not value.dtype.isnative:
                raise TypeError(f"an array of {value.dtype} does not travel between ranks: send one of {KINDS}")
            number = self._arrays[id(value)] = len(self.named)
            self._held.append(value)
            self.named.append([value.dtype.name, list(value.shape)])
            self.raw.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return number


class _Unpacker:
    """Makes the value of one tree."""

    def __init__(self, arrays: Sequence[Any], travellers: Sequence[type]) -> None:
        self._arrays, self._travellers = arrays, {kind.__name__: kind for kind in travellers}
        self._objects: list[Any] = []

    def value(self, tree: Any) -> Any:
        """Returns the value of a tree, or of a part of one. Raises what hostile trees lead to; see `unpack`."""
        if type(tree) in PLAIN:
            return tree
        name, *parts = tree
        if name in ("list", "tuple", "set", "frozenset"):
            (members,) = parts
            found = members if PLAIN.issuperset(map(type, members)) else [self.value(part) for part in members]
            return found if name == "list" else {"tuple": tuple, "set": set, "frozenset": frozenset}[name](found)
        if name == "dict":
            (members,) = parts
            values = [self.value(part) for part in members]
            return dict(zip(values[::2], values[1::2], strict=True))
        if name == "array":
            return self._arrays[_place(parts[0])]
        if name == "object":
            return self._object(*parts)
        if name == "again":
            return self._objects[_place(parts[0])]
        return self._rarer(name, *parts)

    def _object(self, name: str, members: Sequence[Any]) -> Any:
        kind = self._travellers[name]
        values = [self.value(part) for part in members]
        if issubclass(kind, tuple):
            found = kind(*values)
        elif issubclass(kind, enum.Enum) or not dataclasses.is_dataclass(kind):
            raise PackingError(f"{name} is no dataclass")
        else:
            fields = [field.name for field in dataclasses.fields(kind)]
            found = kind(**dict(zip(fields, values, strict=True)))
        self._objects.append(found)
        return found

    def _rarer(self, name: str, *parts: Any) -> Any:
        if name == "enum":
            kind = self._travellers[parts[0]]
            if not issubclass(kind, enum.Enum):
                raise PackingError(f"{parts[0]} is no enum")
            return kind[parts[1]]
        if name == "number":
            return self._arrays[_place(parts[0])][()]
        if name == "path":
            return Path(parts[0])
        if name == "torch":
            known: Mapping[str, torch.dtype] = {str(kind).removeprefix("torch."): kind for kind in TORCH_KINDS}
            return known[parts[0]]
        if name == "kind" and parts[0] in KINDS:
            return np.dtype(parts[0]).type
        raise PackingError(f"a tree has no {str(name)[:40]!r}")


def _place(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise PackingError(f"{str(number)[:40]!r} is no place in a list")
    return number
