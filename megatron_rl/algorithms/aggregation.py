"""Computes, for one optimizer step, the loss weight of each rollout and the denominator of the summed loss."""

from __future__ import annotations

from typing import Literal

import numpy as np

Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "constant"]


def aggregate(
    kind: Aggregation, counts: np.ndarray, groups: np.ndarray, *, max_tokens: int | None = None
) -> tuple[np.ndarray, float]:
    """Returns the loss weights of an optimizer step's rollouts, [S] float32, and the denominator.

    The loss of the optimizer step is the sum over all tokens of (weight of the rollout x loss of the token), divided by
    the denominator.

    `counts`: [S] number of labels (predicted tokens) of each rollout that are in the loss, weighted by their loss
        weights.
    `groups`: [S] group index of each rollout.
    `kind`: how the token losses are averaged.
        token_mean     mean over all tokens: the denominator is their number (DAPO, arXiv 2503.14476)
        sequence_mean  mean over rollouts; the loss of a rollout is the mean over its tokens (GRPO, arXiv 2402.03300)
        prompt_mean    mean over prompts; the loss of a prompt is the mean over the tokens of its group (ScaleRL, arXiv
                       2510.13786)
        constant       sum over tokens / (S x max_tokens), independent of rollout lengths (Dr.GRPO, arXiv 2503.20783)
    Rollouts and groups without a label in the loss are excluded from the means. Raises ValueError for `constant`
    without `max_tokens`.
    """
    counts = np.asarray(counts, np.float64)
    match kind:
        case "token_mean":
            return np.ones(len(counts), np.float32), float(counts.sum())
        case "sequence_mean":
            return _shares(counts), float((counts > 0).sum())
        case "prompt_mean":
            _, numbers = np.unique(groups, return_inverse=True)
            totals = np.bincount(numbers, counts)
            return _shares(totals)[numbers], float((totals > 0).sum())
        case "constant":
            if max_tokens is None:
                raise ValueError("loss.aggregation = 'constant' divides by a number of tokens: set loss.max_tokens")
            return np.ones(len(counts), np.float32), float(len(counts) * max_tokens)


def _shares(counts: np.ndarray) -> np.ndarray:
    """Returns 1 / count of each count as float32; 0 for a count of 0."""
    return np.divide(1.0, counts, out=np.zeros_like(counts), where=counts > 0).astype(np.float32)
