"""Turns rollouts into an Arrow table and back, exact to the last bit, beside columns that a person reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_rl.types import STEP, Author, Marks, Rollout, Stop

MAX_PIECES = 1000  # of one rollout; where its credit changes more often, its text is cut by author alone


def _values_of(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a list without nulls in it: what has a value per token needs no validity per token."""
    return pa.list_(pa.field("element", kind, nullable=False))


_MARK = pa.struct(
    [
        pa.field("label", pa.string(), nullable=False),
        pa.field("ranges", _values_of(pa.int32()), nullable=False),  # start, end, start, end, ...
        pa.field("scores", _values_of(pa.float64())),
    ]
)
_VALUE = pa.struct(
    [
        pa.field("type", pa.string(), nullable=False),  # float32 or int32
        pa.field("shape", _values_of(pa.int32()), nullable=False),
        pa.field("numbers", pa.large_binary(), nullable=False),
    ]
)
_PIECE = pa.struct(
    [
        pa.field("author", pa.int8(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),  # number of them
        pa.field("advantage", pa.float64()),  # of each token; null: it is not trained on, or has none
        pa.field("text", pa.string(), nullable=False),
    ]
)
READABLE = pa.schema(
    [
        ("turn", pa.int64()),
        ("role", pa.string()),
        ("group", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("prompt", pa.string()),
        ("text", pa.string()),  # everything behind the prompt
        ("stop", pa.string()),
        ("version", pa.int64()),  # the oldest that wrote
        ("num_tokens", pa.int64()),  # that models wrote
        ("correct", pa.bool_()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("steps", pa.list_(pa.string())),
        ("verdicts", pa.list_(pa.int8())),
        ("step_rewards", _values_of(pa.float64())),
        ("step_advantages", pa.list_(pa.float64())),
        ("advantage", pa.float64()),
        ("review", pa.string()),
        ("seat", pa.string()),  # of an episode
        ("episode", pa.string()),
        ("pieces", pa.list_(pa.field("element", _PIECE, nullable=False))),  # see pieces_of
    ]
)
EXACT = pa.schema(
    [
        ("tokens", _values_of(pa.int32())),
        ("logprobs", _values_of(pa.float32())),
        ("spans", _values_of(pa.int32())),  # start, end, author, version, start, ...
        ("payload", pa.string()),  # JSON
        ("marks", pa.list_(pa.field("element", _MARK, nullable=False))),
        ("advantages", _values_of(pa.float32())),  # null: `advantage` is the one of all tokens, or none was assigned
        ("partner_weight", pa.float64()),
        ("values", pa.map_(pa.string(), pa.field("value", _VALUE, nullable=False))),
        ("experts", pa.large_binary()),  # int16
        ("experts_shape", pa.list_(pa.int32())),
    ]
)
SCHEMA = pa.schema([*READABLE, *EXACT])
# columns whose rows are often equal
REPEATED = ["role", "group", "question", "answer", "prompt", "stop", "payload", "seat", "episode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """A stretch of what stands behind a rollout's prompt that one author wrote, trained on with one advantage."""

    first: int  # position in the rollout's tokens
    end: int
    author: int
    advantage: float | None  # of each of its tokens; None: it is not trained on, or has none


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutText:
    """The texts of one rollout that people read."""

    prompt: str
    text: str  # everything behind the prompt
    steps: Sequence[str] = ()  # of each reasoning step
    pieces: Sequence[tuple[TextPiece, str]] = ()  # those of `pieces_of`, with their texts


def pieces_of(rollout: Rollout) -> list[TextPiece]:
    """Cuts what stands behind the prompt of a rollout where the author or the advantage changes.

    Nothing is cut, and the list is empty, where the whole text and the reasoning steps say it all: in a rollout without
    a seat, and without an environment's words behind the prompt, whose trained tokens have one advantage or whose
    reasoning steps are marked.
    """
    start, behind = rollout.start, rollout.spans[rollout.spans[:, 0] >= rollout.start]
    talks = "seat" in rollout.payload or bool((behind[:, 2] == Author.ENVIRONMENT).any())
    if not talks and (not isinstance(rollout.advantages, np.ndarray) or len(rollout.marks_of(STEP))):
        return []
    authors = rollout.authors[start:]
    trained = authors == Author.POLICY
    credit = np.full(len(authors), np.nan)
    if rollout.advantages is not None:
        own = np.broadcast_to(np.asarray(rollout.advantages, np.float64), len(rollout.tokens))[start:]
        credit[trained] = own[trained]
    if not len(authors) or not (talks or len(np.unique(credit[trained])) > 1):
        return []
    turns = authors[1:] != authors[:-1]
    changes = turns | ~((credit[1:] == credit[:-1]) | (np.isnan(credit[1:]) & np.isnan(credit[:-1])))
    if changes.sum() >= MAX_PIECES:
        changes, credit = turns, np.full(len(authors), np.nan)
    places = [0, *(np.flatnonzero(changes) + 1).tolist(), len(authors)]
    return [
        TextPiece(
            first=start + a, end=start + b, author=int(authors[a]),
            advantage=None if np.isnan(credit[a]) else float(credit[a]),
        )
        for a, b in zip(places[:-1], places[1:], strict=True)
    ]  # fmt: skip


def to_table(turn: int, rollouts: Sequence[Rollout], texts: Sequence[RolloutText] | None) -> pa.Table:
    """Returns one row per rollout. `texts`: of each rollout; None leaves the readable texts out.

    Raises TypeError for a payload that is not JSON, and for values and experts of another type than their column's.
    """
    columns = {**_exact_columns(rollouts), **_readable_columns(turn, rollouts, texts)}
    return pa.Table.from_arrays([_as(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def from_table(table: pa.Table) -> list[Rollout]:
    """Returns the rollouts of rows that `to_table` made. Raises ValueError, KeyError or TypeError for damaged ones."""
    column = {name: _one_array(table.column(name)) for name in table.column_names}
    arrays = {name: _split(column[name]) for name in ("tokens", "logprobs", "spans", "advantages")}
    rewards = _split_map(column["rewards"], column["rewards"].items.to_pylist())
    values = _split_map(column["values"], _read_values(column["values"].items))
    plain = {
        name: column[name].to_pylist() for name in ("role", "group", "stop", "payload", "advantage", "partner_weight")
    }
    payloads = {text: json.loads(text) for text in set(plain["payload"])}  # the rollouts of a group share theirs
    shapes = column["experts_shape"].to_pylist()
    marks, experts = _read_marks(column["marks"]), _read_bytes(column["experts"], ["int16"] * len(shapes), shapes)
    return [
        Rollout(
            role=plain["role"][i],
            group=plain["group"][i],
            tokens=arrays["tokens"][i],
            logprobs=arrays["logprobs"][i],
            spans=arrays["spans"][i].reshape(-1, 4),
            stop=Stop(plain["stop"][i]),
            payload=payloads[plain["payload"][i]],
            rewards=dict(rewards[i]),
            marks=marks[i],
            advantages=plain["advantage"][i] if arrays["advantages"][i] is None else arrays["advantages"][i],
            partner_weight=plain["partner_weight"][i],
            values=dict(values[i]),
            experts=experts[i],
        )
        for i in range(table.num_rows)
    ]


def num_bytes(rollout: Rollout) -> int:
    """Returns the bytes of a rollout's arrays."""
    arrays = [rollout.tokens, rollout.logprobs, rollout.spans, rollout.advantages, rollout.experts]
    return sum(a.nbytes for a in (*arrays, *rollout.values.values()) if isinstance(a, np.ndarray))


def _exact_columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    per_token = [r.advantages if isinstance(r.advantages, np.ndarray) else None for r in rollouts]
    return {
        "tokens": _lists([r.tokens for r in rollouts], np.int32),
        "logprobs": _lists([r.logprobs for r in rollouts], np.float32),
        "spans": _lists([r.spans for r in rollouts], np.int32),
        "payload": _payloads(rollouts),
        "marks": _mark_column(rollouts),
        "advantages": _lists(per_token, np.float32),
        "partner_weight": [float(r.partner_weight) for r in rollouts],
        "values": _map_column([r.values for r in rollouts], _value_column),
        "experts": _bytes([r.experts for r in rollouts], "experts", (np.int16,)),
        "experts_shape": [None if r.experts is None else list(r.experts.shape) for r in rollouts],
    }


def _readable_columns(turn: int, rollouts: Sequence[Rollout], texts: Sequence[RolloutText] | None) -> dict[str, Any]:
    none = [None] * len(rollouts)
    payloads = [r.payload for r in rollouts]
    steps = [r.marks_of(STEP) for r in rollouts]
    return {
        "turn": [turn] * len(rollouts),
        "role": [r.role for r in rollouts],
        "group": [r.group for r in rollouts],
        "question": none if texts is None else [_text(p.get("question")) for p in payloads],
        "answer": none if texts is None else [_text(p.get("answer")) for p in payloads],
        "prompt": none if texts is None else [own.prompt for own in texts],
        "text": none if texts is None else [own.text for own in texts],
        "stop": [r.stop.value for r in rollouts],
        "version": [r.version for r in rollouts],
        "num_tokens": [r.length for r in rollouts],
        "correct": [None if (right := p.get("correct")) is None else bool(right) for p in payloads],
        "rewards": _map_column([r.rewards for r in rollouts], lambda found: pa.array(np.array(found, np.float64))),
        "steps": none if texts is None else [list(own.steps) for own in texts],
        "verdicts": [_verdicts(p.get("verdicts")) for p in payloads],
        "step_rewards": _lists([m.scores if m.scores is not None else np.empty(0) for m in steps], np.float64),
        "step_advantages": [_step_advantages(r, m.ranges) for r, m in zip(rollouts, steps, strict=True)],
        "advantage": [_advantage(r) for r in rollouts],
        "review": none if texts is None else [_text(p.get("review")) for p in payloads],
        "seat": [_text(p.get("seat")) for p in payloads],
        "episode": [_text(p.get("episode")) for p in payloads],
        "pieces": none if texts is None else [_pieces(own.pieces) for own in texts],
    }


def _pieces(pieces: Sequence[tuple[TextPiece, str]]) -> list[dict[str, Any]] | None:
    """Returns the pieces as rows of the table; None where the text is not cut."""
    return [
        {"author": own.author, "tokens": own.end - own.first, "advantage": own.advantage, "text": text}
        for own, text in pieces
    ] or None


def _lists(arrays: Sequence[np.ndarray | None], dtype: type[np.generic]) -> pa.ListArray:
    """Returns one list per array, null for None, over one buffer.

    Raises TypeError for an array of another type: it would lose bits.
    """
    for array in arrays:
        if array is not None and array.dtype != dtype:
            raise TypeError(f"an array of {array.dtype} where the store keeps {np.dtype(dtype)}: convert it first")
    lengths = [0 if array is None else array.size for array in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    flat = np.concatenate([np.empty(0, dtype), *(a.reshape(-1) for a in arrays if a is not None)])
    absent = np.array([array is None for array in arrays], np.bool_)
    mask = pa.array(absent) if absent.any() else None
    kind = _values_of(pa.from_numpy_dtype(np.dtype(dtype)))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=kind, mask=mask)


def _map_column(rows: Sequence[Mapping[str, Any]], values: Any) -> pa.MapArray:
    """Returns one map per row. `values` turns all rows' values, one after the other, into an Arrow array."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int32)
    names = pa.array([name for row in rows for name in row], pa.string())
    return pa.MapArray.from_arrays(pa.array(offsets), names, values([v for row in rows for v in row.values()]))


def _mark_column(rollouts: Sequence[Rollout]) -> pa.ListArray:
    named = [list(r.marks.items()) for r in rollouts]
    offsets = np.concatenate([[0], np.cumsum([len(found) for found in named], dtype=np.int64)]).astype(np.int32)
    marks = [mark for found in named for _, mark in found]
    fields = [
        pa.array([label for found in named for label, _ in found], pa.string()),
        _lists([mark.ranges for mark in marks], np.int32),
        _lists([mark.scores for mark in marks], np.float64),
    ]
    structs = pa.StructArray.from_arrays(fields, fields=list(_MARK))
    return pa.ListArray.from_arrays(pa.array(offsets), structs, type=SCHEMA.field("marks").type)


def _read_marks(column: pa.ListArray) -> list[dict[str, Marks]]:
    structs = column.values
    labels, ranges, scores = (structs.field(name) for name in ("label", "ranges", "scores"))
    marks = [Marks(a.reshape(-1, 2), b) for a, b in zip(_split(ranges), _split(scores), strict=True)]
    named = list(zip(labels.to_pylist(), marks, strict=True))
    offsets = column.offsets.to_numpy()
    return [dict(named[a:b]) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def _value_column(values: Sequence[np.ndarray]) -> pa.StructArray:
    shapes = [np.array(value.shape, np.int32) for value in values]
    fields = [
        pa.array([value.dtype.name for value in values], pa.string()),
        _lists(shapes, np.int32),
        _bytes(values, "values", (np.float32, np.int32)),
    ]
    return pa.StructArray.from_arrays(fields, fields=list(_VALUE))


def _read_values(column: pa.StructArray) -> list[Any]:
    kinds, shapes, numbers = (column.field(name) for name in ("type", "shape", "numbers"))
    return _read_bytes(numbers, kinds.to_pylist(), shapes.to_pylist())


def _bytes(arrays: Sequence[np.ndarray | None], what: str, kinds: Sequence[type]) -> pa.LargeBinaryArray:
    """Returns the arrays' bytes over one buffer, null for None. Raises TypeError for an array of another kind."""
    for array in arrays:
        if array is not None and array.dtype not in kinds:
            names = " or ".join(np.dtype(kind).name for kind in kinds)
            raise TypeError(f"{what} of type {array.dtype}: the store keeps {names}, convert them first")
    if all(array is None for array in arrays):
        return pa.nulls(len(arrays), pa.large_binary())
    offsets = np.concatenate([[0], np.cumsum([0 if a is None else a.nbytes for a in arrays], dtype=np.int64)])
    flat = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays if a is not None])
    valid = pa.array([a is not None for a in arrays]).buffers()[1]
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(flat)]
    return pa.Array.from_buffers(pa.large_binary(), len(arrays), buffers)


def _read_bytes(column: pa.LargeBinaryArray, kinds: Sequence[str], shapes: Sequence[Any]) -> list[np.ndarray | None]:
    """Returns the arrays of a column of bytes, which may be written to; None where there is no shape."""
    return [
        None if shape is None else np.frombuffer(bytearray(cell.as_buffer()), kind).reshape(shape)
        for cell, kind, shape in zip(column, kinds, shapes, strict=True)
    ]


def _split(column: pa.ListArray) -> list[Any]:
    """Returns one array per row, views of one buffer that may be written to; None for null."""
    offsets, values = column.offsets.to_numpy(), np.array(column.values.to_numpy(zero_copy_only=False))
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [values[a:b] if there else None for a, b, there in zip(offsets[:-1], offsets[1:], valid, strict=True)]


def _split_map(column: pa.MapArray, items: Sequence[Any]) -> list[list[tuple[str, Any]]]:
    """Returns one list of (name, item) per row; `items` are those of all rows, one after the other."""
    named = list(zip(column.keys.to_pylist(), items, strict=True))
    offsets = column.offsets.to_numpy()
    return [named[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def _one_array(column: pa.ChunkedArray) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _as(column: Any, kind: pa.DataType) -> pa.Array:
    return column.cast(kind) if isinstance(column, pa.Array) else pa.array(column, kind)


def _payloads(rollouts: Sequence[Rollout]) -> list[str]:
    """Returns each payload as JSON text. Rollouts of one problem share one mapping, which is written out once."""
    texts: dict[int, str] = {}
    for rollout in rollouts:
        if id(rollout.payload) not in texts:
            try:
                texts[id(rollout.payload)] = json.dumps(dict(rollout.payload))
            except TypeError as error:
                raise TypeError(
                    f"group {rollout.group!r}: its payload is not JSON ({error}); "
                    "keep text, numbers, lists and mappings in it"
                ) from None
    return [texts[id(rollout.payload)] for rollout in rollouts]


def _verdicts(found: Sequence[Any] | None) -> list[int | None] | None:
    """Returns 1 for correct (true or positive), -1 for wrong, None for unreadable."""
    return None if found is None else [None if v is None else 1 if v > 0 else -1 for v in found]


def _advantage(rollout: Rollout) -> float | None:
    """Returns the one of all tokens, or that of the first trained token; None before credit is assigned."""
    if not isinstance(rollout.advantages, np.ndarray):
        return None if rollout.advantages is None else float(rollout.advantages)
    return float(rollout.advantages[int(rollout.trainable.argmax())]) if rollout.num_trainable else None


def _step_advantages(rollout: Rollout, ranges: np.ndarray) -> list[float]:
    """Returns the advantage of each step's last trained token, 0 where none is; empty before credit is assigned."""
    if rollout.advantages is None or not len(ranges):
        return []
    if not isinstance(rollout.advantages, np.ndarray):
        own = [(a, b) for a, b, author, _ in rollout.spans.tolist() if author == Author.POLICY]
        inside = (any(a < end and start < b for a, b in own) for start, end in ranges.tolist())
        return [float(rollout.advantages) if there else 0.0 for there in inside]
    trained = np.flatnonzero(rollout.trainable)
    places = np.searchsorted(trained, ranges[:, 1]) - 1  # of the last trained token before each end
    inside = (places >= 0) & (trained[np.maximum(places, 0)] >= ranges[:, 0]) if len(trained) else places >= 0
    return [float(rollout.advantages[trained[p]]) if there else 0.0 for p, there in zip(places, inside, strict=True)]


def _text(value: Any) -> str | None:
    """Returns text as it is, another value as JSON. What cannot be UTF-8 is replaced: the payload keeps it."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode()
