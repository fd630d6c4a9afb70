"""Scores a model's texts with other models: legibility (cross-entropy of a reader model) and drift (KL and log-prob gap
per token)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron_rl.engines.protocol import Engine, Tokens
from megatron_rl.evaluation.samples import Sample

LEGIBILITY, DRIFT = "legibility", "drift"
# Names of the models that are compared with the model that generated the texts (the writer).
JUNIOR, BASE = "junior", "base"


class NextTokenModel(Protocol):
    """A model that computes next-token distributions of a sequence."""

    def distributions(self, tokens: Tokens) -> Iterator[Tensor]:
        """Yields, for a sequence of T tokens, the log-probabilities of the token that follows each of the first T - 1
        tokens.

        Each yielded tensor has some rows of the [T - 1, V] tensor, in order; V is the vocabulary size.
        """
        ...


@dataclass(frozen=True)
class Texts:
    """The texts that a model generated for one prompt."""

    prompt: Sequence[int]
    rows: Sequence[Sample]  # samples of the texts; each has the field `token_ids`

    def fits(self, row: Sample, context: int) -> bool:
        """Returns whether the text of a sample is not empty, and prompt and text together fit in `context` tokens."""
        return 0 < len(row["token_ids"]) <= context - len(self.prompt)


def legibility(reader: Engine, texts: Sequence[Texts], context: int) -> list[list[Sample]]:
    """Computes the reader's mean cross-entropy per token (nats) on each text, given its prompt. Returns one sample for
    each text, in the order of `texts`.

    The field `cross_entropy` is None for a text that is empty or does not fit in `context` tokens with its prompt.
    """
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
    """Compares the model that generated the texts (the writer) with other models on each text. Computes the means per
    token of KL(writer || other) and of the gap log p_writer - log p_other on the generated tokens. Returns one sample
    for each text, in the order of `texts`.

    A sample has `kl_NAME` and `gap_NAME` for each model of `others`, and `kl_A_B` and `gap_A_B` for each pair of these
    models. The values are None for a text that is empty or does not fit in `context` tokens with its prompt.
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
    """Returns a name for each pair of models: `A_B` if A is before B in `names`, the names of the models.

    The name "" stands for the model that generated the texts. The name of its pair with B is `B`.
    """
    return [f"{a}_{b}".lstrip("_") for i, a in enumerate(names) for b in names[i + 1 :]]


def _compared(models: Mapping[str, NextTokenModel], sequence: Sequence[int], start: int) -> dict[str, float]:
    """Returns the mean KL divergence and the mean log-prob gap over the tokens from index `start` on, for every pair of
    models."""
    names = list(models)
    sums = dict.fromkeys((f"{kind}_{pair}" for pair in pair_names(names) for kind in ("kl", "gap")), 0.0)
    place = 1  # index of the token that the next row of the distributions predicts
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
