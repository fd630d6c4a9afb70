"""The byte buffer that holds rollouts end to end. Rollouts are sent to the ranks in this form, and batches are created
from views of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import numpy as np

from megatron_rl.types import FREE, Author, Rollout


class Counts(NamedTuple):
    """The numbers of rollouts, tokens, spans and micro-batches in one buffer. The counts determine the sizes of the
    buffer's arrays.
    """

    sequences: int
    spans: int
    tokens: int
    micro_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The dtype and shape per token of an entry of Rollout.values."""

    dtype: type = np.float32  # np.float32 or np.int32
    shape: tuple[int, ...] = ()  # () means one number per token, (k,) means k numbers per token


@dataclass(frozen=True, kw_only=True)
class Form:
    """The layout of the buffers of an update: which optional arrays the buffers hold. The layout is the same for all
    replicas.
    """

    advantages: Literal["none", "rollout", "token"] = "rollout"
    # entries of Rollout.values that the buffer holds, by name
    values: Mapping[str, Value] = field(default_factory=dict)
    # (number of layers, experts per token) of the expert ids; None if the buffer has no expert ids
    experts: tuple[int, int] | None = None
    # True if the buffer has the number of tokens that each rollout shares with the previous rollout
    shared: bool = False

    def sections(self, counts: Counts) -> Iterator[tuple[str, type, tuple[int, ...]]]:
        """Yields (name, dtype, shape) of the arrays in buffer order. Wider types come first, so that all arrays are
        aligned.

        Arrays with one value per token, except `experts`, have one extra entry at the end, so that array[1:] has the
        value of the next token for each position.
        """
        sequences, spans, tokens, micro_batches = counts
        yield "tokens", np.int32, (tokens + 1,)
        yield "logprobs", np.float32, (tokens + 1,)
        if self.advantages != "none":
            yield "advantages", np.float32, (sequences if self.advantages == "rollout" else tokens + 1,)
        for name, value in self.values.items():
            yield f"values/{name}", value.dtype, (tokens + 1, *value.shape)
        for name in ("weights", "partner_weights"):
            yield name, np.float32, (sequences,)
        for name in ("lengths", "span_counts", "numbers", *(["shared"] if self.shared else [])):
            yield name, np.int32, (sequences,)
        yield "span_lengths", np.int32, (spans,)
        yield "micro_batches", np.int32, (micro_batches,)
        if self.experts is not None:
            yield "experts", np.int16, (tokens, *self.experts)
        yield "span_authors", np.int8, (spans,)
        yield "rescored", np.bool_, (sequences,)

    def size(self, counts: Counts) -> int:
        """Returns the size in bytes of a buffer with the given counts."""
        return sum(math.prod(shape) * np.dtype(kind).itemsize for _, kind, shape in self.sections(counts))


@dataclass(frozen=True, kw_only=True, eq=False)
class Flat:
    """Array views of one buffer. The values of token j are at index j, not yet shifted to the position that predicts
    the token.
    """

    form: Form
    tokens: np.ndarray  # [N + 1] int32
    logprobs: np.ndarray  # [N + 1] float32
    advantages: np.ndarray | None  # [S] or [N + 1] float32
    values: Mapping[str, np.ndarray]  # entries of Rollout.values: [N + 1] or [N + 1, k], float32 or int32
    weights: np.ndarray  # [S] float32, loss weight of each rollout's tokens
    partner_weights: np.ndarray  # [S] float32, loss weight of the tokens that a partner (another model) generated
    lengths: np.ndarray  # [S] int32, number of tokens of each rollout
    span_counts: np.ndarray  # [S] int32, number of spans of each rollout
    numbers: np.ndarray  # [S] int32, index of the rollout in the driver's list
    span_lengths: np.ndarray  # [K] int32, number of tokens of each span
    micro_batches: np.ndarray  # [M] int32, number of rollouts in each micro-batch
    experts: np.ndarray | None  # [N, L, k] int16, expert ids; FREE if unknown
    span_authors: np.ndarray  # [K] int8, author of each span
    rescored: np.ndarray  # [S] bool, True if the trainer's log-probs replace the engine's
    # [S] int32, number of leading tokens shared with the previous rollout of the micro-batch; None: no sharing
    shared: np.ndarray | None
    # [S + 1] int64, index of each rollout's first token; the last entry is the total number of tokens
    starts: np.ndarray
    # [S + 1] int64, index of each rollout's first span; the last entry is the total number of spans
    span_starts: np.ndarray
    span_trained: np.ndarray  # [K] bool, True if the role's policy generated the span
    span_weights: np.ndarray  # [K] float32, loss weight of the span's tokens

    @classmethod
    def over(cls, buffer: np.ndarray, form: Form, counts: Counts) -> Self:
        """Returns the array views of a filled buffer. `buffer` is uint8 and has form.size(counts) elements."""
        arrays = views(buffer, form, counts)
        trained = arrays["span_authors"] == Author.POLICY
        partner = np.repeat(arrays["partner_weights"], arrays["span_counts"])
        partner *= arrays["span_authors"] == Author.PARTNER
        named = {name: array for name, array in arrays.items() if "/" not in name}
        return cls(
            form=form,
            **{"advantages": None, "experts": None, "shared": None} | named,  # type: ignore[arg-type]
            values={name: arrays[f"values/{name}"] for name in form.values},
            starts=_cumulated(arrays["lengths"]),
            span_starts=_cumulated(arrays["span_counts"]),
            span_trained=trained,
            span_weights=np.where(trained, np.float32(1), partner)
            * np.repeat(arrays["weights"], arrays["span_counts"]),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])


def views(buffer: np.ndarray, form: Form, counts: Counts) -> dict[str, np.ndarray]:
    """Returns {name: array}, where the arrays are views of a buffer. `buffer` is uint8 and has form.size(counts)
    elements."""
    arrays, place = {}, 0
    for name, kind, shape in form.sections(counts):
        size = math.prod(shape) * np.dtype(kind).itemsize
        arrays[name] = buffer[place : place + size].view(kind).reshape(shape)
        place += size
    return arrays


def fill(
    buffer: np.ndarray, form: Form, counts: Counts, rollouts: Sequence[Rollout], extra: Mapping[str, np.ndarray]
) -> None:
    """Writes rollouts in order into `buffer`.

    `extra`: arrays [S] or [M] whose values are not in the rollouts, by name: weights, numbers, rescored, micro_batches,
        and also shared if the form includes this array.
    """
    arrays = views(buffer, form, counts)
    for name, values in extra.items():
        arrays[name][...] = values
    lengths = np.fromiter((len(r.tokens) for r in rollouts), np.int32, len(rollouts))
    arrays["lengths"][...] = lengths
    arrays["partner_weights"][...] = [r.partner_weight for r in rollouts]
    arrays["span_counts"][...] = [len(r.spans) for r in rollouts]
    spans = np.concatenate([r.spans for r in rollouts] or [np.empty((0, 4), np.int32)])
    arrays["span_lengths"][...], arrays["span_authors"][...] = spans[:, 1] - spans[:, 0], spans[:, 2]
    _join(arrays["tokens"], [r.tokens for r in rollouts])
    _join(arrays["logprobs"], [r.logprobs for r in rollouts])
    for name in form.values:
        _join(arrays[f"values/{name}"], [r.values[name] for r in rollouts])
    if form.advantages == "rollout":
        arrays["advantages"][...] = [r.advantages for r in rollouts]
    starts = _cumulated(lengths)
    if form.advantages == "token":
        arrays["advantages"][-1] = 0
        for r, start, end in zip(rollouts, starts[:-1], starts[1:], strict=True):
            arrays["advantages"][start:end] = r.advantages
    if form.experts is not None:
        arrays["experts"][...] = FREE
        for r, start in zip(rollouts, starts[:-1], strict=True):
            if r.experts is not None:
                arrays["experts"][start : start + len(r.experts)] = r.experts


def form_of(
    rollouts: Sequence[Rollout], *, values: tuple[str, ...] = (), advantages: bool = True, experts: bool = False
) -> Form:
    """Returns the layout of buffers for these rollouts. The layout includes the entries of Rollout.values named in
    `values`, and, if requested, advantages and the expert ids that the engine returned.

    Raises ValueError if a rollout lacks requested data, if the width of a value differs between rollouts, or if the
    expert ids come from models of different sizes.
    """
    for r in rollouts:
        if advantages and r.advantages is None:
            raise ValueError(f"group {r.group!r} has no advantages: assign them before training (assign_advantages)")
        if missing := [name for name in values if name not in r.values]:
            raise ValueError(
                f"group {r.group!r} has no values {', '.join(missing)!r}, which the loss asks for: the recipe must "
                f"give one per token (Rollout.values); it has {sorted(r.values)}"
            )
    shapes = {r.experts.shape[1:] for r in rollouts if r.experts is not None} if experts else set()
    if len(shapes) > 1:
        raise ValueError(f"experts of {sorted(shapes)} layers and choices: rollouts of one update come from one model")
    level = "token" if any(isinstance(r.advantages, np.ndarray) for r in rollouts) else "rollout"
    layers, chosen = next(iter(shapes), (0, 0))
    return Form(
        advantages=level if advantages else "none",
        values={name: _value_of(name, rollouts) for name in values},
        experts=(layers, chosen) if shapes else None,
    )


def _value_of(name: str, rollouts: Sequence[Rollout]) -> Value:
    """Returns the dtype and shape per token of the entry `name` of Rollout.values. Raises ValueError if dtype or shape
    differs between rollouts.
    """
    kinds = {(r.values[name].dtype.kind in "iu", r.values[name].shape[1:]) for r in rollouts}
    if len(kinds) > 1:
        raise ValueError(
            f"values {name!r} of {sorted(shape for _, shape in kinds)} numbers a token, whole ones or not: give all "
            "rollouts of an update values of one width and kind"
        )
    [(is_integer, shape)] = kinds
    return Value(dtype=np.int32 if is_integer else np.float32, shape=shape)


def _join(target: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Concatenates S arrays [T, ...] into `target` [N + 1, ...], and sets the last entry of `target` to 0."""
    if parts:
        np.concatenate(parts, out=target[:-1])
    target[-1] = 0


def _cumulated(counts: np.ndarray) -> np.ndarray:
    """Returns the cumulative sums of [S] counts, beginning with 0: [S + 1] int64."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
