"""One engine on every rank, used as one: the driver's rows are dealt to all ranks, and each generates its share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from megatron_rl.engines.base import Completion, Row, Sampling
from megatron_rl.world import World


class RowEngine(Protocol):
    """An engine of this rank alone whose draws depend on a row's indices and the seed, not on its neighbours."""

    version: int

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None: ...

    def generate_rows(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]: ...


E = TypeVar("E", bound=RowEngine)


class SpreadEngine(Generic[E]):
    """Implements engines.base.Engine over a world. Every rank makes it, under the same `name` and over its own `engine`.

    What it generates does not depend on the number of ranks, as far as a row's log-probs do not depend on its neighbours.
    """

    def __init__(self, world: World, name: str, engine: E) -> None:
        self._world, self._engine = world, engine
        self._call = f"generate/{name}"
        world.serve(self._call, self._generate_here)

    @property
    def version(self) -> int:
        return self._engine.version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """[P] prompts -> [P][n] completions, in order. On the driver, inside `world.from_driver`.

        Raises FollowerError when a rank fails.
        """
        shares = deal(len(prompts), sampling.n, self._world.size)
        rows = [[(list(prompts[i]), i, j) for i, j in share] for share in shares]
        answers = self._world.call_all(self._call, [(mine, sampling) for mine in rows])
        found = {
            place: c
            for share, answer in zip(shares, answers, strict=True)
            for place, c in zip(share, answer, strict=True)
        }
        return [[found[i, j] for j in range(sampling.n)] for i in range(len(prompts))]

    def generate_rows(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]:
        """One completion per row, in order: for a caller that chooses the indices its draws depend on. Called and raises as `generate`."""
        ranks = self._world.size
        answers = self._world.call_all(self._call, [(list(rows[rank::ranks]), sampling) for rank in range(ranks)])
        return [answers[i % ranks][i // ranks] for i in range(len(rows))]

    @property
    def local(self) -> E:
        """This rank's own engine."""
        return self._engine

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Takes the weights on this rank. Called on every rank: the stream is collective."""
        self._engine.load(weights, version=version)

    def _generate_here(self, order: tuple[list[Row], Sampling]) -> list[Completion]:
        rows, sampling = order
        return self._engine.generate_rows(rows, sampling) if rows else []


def deal(prompts: int, n: int, ranks: int) -> list[list[tuple[int, int]]]:
    """(prompt, sample) pairs of P prompts with n samples each -> one list per rank, their lengths at most one apart.

    Whole prompts go to one rank, so that a prompt is prefilled once; only the samples of the last P mod ranks prompts are dealt apart.
    """
    whole = prompts - prompts % ranks
    shares: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for i in range(whole):
        shares[i % ranks] += [(i, j) for j in range(n)]
    rest = [(i, j) for i in range(whole, prompts) for j in range(n)]
    size, extra = divmod(len(rest), ranks)
    start = 0
    for rank in range(ranks):
        end = start + size + (rank < extra)
        shares[rank] += rest[start:end]
        start = end
    return shares
