"""Converts rollouts to an Arrow table, stored as Parquet, and back without any loss of precision. The table also has
human-readable columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_rl.types import STEP, Annotations, Author, Rollout, Stop

# maximum number of text pieces per rollout; a text with more pieces is split only where the author changes
MAX_PIECES = 1000


def _values_of(kind: pa.DataType) -> pa.DataType:
    """Returns the Arrow type of a list of `kind` values that cannot be null. If values could be null, Arrow would store
    a validity bit for each token.
    """
    return pa.list_(pa.field("element", kind, nullable=False))


_PIECE = pa.struct(
    [
        pa.field("author", pa.int8(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),  # number of tokens in the piece
        # advantage of each token; null if the tokens are not trained on or have no advantage
        pa.field("advantage", pa.float64()),
        pa.field("text", pa.string(), nullable=False),
    ]
)
READABLE = pa.schema(
    [
        ("iteration", pa.int64()),
        ("role", pa.string()),
        ("group", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("prompt", pa.string()),
        ("text", pa.string()),  # text of all tokens after the prompt
        ("stop", pa.string()),
        ("version", pa.int64()),  # oldest weight version that generated a token
        ("num_tokens", pa.int64()),  # number of tokens of the rollout that models generated
        ("correct", pa.bool_()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("steps", pa.list_(pa.string())),
        ("verdicts", pa.list_(pa.int8())),
        ("step_rewards", _values_of(pa.float64())),
        ("step_advantages", pa.list_(pa.float64())),
        ("advantage", pa.float64()),
        ("review", pa.string()),
        ("agent", pa.string()),  # name of the agent in an episode
        ("episode", pa.string()),
        # the text split by author and advantage, see `pieces_of`
        ("pieces", pa.list_(pa.field("element", _PIECE, nullable=False))),
    ]
)
EXACT = pa.schema(
    [
        ("tokens", _values_of(pa.int32())),
        ("logprobs", _values_of(pa.float32())),
        ("payload", pa.string()),  # the fields of the problem as JSON
        # the fields of Rollout that _OTHERS names, serialised by message_codec
        ("others", pa.large_binary()),
    ]
)
SCHEMA = pa.schema([*READABLE, *EXACT])
_OTHERS = ("spans", "rewards", "annotations", "advantages", "partner_weight", "values", "experts")  # fields of Rollout
# columns with many repeated values, stored with dictionary encoding
REPEATED = ["role", "group", "question", "answer", "prompt", "stop", "payload", "agent", "episode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """A run of response tokens that have the same author and the same advantage."""

    first: int  # index of the first token of the run; `end` is the index after the last token
    end: int
    author: int
    advantage: float | None  # advantage of each token; None if the tokens are not trained on or have no advantage


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutText:
    """The decoded texts of one rollout, for the human-readable columns."""

    prompt: str
    text: str  # text of all tokens after the prompt
    steps: Sequence[str] = ()  # text of each reasoning step
    pieces: Sequence[tuple[TextPiece, str]] = ()  # (piece, text of the piece) for each piece that `pieces_of` returns


def pieces_of(rollout: Rollout) -> list[TextPiece]:
    """Splits the tokens after a rollout's prompt into pieces, at every position where the author or the advantage
    changes.

    Returns an empty list if the whole text and the reasoning steps already show everything. This is the case for a
    rollout that has no agent and no environment tokens after the prompt, and whose trained tokens all have the same
    advantage or whose reasoning steps are annotated.
    """
    start, behind = rollout.start, rollout.spans[rollout.spans[:, 0] >= rollout.start]
    talks = "agent" in rollout.payload or bool((behind[:, 2] == Author.ENVIRONMENT).any())
    if not talks and (not isinstance(rollout.advantages, np.ndarray) or len(rollout.annotations_of(STEP))):
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


def to_table(
    iteration: int, rollouts: Sequence[Rollout], shown: Sequence[Rollout], texts: Sequence[RolloutText] | None
) -> pa.Table:
    """Returns a table with one row per rollout. `shown`: the same rollouts for the human-readable columns, for example
    with advantages. `texts`: decoded texts of each rollout; None leaves the text columns empty.

    Raises TypeError if a payload is not JSON.
    """
    from megatron_rl.messages.message_codec import pack  # slow to import, and not needed to read the text columns

    rows = [_readable(iteration, r, None if texts is None else texts[i]) for i, r in enumerate(shown)]
    fields = [{name: getattr(r, name) for name in _OTHERS} for r in rollouts]
    columns = {
        **dict(zip(READABLE.names, pa.Table.from_pylist(rows, READABLE).columns, strict=True)),
        "tokens": [r.tokens for r in rollouts],
        "logprobs": [r.logprobs for r in rollouts],
        "payload": [_payload(r) for r in rollouts],
        "others": [bytes(pack(each, [Annotations])) for each in fields],
    }
    return pa.table(columns, schema=SCHEMA)


def from_table(table: pa.Table) -> list[Rollout]:
    """Returns the rollouts of a table that `to_table` created. Raises ValueError, KeyError or TypeError if a row is
    damaged.
    """
    from megatron_rl.messages.message_codec import unpack  # slow to import, and not needed to read the text columns

    names = ["role", "group", "stop", "payload", "others"]
    rows = table.select(names).to_pylist()
    payloads = {text: json.loads(text) for text in {row["payload"] for row in rows}}  # a group shares one payload
    return [
        Rollout(
            role=row["role"],
            group=row["group"],
            tokens=np.array(tokens.values.to_numpy()),
            logprobs=np.array(logprobs.values.to_numpy()),
            stop=Stop(row["stop"]),
            payload=payloads[row["payload"]],
            **unpack(row["others"], [Annotations]),
        )
        for row, tokens, logprobs in zip(rows, table.column("tokens"), table.column("logprobs"), strict=True)
    ]


def num_bytes(rollout: Rollout) -> int:
    """Returns the total size of a rollout's arrays in bytes."""
    arrays = [rollout.tokens, rollout.logprobs, rollout.spans, rollout.advantages, rollout.experts]
    return sum(a.nbytes for a in (*arrays, *rollout.values.values()) if isinstance(a, np.ndarray))


def _payload(rollout: Rollout) -> str:
    try:
        return json.dumps(dict(rollout.payload))
    except TypeError as error:
        raise TypeError(
            f"group {rollout.group!r}: its payload is not JSON ({error}); keep text, numbers, lists and mappings in it"
        ) from None


def _readable(iteration: int, rollout: Rollout, text: RolloutText | None) -> dict[str, Any]:
    """Returns the human-readable columns of a rollout."""
    payload, steps = rollout.payload, rollout.annotations_of(STEP)
    # a verdict that is positive or True means that the step is correct
    correct, verdicts = payload.get("correct"), payload.get("verdicts")
    row: dict[str, Any] = {
        "iteration": iteration,
        "role": rollout.role,
        "group": rollout.group,
        "stop": rollout.stop.value,
        "version": rollout.version,
        "num_tokens": rollout.length,
        "correct": None if correct is None else bool(correct),
        "rewards": list(rollout.rewards.items()),
        "verdicts": None if verdicts is None else [None if v is None else 1 if v > 0 else -1 for v in verdicts],
        "step_rewards": [] if steps.scores is None else steps.scores.tolist(),
        "step_advantages": _step_advantages(rollout, steps.ranges),
        "advantage": _advantage(rollout),
        "agent": _text(payload.get("agent")),
        "episode": _text(payload.get("episode")),
    }
    if text is not None:
        row |= {name: _text(payload.get(name)) for name in ("question", "answer", "review")}
        row |= {"prompt": text.prompt, "text": text.text, "steps": list(text.steps)}
        row["pieces"] = [
            {"author": own.author, "tokens": own.end - own.first, "advantage": own.advantage, "text": said}
            for own, said in text.pieces
        ] or None
    return row


def _advantage(rollout: Rollout) -> float | None:
    """Returns the advantage of a rollout: the number that all its tokens share, or otherwise the advantage of the first
    trained token. Returns None if advantages have not been assigned, or if the tokens have different advantages but no
    token is trained.
    """
    if not isinstance(rollout.advantages, np.ndarray):
        return None if rollout.advantages is None else float(rollout.advantages)
    return float(rollout.advantages[int(rollout.trainable.argmax())]) if rollout.num_trainable else None


def _step_advantages(rollout: Rollout, ranges: np.ndarray) -> list[float]:
    """Returns, for each reasoning step, the advantage of the step's last trained token, or 0 if no token of the step is
    trained. Returns an empty list if advantages have not been assigned. `ranges`: [K, 2] index of the first token of
    each of K steps, and index after its last token.
    """
    if rollout.advantages is None or not len(ranges):
        return []
    if not isinstance(rollout.advantages, np.ndarray):
        own = [(a, b) for a, b, author, _ in rollout.spans.tolist() if author == Author.POLICY]
        inside = (any(a < end and start < b for a, b in own) for start, end in ranges.tolist())
        return [float(rollout.advantages) if there else 0.0 for there in inside]
    trained = np.flatnonzero(rollout.trainable)
    # For each step: index, in the array `trained`, of the last trained token before the end of the step
    places = np.searchsorted(trained, ranges[:, 1]) - 1
    inside = (places >= 0) & (trained[np.maximum(places, 0)] >= ranges[:, 0]) if len(trained) else places >= 0
    return [float(rollout.advantages[trained[p]]) if there else 0.0 for p, there in zip(places, inside, strict=True)]


def _text(value: Any) -> str | None:
    """Returns a text unchanged, and any other value as JSON. Characters that UTF-8 cannot represent are replaced here;
    the column `payload` keeps them.
    """
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode()
