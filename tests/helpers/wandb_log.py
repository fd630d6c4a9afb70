"""Reads the records that Weights & Biases keeps of an offline run, out of its file in LevelDB's log format."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD = 32768, struct.Struct("<IHB")  # checksum, length, kind of a piece
FULL, FIRST, LAST = 1, 2, 4
WRITTEN_S = 20.0


def read(run: Path) -> list[Any]:
    """Returns the records (wandb_internal_pb2.Record) of the one .wandb file in the directory of a run that has ended.
    On a busy machine wandb's own process writes the last of them a moment later."""
    end = time.monotonic() + WRITTEN_S
    while True:
        records = list(_read(run))
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > end:
            return records
        time.sleep(0.1)


def _read(run: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    (file,) = run.glob("*.wandb")
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def _records(data: bytes) -> Iterator[bytes]:
    place, joined = 7, b""  # behind the file's own header
    while place + HEAD.size <= len(data):
        if BLOCK - place % BLOCK < HEAD.size:  # a block's end that no piece fits in
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEAD.unpack_from(data, place)
        piece = data[place + HEAD.size : place + HEAD.size + length]
        place += HEAD.size + length
        joined = piece if kind in (FULL, FIRST) else joined + piece
        if kind in (FULL, LAST):
            yield joined
