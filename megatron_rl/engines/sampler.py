"""Drawing tokens: temperature and truncation, and a random stream per row that does not depend on batching.

B rows   V vocabulary
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.engines.base import Sampling

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def check(sampling: Sampling) -> None:
    """Raises ValueError for a value that no distribution has, with the range."""
    rules = {
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        "temperature": (sampling.temperature, 0 <= sampling.temperature < math.inf, "0 (greedy) or more"),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]; 1 is off"),
        "top_k": (sampling.top_k, sampling.top_k >= 0, "at least 1, or 0 (off)"),
        "min_p": (sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]; 0 is off"),
        "n": (sampling.n, sampling.n >= 1, "at least 1"),
    }
    for name, (value, good, allowed) in rules.items():
        if not good:
            raise ValueError(f"sampling.{name} = {value}: give a value {allowed}")
    if "" in sampling.stop_strings:
        raise ValueError("sampling.stop_strings holds an empty string, which ends every completion at once: remove it")


def stream_key(seed: int, prompt: int, sample: int) -> int:
    """The key of one row's random stream: splitmix64 over (seed, prompt index, sample index), as a signed 64-bit number."""
    key = 0
    for part in (seed, prompt, sample):
        key = _mix_int((key + _GOLDEN + part) & _WORD)
    return _signed(key)


def request_seed(seed: int, prompt: int) -> int:
    """Of a prompt's first sample, in [0, 2^62); the j-th has j more."""
    return stream_key(seed, prompt, 0) & (1 << 62) - 1


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """One uniform in [0, 1) per row, a function of its key and position alone. int64 [B] each -> float64 [B].

    The position-th output of splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) seeded with the key.
    """
    x = keys + positions * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift(x, 27)) * _signed(_MULTIPLIERS[1])
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def draw(logits: Tensor, sampling: Sampling, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] logits -> tokens [B], log-probs under the distribution drawn from [B], log-probs of the model [B] (float32).

    Greedy (temperature 0) draws from a point mass: its log-prob is 0. Otherwise the order is temperature, top-k, top-p, min-p.
    """
    model = logits.float().log_softmax(dim=-1)
    if sampling.temperature == 0:
        tokens = model.argmax(dim=-1)
        return tokens, torch.zeros(len(tokens), device=logits.device), _pick(model, tokens)
    plain = sampling.temperature == 1.0 and not _truncates(sampling)
    chosen = model if plain else processed(logits, sampling)
    cumulative = chosen.exp().cumsum(dim=-1, dtype=torch.float64)
    point = uniforms(keys, positions).to(logits.device) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    model_logprobs = _pick(model, tokens)
    return tokens, model_logprobs if plain else _pick(chosen, tokens), model_logprobs


def processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities of the distribution that is sampled from, temperature above 0. [B, V] -> [B, V], -inf where cut.

    Ties at the edge of top-k all stay; top-p keeps the fewest most likely tokens whose sum reaches it.
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


def _truncates(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0


def _pick(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(1, tokens[:, None])[:, 0]


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _WORD
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _WORD
    return x ^ (x >> 31)
