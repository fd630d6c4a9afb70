"""Parses and validates the responses of servers, for all engines. The process at a server's address may be broken or
may be a different program, so every field is checked before it is used. An invalid response is treated as a failure of
the server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.engines.http import ServerLost

SLACK = 1e-3  # maximum positive log-prob that is accepted as rounding error
# The maximum size of a response in bytes is this fixed allowance, plus an allowance per requested token.
FREE_BYTES = 16 << 20
# Allowance per token of a binary response: id, log-prob, and the expert choices of 128 layers with 16 experts each.
FRAME_TOKEN_BYTES = 4096
JSON_TOKEN_BYTES = 1024  # Allowance per token of a JSON response, for the token's id, log-prob and text.
ENTRY_BYTES = 128  # Allowance for each of the most likely tokens at a position.


class AnswerError(ValueError):
    """Raised when the response of a server is invalid."""


@contextlib.contextmanager
def understood(url: str, whose: str) -> Iterator[None]:
    """A context manager for code that parses a response. Errors that a malformed response causes are raised as
    ServerLost, so that the request counts as failed.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        kind = "" if isinstance(error, AnswerError) else f"{type(error).__name__} "
        raise ServerLost(f"{url} sent an answer that is not {whose}: {kind}{str(error)[:400]}") from error


def longest_answer(n: int, tokens: int, top: int) -> int:
    """Returns the maximum size in bytes of a response with n completions of a total of `tokens` tokens each, with
    prompt. `top`: number of most likely tokens at each position."""
    return FREE_BYTES + n * tokens * (FRAME_TOKEN_BYTES + 8 * top)


def require(valid: bool, problem: str) -> None:
    """Raises AnswerError with the text `problem` if `valid` is False."""
    if not valid:
        raise AnswerError(problem)


def read_tokens(told: Any, vocab: int, longest: int) -> np.ndarray:
    """Converts the token ids in a response to an array [T] int32.

    `told`: the token ids in the response. `vocab`: size of the vocabulary; 0 if unknown. `longest`: maximum number of
    tokens. Raises AnswerError if there are more tokens, if an id is outside the vocabulary, or if `told` is not a list
    of integers.
    """
    array = np.asarray(told)
    if array.shape == (0,):
        return np.empty(0, np.int32)
    require(array.ndim == 1 and array.dtype.kind in "iu", f"tokens are {array.dtype} {array.shape}")
    require(len(array) <= longest, f"{len(array)} tokens where at most {longest} were asked for")
    check_ids(array, vocab)
    return array.astype(np.int32, copy=False)


def check_ids(ids: np.ndarray, vocab: int) -> None:
    """Raises AnswerError if a token id is outside the vocabulary. `vocab`: size of the vocabulary; 0 if unknown."""
    first, last = (ids.min(), ids.max()) if ids.size else (0, 0)
    most = (vocab or 2**31) - 1
    require(first >= 0 and last <= most, f"tokens from {first} to {last}: the vocabulary has 0 to {most}")


def read_logprobs(told: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Converts the log-probs in a response to a float32 array. `told`: the log-probs. `shape`: their required shape.

    Raises AnswerError if the shape differs, if a value is not a finite number, or if a value is above 0 by more than
    rounding error.
    """
    array = np.asarray(told)
    require(array.shape == shape or array.size == 0 == np.prod(shape), f"log-probs are {array.shape} for {shape}")
    require(array.dtype.kind in "fiu" or not array.size, f"log-probs are {array.dtype}")
    numbers = array.astype(np.float32, copy=False).reshape(shape)
    require(bool(np.isfinite(numbers).all()), "log-probs that are not numbers: are the weights?")
    highest = numbers.max(initial=-np.inf)
    require(highest <= SLACK, f"a log-prob of {highest:.6g}: no probability is above 1")
    return numbers


def read_top(told: Mapping[str, Any], shape: tuple[int, int], vocab: int) -> dict[str, np.ndarray]:
    """Converts the arrays `top_ids` and `top` of a response, which are the k most likely tokens at each of T positions
    and their log-probs, to the fields of a Completion. `shape`: (T, k). A log-prob of -inf means that top_k, top_p or
    min_p removes the token.

    Raises AnswerError if a shape differs, if an id is outside the vocabulary, or for an invalid log-prob.
    """
    if not shape[0]:
        return {"top_ids": np.empty(shape, np.int32), "top_logprobs": np.empty(shape, np.float32)}
    array, numbers = np.asarray(told.get("top_ids")), np.asarray(told.get("top"))
    require(array.shape == shape and array.dtype.kind in "iu", f"likeliest tokens are {array.dtype} {array.shape}")
    check_ids(array, vocab)
    removed = np.isneginf(numbers) if numbers.dtype.kind == "f" else np.zeros(numbers.shape, np.bool_)
    known = read_logprobs(np.where(removed, 0, numbers), shape)
    return {"top_ids": array, "top_logprobs": np.where(removed, -np.inf, known)}


def read_versions(spans: Sequence[tuple[Any, Any]], length: int) -> list[tuple[int, int]]:
    """Checks the weight versions in a response: pairs of (index of the first token, weight version) for a completion of
    `length` tokens. Returns the pairs as a list. Raises AnswerError if the first pair does not start at the first
    token, or if the token indices or the versions decrease.
    """
    found = [(start, version) for start, version in spans]
    numbers = [number for span in found for number in span]
    versions = [version for _, version in found]
    whole = all(type(number) is int and number >= -1 for number in numbers)
    require(whole and versions == sorted(versions), f"weight versions {found[:4]}")
    starts = [start for start, _ in found]
    ordered = not starts or (starts[0] == 0 and starts == sorted(starts) and starts[-1] <= length)
    require(ordered, f"weight versions that begin at the tokens {starts[:8]} of {length}")
    return found


def read_whole(told: Any, lowest: int) -> int:
    """Checks and returns an integer in a response. Raises AnswerError if `told` is not an integer >= `lowest`."""
    valid = type(told) is int and told >= lowest
    require(valid, f"{str(told)[:40]!r} where a whole number of at least {lowest} stands")
    return told
