"""Turns prompt/response texts into rollouts whose responses are trained (supervised fine-tuning)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.data.problems import DataError
from megatron_rl.training.rollouts import tokenize
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of

_log = logging.getLogger(__name__)


def sft_rollouts(
    pairs: Sequence[tuple[str, str]], tokenizer: Any, *, append_eos: bool, max_tokens: int
) -> list[Rollout]:
    """Turns (prompt, response) texts into rollouts. The loss is on the response and its EOS token.

    Prompt and response are tokenised apart, so that the border between them is the same as in generation. Pairs longer
    than `max_tokens` are dropped with a warning. Raises DataError when none is left.
    """
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(
            "data.append_eos = true, but the tokenizer has no EOS token: set it in the tokenizer, or append_eos to "
            "false"
        )
    end = [tokenizer.eos_token_id] if append_eos else []
    out: list[Rollout] = []
    for number, (prompt, response) in enumerate(pairs):
        start = tokenize(tokenizer, prompt)
        rest = tokenizer.encode(response, add_special_tokens=False) + end
        length = len(start) + len(rest)
        if length > max_tokens:
            continue
        spans = spans_of((len(start), Author.ENVIRONMENT, NO_VERSION), (len(rest), Author.POLICY, 0))
        tokens = np.concatenate([np.asarray(start, np.int32), np.asarray(rest, np.int32)])
        out.append(
            Rollout(role="model", group=str(number), tokens=tokens, logprobs=np.zeros(length, np.float32), spans=spans)
        )
    if len(out) < len(pairs):
        _log.warning(
            "%d of %d pairs are longer than data.max_tokens = %d and were dropped",
            len(pairs) - len(out),
            len(pairs),
            max_tokens,
        )
    if not out:
        raise DataError(f"no pair is left: all {len(pairs)} are longer than data.max_tokens = {max_tokens}")
    return out
