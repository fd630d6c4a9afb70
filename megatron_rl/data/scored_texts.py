"""Makes rollouts of texts that a reward model scores with its head, to train the reward model or to use its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of_tokens


def scored_rollout(
    role: str,
    group: str,
    tokens: Sequence[int] | np.ndarray,
    *,
    ends: Sequence[int] = (-1,),
    values: Mapping[str, Sequence[float]] | None = None,
) -> Rollout:
    """Returns the rollout of a text [T] whose scores are read at the tokens with the indices `ends`. By default, the
    only score is read at the last token.

    In a rollout, the value at index t + 1 is the head's output at token t. A score that is read at token t is therefore
    stored at index t + 1, and one more token with an arbitrary id is appended to the text. Only the tokens at the
    indices of scores are trained on. `values`: {name: one number for each score} for Rollout.values.
    """
    length = len(tokens) + 1
    labels = np.arange(len(tokens))[list(ends)] + 1
    authors = np.full(length, Author.ENVIRONMENT, np.int32)
    authors[labels] = Author.POLICY
    columns = {name: np.zeros(length, np.float32) for name in values or ()}
    for name, numbers in (values or {}).items():
        columns[name][labels] = numbers
    return Rollout(
        role=role,
        group=group,
        tokens=np.append(np.asarray(tokens, np.int32), tokens[-1]),
        logprobs=np.zeros(length, np.float32),
        spans=spans_of_tokens(authors, np.where(authors == Author.POLICY, 0, NO_VERSION)),
        values=columns,
    )
