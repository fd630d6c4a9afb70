"""Serialises JSON and raw arrays to one byte string. Depends only on numpy, so that engine processes can import it.

A frame consists of the header's length (4 bytes, little-endian), the header, and the arrays one after the other. The
header is {"about": any JSON, "arrays": [[name, kind, shape], ...]}, where kind is a dtype name in `KINDS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CONTENT_TYPE = "application/x-megatron-rl-frame"
KINDS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
LENGTH_BYTES = 4
Arrays = dict[str, np.ndarray]  # arrays by name


class CodecError(ValueError):
    """Raised for bytes that are not a valid frame, and for a frame from which no valid value can be deserialised."""


def pack(about: Any, arrays: Mapping[str, np.ndarray]) -> bytearray:
    """Serialises a JSON value and named arrays as one frame. Raises TypeError for an array whose dtype is not in
    `KINDS`.
    """
    for array in arrays.values():
        if array.dtype.name not in KINDS or not array.dtype.isnative:
            raise TypeError(f"an array of {array.dtype} does not travel: send one of {KINDS}")
    named = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"about": about, "arrays": named}).encode()
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
    return bytearray().join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *parts])


def unpack(frame: bytes | bytearray | memoryview) -> tuple[Any, Arrays]:
    """Parses a frame. Returns (JSON value, arrays by name). The arrays are views of the frame's memory. Raises
    CodecError for an invalid frame.
    """
    data, arrays = memoryview(frame), Arrays()
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if not LENGTH_BYTES < start <= len(data):
        raise CodecError(f"{len(data)} bytes are no frame: its header would end at byte {start}")
    try:
        header = json.loads(bytes(data[LENGTH_BYTES:start]))
        about = header["about"]
        for name, kind, shape in header["arrays"]:
            if kind not in KINDS or any(type(size) is not int or size < 0 for size in shape):
                raise CodecError(f"an array of kind {str(kind)[:40]!r} and shape {str(shape)[:80]}")
            count = math.prod(shape)
            arrays[name] = np.frombuffer(data, kind, count, start).reshape(shape) if count else np.empty(shape, kind)
            start += arrays[name].nbytes
    except CodecError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise CodecError(f"the header of a frame is wrong: {type(error).__name__} {str(error)[:200]}") from error
    if start != len(data):
        raise CodecError(f"a frame has {len(data)} bytes, its header tells of {start}")
    return about, arrays


def pack_parts(parts: Sequence[tuple[Any, Arrays]]) -> bytearray:
    """Serialises several parts, such as the completions of a response, as one frame. Each part is a JSON value and
    named arrays.
    """
    named = {f"{number}/{name}": array for number, (_, arrays) in enumerate(parts) for name, array in arrays.items()}
    return pack([about for about, _ in parts], named)


def unpack_parts(frame: bytes) -> list[tuple[Any, Arrays]]:
    """Parses a frame of several parts. Returns (JSON value, arrays by name) of each part. The arrays are writable
    copies. Raises CodecError for bytes that are not a frame of parts.
    """
    about, arrays = unpack(frame)
    if type(about) is not list:
        raise CodecError(f"a frame of parts has {str(about)[:80]!r} where a list must be")
    parts: list[tuple[Any, Arrays]] = [(json_value, {}) for json_value in about]
    for name, array in arrays.items():
        number, _, array_name = name.partition("/")
        if not number.isdecimal() or int(number) >= len(parts):
            raise CodecError(f"a frame of {len(parts)} parts has the array {name[:40]!r}")
        parts[int(number)][1][array_name] = array.copy()
    return parts
