"""The data that flows through a run. Every shape in the project is named here, once.

P prompts per step   G rollouts per prompt   T tokens of one trajectory   N packed tokens   S packed sequences
K steps of one solution   V vocabulary
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

FREE = -1  # in place of an expert's number: whichever the router chooses


class Stop(enum.Enum):
    """Why a sequence ended. Only `EOS` and `STOP` are finished answers."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"

    @property
    def finished(self) -> bool:
        return self in (Stop.EOS, Stop.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem. `payload` is whatever the reward and the templates need (question, answer, ...)."""

    id: str
    tokens: list[int]  # [T_prompt]
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sequence, prompt included. The token fields (tokens, trainable, logprobs, advantages) have one length T."""

    group: str  # trajectories of one group are compared with each other
    tokens: list[int]  # [T]
    trainable: list[bool]  # [T] True where the trained policy sampled the token
    logprobs: list[float]  # [T] engine log p(token) under the sampling distribution; 0.0 where not trainable
    version: int  # weight version that sampled it; the oldest where there were several
    stop: Stop
    payload: Mapping[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)  # [K] [start, end) positions in `tokens` of each step
    step_rewards: list[float] = field(default_factory=list)  # [K], or empty when the sample gets none
    rewards: Mapping[str, float] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)  # [T], or empty before credit is assigned
    versions: list[tuple[int, int]] = field(
        default_factory=list
    )  # (position, version from there on), where there were several
    start: int | None = None  # of a text that two models wrote: its first position, whoever wrote it
    other_weight: float = 0.0  # in the loss, of the response's tokens that are not trainable: a junior's
    experts: Tensor | None = field(
        default=None, compare=False, repr=False
    )  # [T - 1, layers, k] int16: the engine's for each token

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name, values in (("trainable", self.trainable), ("logprobs", self.logprobs)):
            if len(values) != length:
                raise ValueError(f"group {self.group!r}: {len(values)} {name} for {length} tokens; give one per token")
        if self.advantages and len(self.advantages) != length:
            raise ValueError(
                f"group {self.group!r}: {len(self.advantages)} advantages for {length} tokens; give one per token"
            )
        if self.step_rewards and len(self.step_rewards) != len(self.steps):
            raise ValueError(f"group {self.group!r}: {len(self.step_rewards)} step rewards for {len(self.steps)} steps")

    def with_rewards(self, **rewards: float) -> Trajectory:
        return replace(self, rewards={**self.rewards, **rewards})

    @property
    def weights(self) -> list[float]:
        """[T] of each token in the loss: 1 where trainable."""
        if not self.other_weight:
            return [float(on) for on in self.trainable]
        first = self.prompt_length
        return [1.0 if on else self.other_weight * (i >= first) for i, on in enumerate(self.trainable)]

    @property
    def prompt_length(self) -> int:
        """Position of the first sampled token: `start`, else the first trainable one (T when there is none)."""
        if self.start is not None:
            return self.start
        return self.trainable.index(True) if True in self.trainable else len(self.tokens)

    @property
    def response(self) -> list[int]:
        """Everything from the first sampled token on."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Trajectories packed end to end. Position i predicts token i + 1 of the same sequence.

    `old_logprobs` are the trainer's own at the start of the update (None: take the live ones, ratio 1);
    `engine_logprobs` those of the engine that sampled; `reference_logprobs` the frozen reference's (None: no KL).
    """

    tokens: Tensor  # [N] int64
    labels: Tensor  # [N] int64, the next token; meaningless where `mask` is False
    mask: Tensor  # [N] bool, True where the label is trained
    engine_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    cu_seqlens: Tensor  # [S + 1] int64
    old_logprobs: Tensor | None = None  # [N] float32
    reference_logprobs: Tensor | None = None  # [N] float32
    weights: Tensor | None = None  # [N] float32, of each label in the loss; None: 1 where `mask` is True, 0 elsewhere
    experts: Tensor | None = (
        None  # [N, layers, k] int16: the experts that the engine chose, FREE where that is not known
    )

    @property
    def counted(self) -> Tensor:
        """[N] bool, True where the label is in the loss: what is trained, and what else has a weight."""
        return self.mask if self.weights is None else self.weights > 0

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]  # [S]

    def select(self, sequences: Sequence[int]) -> Batch:
        """The batch of the named sequences, in the order given. [S] -> [len(sequences)]."""
        cu = self.cu_seqlens.tolist()
        index = torch.cat([torch.arange(cu[s], cu[s + 1]) for s in sequences])
        lengths = torch.tensor([0] + [cu[s + 1] - cu[s] for s in sequences])

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index]

        return Batch(
            tokens=self.tokens[index],
            labels=self.labels[index],
            mask=self.mask[index],
            engine_logprobs=self.engine_logprobs[index],
            advantages=self.advantages[index],
            cu_seqlens=lengths.cumsum(0),
            old_logprobs=pick(self.old_logprobs),
            reference_logprobs=pick(self.reference_logprobs),
            weights=pick(self.weights),
            experts=pick(self.experts),
        )


def pack(trajectories: Iterable[Trajectory]) -> Batch:
    """Shift by one, mask and concatenate: the only place where a token becomes the label of the one before it.

    Raises ValueError for no trajectories and for a trajectory without advantages.
    """
    trajectories = list(trajectories)
    weighted = any(t.other_weight for t in trajectories)
    tokens, labels, mask, logprobs, advantages, lengths, experts, weights = [], [], [], [], [], [0], [], []
    for t in trajectories:
        if len(t.advantages) != len(t.tokens):
            raise ValueError(
                f"group {t.group!r}: {len(t.advantages)} advantages for {len(t.tokens)} tokens; return one per token"
            )
        tokens += t.tokens
        labels += [*t.tokens[1:], 0]
        mask += [*t.trainable[1:], False]
        logprobs += [*t.logprobs[1:], 0.0]
        advantages += [*t.advantages[1:], 0.0]
        lengths.append(len(t.tokens))
        experts.append(t.experts)
        weights += [*t.weights[1:], 0.0] if weighted else []
    if not tokens:
        raise ValueError("cannot pack an empty list of trajectories")
    return Batch(
        tokens=torch.tensor(tokens),
        labels=torch.tensor(labels),
        mask=torch.tensor(mask),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        cu_seqlens=torch.tensor(lengths).cumsum(0),
        weights=torch.tensor(weights) if weighted else None,
        experts=_joined(experts, lengths[1:]),
    )


def _joined(experts: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """Choices of sequences [T - 1, layers, k] -> [sum of T, layers, k]; None where nothing is known of any."""
    known = next((one for one in experts if one is not None), None)
    if known is None:
        return None
    out = torch.full((sum(lengths), *known.shape[1:]), FREE, dtype=torch.int16)
    for one, part in zip(experts, out.split(list(lengths)), strict=True):
        if one is not None:
            part[: len(one)] = one
    return out


class BatchLoss(Protocol):
    """A loss over packed positions: sums, never means."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] log-probs and entropies of the labels -> (the sum to differentiate, other sums by name)."""
        ...

    def denominator(self, batch: Batch) -> float:
        """What the summed loss of the whole batch is divided by."""
        ...
