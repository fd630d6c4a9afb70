"""Samples tokens with temperature and truncation. Each row has a separate random stream.

B rows   V vocabulary   k most likely tokens
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.engines.protocol import Sampling
from megatron_rl.engines.sampling_seeds import GOLDEN, MULTIPLIERS, signed


class Drawn(NamedTuple):
    """The tokens that were sampled for B rows."""

    tokens: Tensor  # [B]
    logprobs: Tensor  # [B] float32, log-probs under the sampling distribution
    model_logprobs: Tensor  # [B] float32, log-probs under the model at temperature 1
    top_ids: Tensor  # [B, k] int32, the most likely tokens under the sampling distribution
    top_logprobs: Tensor  # [B, k] float32, -inf for tokens that top_k, top_p or min_p remove


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns one uniform random number in [0, 1) per row, which depends only on the row's key and position. int64 [B]
    each -> float64 [B].

    The number is the position-th output of splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) with
    the key as seed.
    """
    x = keys + positions * signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * signed(MULTIPLIERS[0])
    x = (x ^ _shift(x, 27)) * signed(MULTIPLIERS[1])
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def draw(logits: Tensor, sampling: Sampling, keys: Tensor, positions: Tensor) -> Drawn:
    """Samples the next token of every row.

    `logits`: [B, V].
    `keys`, `positions`: int64 [B]; they select the random number of each row.

    With greedy sampling (temperature 0), the sampling distribution is a point mass, so the log-probs under it are 0;
    the most likely tokens are then those of the model.
    Otherwise the settings are applied in the order temperature, top-k, top-p, min-p.
    """
    model = logits.float().log_softmax(dim=-1)
    if sampling.temperature == 0:
        tokens = model.argmax(dim=-1)
        return Drawn(
            tokens, torch.zeros(len(tokens), device=logits.device), _pick(model, tokens), *_top(model, sampling)
        )
    chosen = model if sampling.plain else processed(logits, sampling)
    cumulative = chosen.exp().cumsum(dim=-1, dtype=torch.float64)
    point = uniforms(keys, positions).to(logits.device) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    model_logprobs = _pick(model, tokens)
    logprobs = model_logprobs if sampling.plain else _pick(chosen, tokens)
    return Drawn(tokens, logprobs, model_logprobs, *_top(chosen, sampling))


def processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the log-probs of the sampling distribution for a temperature above 0. [B, V] -> [B, V], -inf for removed
    tokens.

    Top-k keeps all tokens tied at its threshold. Top-p keeps the fewest most likely tokens whose probabilities sum to
    at least top_p.
    """
    scaled = (logits.float() / sampling.temperature).log_softmax(dim=-1)
    if sampling.top_k and sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf).log_softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, index = scaled.sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(1, index, before >= sampling.top_p)
        scaled = scaled.masked_fill(cut, -torch.inf).log_softmax(dim=-1)
    if sampling.min_p > 0:
        floor = scaled.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scaled = scaled.masked_fill(scaled < floor, -torch.inf).log_softmax(dim=-1)
    return scaled


def _top(logprobs: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns the most likely tokens of each row, [B, k] int32, and their log-probs, [B, k]. The tensors do not share
    the memory of `logprobs`, which is large."""
    if not sampling.num_top:
        none = torch.empty(len(logprobs), 0, device=logprobs.device)
        return none.int(), none
    found = logprobs.topk(sampling.num_top, dim=-1)
    return found.indices.int(), found.values


def _pick(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(1, tokens[:, None])[:, 0]


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 right, filling with zeros (a logical shift)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
