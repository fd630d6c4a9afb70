"""Combines the engines of all ranks into one engine: the rows of a round are divided among the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np

from megatron_rl.engines.batched_session import BatchedSession, Row
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import Completion, SampleLog, Tokens, TopScores
from megatron_rl.messages.commands import Commands


class DataParallelEngine:
    """A set of engines, one on each of a role's ranks, that works as one engine. Every rank constructs this object with
    the same `name`.

    Implements engines.protocol.Engine for the driver, which calls the methods. The samples do not depend on the number
    of ranks, provided that a row's log-probs do not depend on the other rows of the batch. Raises FollowerError when
    another rank than rank 0 fails.
    """

    def __init__(
        self, commands: Commands, name: str, engine: EmbeddedEngine, ranks: Sequence[int] | None = None
    ) -> None:
        """`engine`: the engine of this rank. On rank 0 it checks the requests, and has no weights if rank 0 is not one
        of the role's `ranks`, the numbers of the ranks that generate; None: all ranks.
        """
        self.local, self.version = engine, engine.version
        self._commands, self._full = commands, FullPrompts(name)
        self._ranks = range(commands.size) if ranks is None else ranks
        self._generate, self._score_top = f"generate/{name}", f"score_top/{name}"
        commands.serve(self._generate, lambda rows: engine.generate_rows([Row(*row) for row in rows]) if rows else [])
        commands.serve(self._score_top, lambda asked: engine.score_top(*asked) if asked[0] else [])

    def session(self, priority: int = 0, log: SampleLog | None = None) -> BatchedSession:
        """Returns a new session, whose requests are divided among the ranks. `priority`: the index of an iteration + 1,
        or 0 for the iteration that began last."""
        iteration = priority - 1 if priority else None
        run = functools.partial(self.generate_rows, iteration=iteration)
        return BatchedSession(run, self.local.check_ask, self._full, log)

    def generate_rows(self, rows: Sequence[Row], iteration: int | None = None) -> list[Completion]:
        """Samples one completion per row. The rows are divided among the ranks. Returns [R] completions in the order of
        the [R] rows. The rows of one request must be adjacent in `rows`. `iteration`: see Commands.each.
        """
        samples = [len(list(group)) for _, group in groupby(rows, key=lambda row: row.key)]
        shares = split_over_replicas(samples, len(self._ranks))
        told = [(row.tokens, row.key, row.sample, row.sampling) for row in rows]
        orders = [[told[i] for i in share] for share in shares]
        answers = self._commands.each(self._generate, orders, self._ranks, iteration=iteration)
        return _in_order(shares, answers)

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Implements `engines.protocol.Engine.score`. The sequences are divided among the ranks."""
        return [scores.logprobs for scores in self.score_top(sequences, 0)]

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """Implements `engines.protocol.Engine.score_top`. The sequences are divided among the ranks by length."""
        arrays = [np.asarray(sequence, np.int32) for sequence in sequences]
        by_length = sorted(range(len(arrays)), key=lambda i: -len(arrays[i]))
        count = len(self._ranks)
        shares = [by_length[place::count] for place in range(count)]
        asked = [([arrays[i] for i in share], k) for share in shares]
        return _in_order(shares, self._commands.each(self._score_top, asked, self._ranks))

    def tend(self) -> None:
        """No-op: there are no servers."""


T = TypeVar("T")


def _in_order(shares: Sequence[Sequence[int]], answers: Sequence[Sequence[T]]) -> list[T]:
    """Returns the results of all ranks in the order of the requests. `shares`: for each rank, the indices of the
    requests that the rank has processed.
    """
    found: dict[int, T] = {}
    for share, answer in zip(shares, answers, strict=True):
        found |= zip(share, answer, strict=True)
    return [found[i] for i in range(len(found))]


def split_over_replicas(samples: Sequence[int], ranks: int) -> list[list[int]]:
    """Divides rows (completions to sample) among ranks. Request i has samples[i] adjacent rows. Returns one list of row
    indices per rank; the lengths differ by at most one.

    The rows of a request go to one rank, so that the prompt of the request is prefilled once. At most ranks - 1
    requests are divided between two ranks. Adjacent requests go to different ranks, because neighbours in a data set
    are often of similar difficulty.
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(samples, np.int64))])
    asks = [i for rank in range(ranks) for i in range(rank, len(samples), ranks)]
    rows = [row for i in asks for row in range(starts[i], starts[i + 1])]
    cuts = [rank * len(rows) // ranks for rank in range(ranks + 1)]
    return [[int(row) for row in rows[a:b]] for a, b in zip(cuts, cuts[1:], strict=False)]
