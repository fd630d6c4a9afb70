"""What the loop and the recipes need from a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from megatron_rl.algorithms.authors import Rule
from megatron_rl.types import Stop

Row = tuple[Sequence[int], int, int]  # prompt tokens, prompt index, sample index


class EngineError(RuntimeError):
    """Engines cannot go on; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tandem:
    """The engine's junior writes along. Authors are drawn by a stream of each row's own, a function of (seed, i, j) too."""

    rule: Rule
    seed: int | None = None  # of the authors, for a text that is gone on with; None: the row's own
    junior_weight: float = 0.0  # of its tokens in the senior's loss: no engine's business
    written: int = 0  # tokens at the end of the prompt that the two have written already


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw completions. `temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0` are off.

    Row i, sample j of a call draws from its own random stream, a function of (seed, i, j) alone, so that a result does not
    depend on batching. `stop_tokens` and end-of-sequence tokens are kept as the last token of the completion; a completion
    that meets a stop string ends with the token that completed it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    seed: int = 0
    logprobs: bool = True  # False: nobody reads them; a server that spares itself the work leaves nan
    tandem: Tandem | None = None  # None: the model alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer; its lists have one length."""

    tokens: list[int]  # [T_completion]
    logprobs: list[float]  # [T_completion] log p under the distribution sampled from (after temperature and truncation)
    stop: Stop
    model_logprobs: list[float] | None = (
        None  # [T_completion] log p of the model at temperature 1, where the engine tells
    )
    versions: list[tuple[int, int]] = field(
        default_factory=list
    )  # (first token, weight version from there on); empty: the engine's
    experts: Tensor | None = field(
        default=None, compare=False, repr=False
    )  # [prompt + T - 1, layers, k] int16, where the engine tells
    authors: list[bool] | None = (
        None  # [T_completion] of a tandem: whether the senior wrote it; log-probs are its author's
    )


class Engine(Protocol):
    """A model that generates. `version` is that of the weights it holds, -1 before it has any."""

    @property
    def version(self) -> int: ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """[P] prompts (token ids) -> [P][n] completions, in order. Called on the driver."""
        ...


class Asked(Protocol):
    """Prompts that an engine works on. On the driver."""

    def ask(self, index: int, prompt: Sequence[int]) -> None:
        """One more. Its draws are functions of the seed and `index`, another one for every prompt."""
        ...

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """(index, its n completions) of all that was asked, each when it is done. Waits here: the engine looks after its servers
        meanwhile. What is not done when this is left early is called off."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """An engine that takes prompts one by one and answers each when it is done."""

    def begin(self, sampling: Sampling) -> Asked: ...
