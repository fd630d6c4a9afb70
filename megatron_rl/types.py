"""The data that flows through a run: prompts and rollouts. Every shape in the project is named here, once.

P prompts of an iteration   G rollouts of one prompt   S rollouts of an update   T tokens of one rollout
K spans or annotations of one rollout   N packed positions   V vocabulary   L layers
k experts or candidates of one token
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

FREE = -1  # stands in place of an expert's number where the router chooses by itself
NO_VERSION = -1  # the version of a span that no engine wrote
STEP = "step"  # the label of the annotations of reasoning steps


class Stop(enum.Enum):
    """Why a completion ended. Only `EOS` and `STOP` are finished answers."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"

    @property
    def finished(self) -> bool:
        return self in (Stop.EOS, Stop.STOP)


class Outcome(enum.Enum):
    """The way that a grading ended.

    A time-out or an error is no score: it never becomes a reward of 0.
    """

    SCORE = "score"
    TIMEOUT = "timeout"
    ERROR = "error"


class Author(enum.IntEnum):
    """The writer of the tokens of a span."""

    POLICY = 0  # the role's own policy sampled them: they are trained on
    PARTNER = 1  # another model wrote them: the junior of a tandem, or another agent
    ENVIRONMENT = 2  # nobody sampled them: a prompt, a tool's output, a user's turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem. `payload` holds what the reward and the templates need (question, answer, ...)."""

    id: str
    tokens: Sequence[int] | np.ndarray  # [T_prompt]
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Annotations:
    """Labelled ranges of tokens in one rollout, such as its reasoning steps, with a score each once they are judged."""

    ranges: np.ndarray  # [K, 2] int32, [start, end) positions in the rollout's tokens, in order
    scores: np.ndarray | None = None  # [K] float64

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", np.asarray(self.ranges, np.int32).reshape(-1, 2))
        if self.scores is not None:
            object.__setattr__(self, "scores", np.asarray(self.scores, np.float64))
            if len(self.scores) != len(self.ranges):
                raise ValueError(
                    f"{len(self.scores)} scores for {len(self.ranges)} annotations: give one per annotation"
                )

    def __len__(self) -> int:
        return len(self.ranges)


FEW_SPANS = 8  # so many and fewer are looked at one by one: numpy's price for a call is that of ten numbers
NO_ANNOTATIONS = Annotations(np.empty((0, 2), np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sequence of one role, prompt included. `spans` say who wrote which tokens under which weight version; what is
    trainable, where the response begins and how long it is are derived from them, here and nowhere else.

    The constructor turns lists into arrays. It raises ValueError for arrays of different lengths and for spans with
    gaps.
    """

    role: str
    group: str  # rollouts of one role and group are compared with each other
    tokens: np.ndarray  # [T] int32
    logprobs: (
        np.ndarray
    )  # [T] float32, log p(token) under the distribution its author sampled it from; 0 where nobody did
    spans: np.ndarray  # [K, 4] int32: start, end, author, version; they cover [0, T) without gaps
    stop: Stop = Stop.EOS
    payload: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    rewards: Mapping[str, float] = field(default_factory=dict)
    annotations: Mapping[str, Annotations] = field(default_factory=dict)  # by label
    advantages: float | np.ndarray | None = (
        None  # one number for all trained tokens, or [T] float32; None before credit is assigned
    )
    partner_weight: float = 0.0  # weight in the loss of the tokens that a partner wrote
    values: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # what else a loss asks for by name: [T] or [T, k], float32 or int32 (teacher_logprobs, candidates)
    experts: np.ndarray | None = None  # [T - 1, L, k] int16: the experts that the engine chose for each token

    def __post_init__(self) -> None:
        for name, kind in (("tokens", np.int32), ("logprobs", np.float32)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), kind))
        object.__setattr__(self, "spans", np.asarray(self.spans, np.int32).reshape(-1, 4))
        length = len(self.tokens)
        if len(self.logprobs) != length:
            raise ValueError(
                f"group {self.group!r}: {len(self.logprobs)} logprobs for {length} tokens; give one per token"
            )
        _check_spans(self.spans, length, self.group)
        if isinstance(self.advantages, (np.ndarray, Sequence)):
            object.__setattr__(self, "advantages", np.asarray(self.advantages, np.float32))
        for name, values in {"advantages": self.advantages, **self.values}.items():
            if isinstance(values, np.ndarray) and len(values) != length:
                raise ValueError(f"group {self.group!r}: {len(values)} {name} for {length} tokens; give one per token")

    @property
    def authors(self) -> np.ndarray:
        """[T] int8: the author of every token."""
        return np.repeat(self.spans[:, 2].astype(np.int8), self.spans[:, 1] - self.spans[:, 0])

    @property
    def trainable(self) -> np.ndarray:
        """[T] bool: True where the role's policy sampled the token."""
        return self.authors == Author.POLICY

    @property
    def written(self) -> np.ndarray:
        """[T] bool: True where a model wrote the token, the policy or a partner; a prompt or a tool's output is
        False.
        """
        return self.authors != Author.ENVIRONMENT

    @property
    def weights(self) -> np.ndarray:
        """[T] float32: weight of each token in the loss. 1 where trainable, `partner_weight` where a partner wrote,
        else 0.
        """
        return np.array([1.0, self.partner_weight, 0.0], np.float32)[self.authors]

    @property
    def start(self) -> int:
        """Position of the first token that a model wrote; T when there is none."""
        if len(self.spans) <= FEW_SPANS:
            written = (first for first, _, author, _ in self.spans.tolist() if author != Author.ENVIRONMENT)
            return next(written, len(self.tokens))
        spans = self._written_spans()
        return int(spans[0, 0]) if len(spans) else len(self.tokens)

    @property
    def response(self) -> np.ndarray:
        """[length] int32: the tokens that models wrote. What an environment said between them is left out."""
        return np.concatenate([self.tokens[a:b] for a, b in self._written_spans()[:, :2]] or [self.tokens[:0]])

    @property
    def length(self) -> int:
        """Number of tokens that models wrote."""
        return self._count(Author.POLICY, Author.PARTNER)

    @property
    def num_trainable(self) -> int:
        """Number of tokens that the role's policy sampled."""
        return self._count(Author.POLICY)

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of the policy that wrote this rollout, oldest first. Empty when it wrote nothing."""
        if len(self.spans) <= FEW_SPANS:
            return tuple(sorted({version for _, _, author, version in self.spans.tolist() if author == Author.POLICY}))
        return tuple(np.unique(self.spans[self.spans[:, 2] == Author.POLICY, 3]).tolist())

    @property
    def version(self) -> int:
        """The oldest weight version that wrote a token; NO_VERSION when the policy wrote nothing."""
        return min(self.versions, default=NO_VERSION)

    def annotations_of(self, label: str) -> Annotations:
        """The annotations with this label; none when nothing was annotated."""
        return self.annotations.get(label, NO_ANNOTATIONS)

    def positions(self, ranges: Sequence[tuple[int, int]] | np.ndarray) -> np.ndarray:
        """Turns [start, end) ranges over `response` into ranges over `tokens`. [K, 2] -> [K, 2] int32."""
        wanted = np.asarray(ranges, np.int32).reshape(-1, 2)
        spans = self._written_spans()
        if len(spans) == 0 or np.array_equal(spans[1:, 0], spans[:-1, 1]):  # one stretch of text
            return wanted + np.int32(self.start)
        place = np.flatnonzero(self.written)
        return np.stack([place[wanted[:, 0]], place[wanted[:, 1] - 1] + 1], axis=1).astype(np.int32)

    def with_rewards(self, **rewards: float) -> Rollout:
        return replace(self, rewards={**self.rewards, **rewards})

    def _count(self, *authors: Author) -> int:
        """Number of tokens that these wrote."""
        if len(self.spans) <= FEW_SPANS:
            return sum(end - first for first, end, author, _ in self.spans.tolist() if author in authors)
        spans = self.spans[np.isin(self.spans[:, 2], authors)]
        return int((spans[:, 1] - spans[:, 0]).sum())

    def _written_spans(self) -> np.ndarray:
        return self.spans[self.spans[:, 2] != Author.ENVIRONMENT]


def spans_of(*parts: tuple[int, int, int]) -> np.ndarray:
    """Turns (number of tokens, author, version) of one stretch after the other into spans [K, 4] int32; empty stretches
    are left out.
    """
    kept = [part for part in parts if part[0] > 0]
    ends = np.cumsum([count for count, _, _ in kept], dtype=np.int32)
    starts = np.concatenate([np.zeros(1, np.int32), ends[:-1]])[: len(kept)]
    authors, versions = (np.array([part[i] for part in kept], np.int32) for i in (1, 2))
    return np.stack([starts, ends, authors, versions], axis=1).astype(np.int32)


def _check_spans(spans: np.ndarray, length: int, group: str) -> None:
    """Raises ValueError unless spans cover [0, length) in order and each has an author."""
    if length == 0 and len(spans) == 0:
        return
    if len(spans) <= FEW_SPANS and _few_cover(spans.tolist(), length):
        return
    starts, ends, authors = spans[:, 0], spans[:, 1], spans[:, 2]
    covers = len(spans) > 0 and starts[0] == 0 and ends[-1] == length and bool((starts[1:] == ends[:-1]).all())
    if not covers or not bool((starts < ends).all()):
        raise ValueError(
            f"group {group!r}: spans {spans[:, :2].tolist()[:4]} ... do not cover the {length} tokens without gaps"
        )
    if authors.min() < 0 or authors.max() > 2:
        raise ValueError(
            f"group {group!r}: spans name the authors {np.unique(authors).tolist()}; an author is 0, 1 or 2"
        )


def _few_cover(spans: Sequence[Sequence[int]], length: int) -> bool:
    """Says whether spans are as `_check_spans` wants them, without numpy's price for a call on a few numbers."""
    place = 0
    for start, end, author, _ in spans:
        if start != place or end <= start or not 0 <= author <= 2:
            return False
        place = end
    return place == length and bool(spans)
