"""Makes rollouts of texts that a model with a head scores, for training reward models and for their use as rewards."""

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
    """Returns the rollout of a text [T] whose scores are read at the tokens `ends` (indices). By default, the only
    score is read at the last token.

    The score at a token is the value of the next token's label, because the value of a label is the head's output
    before the label. The text is therefore followed by one more token, whose id is arbitrary. The labels of the scores
    are the only trained tokens. `values`: {name: one number for each score} for Rollout.values.
    """
    length = len(tokens) + 1
    labels = np.arange(len(tokens))[list(ends)] + 1
    authors = np.full(length, Author.ENVIRONMENT, np.int32)
    authors[labels] = Author.POLICY
    columns = {name: np.zeros(length, np.float32) for name in values or ()}
    for name, own in (values or {}).items():
        columns[name][labels] = own
    return Rollout(
        role=role,
        group=group,
        tokens=np.append(np.asarray(tokens, np.int32), tokens[-1]),
        logprobs=np.zeros(length, np.float32),
        spans=spans_of_tokens(authors, np.where(authors == Author.POLICY, 0, NO_VERSION)),
        values=columns,
    )
