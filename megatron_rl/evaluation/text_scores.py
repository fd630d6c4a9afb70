"""Scores a model's texts by other models: legibility (the cross-entropy of a reader) and drift (per-token KL and
log-prob gaps)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron_rl.engines.protocol import Engine, Tokens
from megatron_rl.evaluation.samples import Sample

LEGIBILITY, DRIFT = "legibility", "drift"
JUNIOR, BASE = "junior", "base"  # what the writer is compared with


class NextTokenModel(Protocol):
    """A model that returns its next-token distributions."""

    def distributions(self, tokens: Tokens) -> Iterator[Tensor]:
        """Yields [T - 1, V] log-probabilities of what comes after each token but the last, in parts of some rows."""
        ...


@dataclass(frozen=True)
class Texts:
    """The texts that were written for one prompt."""

    prompt: Sequence[int]
    rows: Sequence[Sample]  # with the tokens written

    def fits(self, row: Sample, context: int) -> bool:
        """Tells whether prompt and text together are within the context, and there is a text."""
        return 0 < len(row["token_ids"]) <= context - len(self.prompt)


def legibility(reader: Engine, texts: Sequence[Texts], context: int) -> list[list[Sample]]:
    """Computes the mean cross-entropy per token (nats) of the reader over each text, given its prompt. None for a
    text that is empty or does not fit."""
    fitting = [(row, t.prompt) for t in texts for row in t.rows if t.fits(row, context)]
    scores = reader.score([[*prompt, *row["token_ids"]] for row, prompt in fitting])
    means = iter(
        [-float(s[len(prompt) :].mean(dtype=np.float64)) for s, (_, prompt) in zip(scores, fitting, strict=True)]
    )
    return [
        [
            _about(row, LEGIBILITY)
            | {"cross_entropy": next(means) if t.fits(row, context) else None, "tokens": len(row["token_ids"])}
            for row in t.rows
        ]
        for t in texts
    ]


def drift(
    writer: NextTokenModel, others: Mapping[str, NextTokenModel], texts: Sequence[Texts], context: int
) -> list[list[Sample]]:
    """Compares models on each text, per token: KL(writer || other), and the gap log p_writer - log p_other of the
    tokens written.

    `kl_NAME` and `gap_NAME` for each of the others, and for each pair of them too (`kl_A_B`); None for a text that is
    empty or too long.
    """

    def one(row: Sample, t: Texts) -> Sample:
        metrics: dict[str, float | None] = dict.fromkeys(
            f"{kind}_{name}" for name in pair_names(["", *others]) for kind in ("kl", "gap")
        )
        if t.fits(row, context):
            metrics |= _compared({"": writer, **others}, [*t.prompt, *row["token_ids"]], len(t.prompt))
        return _about(row, DRIFT) | metrics | {"tokens": len(row["token_ids"])}

    return [[one(row, t) for row in t.rows] for t in texts]


def pair_names(names: Sequence[str]) -> list[str]:
    """Names every two models, in order: the writer (named "") against each, and each against those behind it."""
    return [f"{a}_{b}".lstrip("_") for i, a in enumerate(names) for b in names[i + 1 :]]


def _compared(models: Mapping[str, NextTokenModel], sequence: Sequence[int], start: int) -> dict[str, float]:
    """Returns the means of KL and gap over the tokens from `start` on, for every pair of models."""
    names = list(models)
    sums = dict.fromkeys((f"{kind}_{pair}" for pair in pair_names(names) for kind in ("kl", "gap")), 0.0)
    place = 1  # of the token whose distribution comes next
    for parts in zip(*(models[name].distributions(sequence) for name in names), strict=True):
        rows = len(parts[0])
        first = max(0, start - place)
        if first < rows:
            labels = parts[0].new_tensor(sequence[place + first : place + rows]).long()[:, None]
            kept = [part[first:] for part in parts]
            for i, a in enumerate(kept):
                for j, b in enumerate(kept[i + 1 :], start=i + 1):
                    pair = f"{names[i]}_{names[j]}".lstrip("_")
                    sums[f"kl_{pair}"] += float((a.exp() * (a - b)).sum(dim=-1).double().sum())
                    sums[f"gap_{pair}"] += float((a - b).gather(1, labels).double().sum())
        place += rows
    return {name: value / (len(sequence) - start) for name, value in sums.items()}


def _about(row: Sample, measure: str) -> Sample:
    return {name: row[name] for name in ("set", "id", "row", "sample")} | {"measure": measure}
