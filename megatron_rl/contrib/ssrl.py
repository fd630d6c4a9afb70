"""SSRL (arXiv 2508.10874): GRPO on answers with self-generated search results, which are not trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.solutions import GENERATOR, sampling_for, solve
from megatron_rl.texts.tags import block_spans
from megatron_rl.texts.text import decode
from megatron_rl.training.iteration import Iteration, PromptSource, RolloutContext, RolloutsByRole
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of_tokens


@dataclass(frozen=True, kw_only=True)
class Ssrl(Grpo):
    """A recipe like Grpo that trains the role `generator` with the reward `megatron_rl.contrib.ssrl_reward:grade`.
    Tokens of <information> blocks, including the tags, are not in the loss.
    """

    template: str = "ssrl_generator"

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        sampling = sampling_for(context, iteration, GENERATOR, self.group_size)
        solved, metrics = solve(context, GENERATOR, source.take(), sampling)
        rollouts = [without_information(s.rollout, context.tokenizers[GENERATOR]) for s in solved]
        written = sum(s.rollout.num_trainable for s in solved)
        trained = sum(rollout.num_trainable for rollout in rollouts)
        context.add_metrics(GENERATOR, metrics | {"information_share": 1.0 - trained / written if written else 0.0})
        return {GENERATOR: rollouts}


def without_information(rollout: Rollout, tokenizer: Any) -> Rollout:
    """Excludes <information> blocks with a closing tag from the loss: sets the author of their tokens to ENVIRONMENT,
    and the log-probs of their tokens to 0. The tokens are located by their positions in the text, without
    re-tokenizing.

    A block may have several lines. (The released code masks only blocks on a single line, because the dot in its
    pattern does not match line breaks.)
    """
    decoded = decode(tokenizer, rollout.response)
    ranges = rollout.positions(decoded.tokens_of(block_spans(decoded.raw, "information")))
    if len(ranges) == 0:
        return rollout
    masked = np.zeros(len(rollout.tokens), bool)
    for start, end in ranges:
        masked[start:end] = True
    authors = np.where(masked, Author.ENVIRONMENT, rollout.authors)
    versions = np.repeat(rollout.spans[:, 3], rollout.spans[:, 1] - rollout.spans[:, 0])
    spans = spans_of_tokens(authors, np.where(masked, NO_VERSION, versions))
    return replace(rollout, spans=spans, logprobs=np.where(masked, 0.0, rollout.logprobs))
