"""Other models on a model's own texts: legibility (their cross-entropy) and drift (per-token KL and log-prob gaps)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron_rl.evaluation.samples import Sample

LEGIBILITY, DRIFT = "legibility", "drift"
JUNIOR, BASE = "junior", "base"  # what the writer is compared with


class Scorer(Protocol):
    """A model that tells its distributions."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """[S] arrays [T] of the log-probability of every token given those before it; 0.0 for the first."""
        ...

    def distributions(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        """[T - 1, V] log-probabilities of what comes after each token but the last, in parts of some rows."""
        ...


def legibility(reader: Scorer, rows: Iterable[Sample], prompt: Sequence[int], context: int) -> list[Sample]:
    """Mean cross-entropy per token (nats) of the reader over each text, given the prompt; None for one that is empty or does not fit."""
    out = []
    for row in rows:
        tokens = row["token_ids"]
        fits = 0 < len(tokens) <= context - len(prompt)
        found = -float(reader.score([[*prompt, *tokens]])[0][len(prompt) :].mean(dtype=np.float64)) if fits else None
        out.append(_about(row, LEGIBILITY) | {"cross_entropy": found, "tokens": len(tokens)})
    return out


def drift(
    writer: Scorer, others: Mapping[str, Scorer], rows: Iterable[Sample], prompt: Sequence[int], context: int
) -> list[Sample]:
    """Of each text, per token: KL(writer || other), and the gap log p_writer - log p_other of the tokens written.

    `kl_NAME` and `gap_NAME` for each of the others, and for each pair of them too (`kl_A_B`); None for a text that is empty or too long.
    """
    out = []
    for row in rows:
        tokens = row["token_ids"]
        fits = 0 < len(tokens) <= context - len(prompt)
        figures = (
            _compared({"": writer, **others}, [*prompt, *tokens], len(prompt))
            if fits
            else dict.fromkeys(_names(others))
        )
        out.append(_about(row, DRIFT) | figures | {"tokens": len(tokens)})
    return out


def _names(others: Mapping[str, Scorer]) -> list[str]:
    return [f"{kind}_{name}" for name in pair_names(["", *others]) for kind in ("kl", "gap")]


def pair_names(names: Sequence[str]) -> list[str]:
    """Every two, in order: the writer (named "") against each, and each against those behind it."""
    return [f"{a}_{b}".lstrip("_") for i, a in enumerate(names) for b in names[i + 1 :]]


def _compared(models: Mapping[str, Scorer], sequence: Sequence[int], start: int) -> dict[str, float | None]:
    """Means over the tokens from `start` on, for every two models."""
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
