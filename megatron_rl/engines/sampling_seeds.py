"""Sampling helpers that all engines share: validation of the settings, and seeds that do not depend on batching."""

from __future__ import annotations

import math

from megatron_rl.engines.protocol import Sampling

GOLDEN = 0x9E3779B97F4A7C15  # constants of splitmix64
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def check(sampling: Sampling) -> None:
    """Raises ValueError if a sampling setting is invalid. The message states the allowed range."""
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


def stream_key(seed: int, key: int, sample: int) -> int:
    """Returns the key of the random stream of one row (completion), a signed 64-bit integer: splitmix64 over (seed, key
    of the request, sample index).
    """
    mixed = 0
    for part in (seed, key, sample):
        mixed = (mixed + GOLDEN + part) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * MULTIPLIERS[0]) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * MULTIPLIERS[1]) & _WORD
        mixed ^= mixed >> 31
    return signed(mixed)


def request_seed(seed: int, key: int) -> int:
    """Returns the seed of a request's first sample, in [0, 2^62). Sample j has this seed plus j."""
    return stream_key(seed, key, 0) & (1 << 62) - 1


def signed(value: int) -> int:
    """Converts an unsigned 64-bit integer to the signed integer with the same bits."""
    return value - (1 << 64) if value >> 63 else value
