"""One engine on every rank, used as one: the driver's rows are dealt to all ranks, and each generates its share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from megatron_rl.engines.base import Completion, Sampling, Tokens
from megatron_rl.engines.rounds import RoundSession, Row
from megatron_rl.world import World


class RowEngine(Protocol):
    """An engine of this rank alone whose draws depend on a row's key, sample and seed, not on its neighbours."""

    version: int

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None: ...

    def check_ask(self, tokens: np.ndarray, sampling: Sampling, key: int) -> None: ...

    def generate_rows(self, rows: Sequence[Row]) -> list[Completion]: ...

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]: ...


E = TypeVar("E", bound=RowEngine)


@dataclass(frozen=True, slots=True)
class _Share:
    """The rows of one rank as they travel: each prompt once, and of its rows the key and the samples."""

    prompts: list[np.ndarray]
    keys: list[int]
    samplings: list[Sampling]
    rows: list[tuple[int, int]]  # (place among the prompts, sample)


class SpreadEngine(Generic[E]):
    """Implements engines.base.Engine over a world. Every rank makes it, under the same `name` and over its own `engine`.

    What it generates does not depend on the number of ranks, as far as a row's log-probs do not depend on its neighbours.
    """

    def __init__(self, world: World, name: str, engine: E) -> None:
        self._world, self._engine = world, engine
        self._generate, self._score = f"generate/{name}", f"score/{name}"
        world.serve(self._generate, self._generate_here)
        world.serve(self._score, self._score_here)

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def local(self) -> E:
        """This rank's own engine."""
        return self._engine

    def session(self) -> RoundSession:
        """Opens a session on the driver, inside `world.from_driver`. Reading its answers raises FollowerError when a rank fails."""
        return RoundSession(self._run, self._engine.check_ask)

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Scores on all ranks; see engines.base.Engine. Raises FollowerError when a rank fails."""
        arrays = [np.asarray(tokens, np.int32) for tokens in sequences]
        order = sorted(
            range(len(arrays)), key=lambda i: -len(arrays[i])
        )  # dealt longest first, so that shares are alike
        ranks = self._world.size
        answers = self._world.call_all(self._score, [[arrays[i] for i in order[rank::ranks]] for rank in range(ranks)])
        found = {i: answers[place % ranks][place // ranks] for place, i in enumerate(order)}
        return [found[i] for i in range(len(arrays))]

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Takes the weights on this rank. Called on every rank: the stream is collective."""
        self._engine.load(weights, version=version)

    def tend(self) -> None:
        """Does nothing: there are no servers."""

    def _run(self, rows: Sequence[Row]) -> list[Completion]:
        """Draws a round's completions on all ranks. [R] rows -> [R] completions, in order."""
        groups: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(row.key, []).append(place)
        shares = deal([len(places) for places in groups.values()], self._world.size)
        lists = list(groups.values())
        chosen = [[lists[i][j] for i, j in share] for share in shares]
        answers = self._world.call_all(self._generate, [_packed([rows[place] for place in own]) for own in chosen])
        found = dict(
            pair for own, answer in zip(chosen, answers, strict=True) for pair in zip(own, answer, strict=True)
        )
        return [found[place] for place in range(len(rows))]

    def _generate_here(self, share: _Share) -> list[Completion]:
        rows = [Row(share.prompts[i], share.keys[i], j, share.samplings[i]) for i, j in share.rows]
        return self._engine.generate_rows(rows) if rows else []

    def _score_here(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return self._engine.score(sequences) if sequences else []


def deal(sizes: Sequence[int], ranks: int) -> list[list[tuple[int, int]]]:
    """Deals the samples of P prompts with sizes[i] samples each -> one list of (prompt, sample) per rank.

    Whole prompts go to one rank, so that a prompt is prefilled once; only the samples of the last P mod ranks prompts are dealt apart.
    With equal sizes the lists' lengths are at most one apart.
    """
    whole = len(sizes) - len(sizes) % ranks
    shares: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for i in range(whole):
        shares[i % ranks] += [(i, j) for j in range(sizes[i])]
    rest = [(i, j) for i in range(whole, len(sizes)) for j in range(sizes[i])]
    size, extra = divmod(len(rest), ranks)
    start = 0
    for rank in range(ranks):
        end = start + size + (rank < extra)
        shares[rank] += rest[start:end]
        start = end
    return shares


def _packed(rows: Sequence[Row]) -> _Share:
    """Puts every prompt in once."""
    places = {key: i for i, key in enumerate(dict.fromkeys(row.key for row in rows))}
    first = {row.key: row for row in reversed(rows)}
    asks = [first[key] for key in places]
    return _Share(
        prompts=[row.tokens for row in asks],
        keys=list(places),
        samplings=[row.sampling for row in asks],
        rows=[(places[row.key], row.sample) for row in rows],
    )
