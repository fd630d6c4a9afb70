"""Arrays as bytes on the wire: a short JSON header, then the arrays' raw bytes. Servers import it too: it needs numpy
alone.

A frame is: the header's length (4 bytes, little-endian), the header, the arrays one after the other. The header is
{"about": any JSON, "arrays": [[name, kind, shape], ...]} with the kinds of `KINDS`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

KIND = "application/x-megatron-rl-frame"  # content type of a frame
KINDS = {"int32": "<i4", "float32": "<f4", "int16": "<i2"}
LENGTH_BYTES = 4
Arrays = dict[str, np.ndarray]  # by name


def pack(about: Any, arrays: Arrays) -> bytes:
    """Returns the frame of some JSON values and of named arrays. Raises KeyError for an array of another kind than
    those of `KINDS`.
    """
    named = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"about": about, "arrays": named}).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % LENGTH_BYTES)  # the arrays begin where memory is aligned
    parts = [np.ascontiguousarray(array, KINDS[array.dtype.name]).data for array in arrays.values()]
    return b"".join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *parts])


def unpack(frame: bytes) -> tuple[Any, Arrays]:
    """Returns (about, arrays by name) of a frame; the arrays are read-only views of it. Raises ValueError for bytes
    that are no frame.
    """
    start = LENGTH_BYTES + int.from_bytes(frame[:LENGTH_BYTES], "little")
    if not LENGTH_BYTES < start <= len(frame):
        raise ValueError(f"{len(frame)} bytes are no frame: its header would end at byte {start}")
    try:
        header = json.loads(frame[LENGTH_BYTES:start])
    except RecursionError as error:
        raise ValueError("the header of a frame has lists in lists in lists") from error
    arrays: Arrays = {}
    try:
        for name, kind, shape in header["arrays"]:
            if any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"an array of shape {str(shape)[:80]}")
            count = math.prod(shape)
            arrays[name] = np.frombuffer(frame, KINDS[kind], count, start).reshape(shape).astype(kind, copy=False)
            start += arrays[name].nbytes
        about = header["about"]
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"the header of a frame is {str(header)[:200]}: {type(error).__name__} {error}") from error
    if start != len(frame):
        raise ValueError(f"a frame has {len(frame)} bytes, its header tells of {start}")
    return about, arrays
