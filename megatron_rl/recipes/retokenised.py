"""Gives the text of one model to a model with another tokenizer: to train the other model on the text, or to let the
other model score the text as a teacher.

The two tokenizations of a text are aligned at the byte positions where both tokenizers end a token, as in TRL's GOLD
trainer. The text between two such positions is a chunk, and the log-prob of a chunk is the sum over its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.texts.chat_template import tokenize
from megatron_rl.texts.text import decode
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import NO_VERSION, WRITTEN_BY, Author, Rollout, Stop, spans_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Retokenised:
    """The prompt and the response of a rollout in the tokens of another role, and the alignment of both responses."""

    tokens: np.ndarray  # [T2] int32, prompt and response in the tokens of the other role
    start: int  # number of tokens of the prompt
    chunks: np.ndarray  # [T2 - start] int64, chunk of each token of the response, see `align`
    source_chunks: np.ndarray  # [length] int64, chunk of each response token of the original rollout

    def sums(self, chunks: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Sums the values [T] of tokens over each chunk. Returns [number of chunks] float64. `chunks`: [T]."""
        size = 1 + self.chunks.max(initial=0)  # the largest index is the same for both, see `align`
        return np.bincount(chunks[chunks >= 0], values[chunks >= 0].astype(np.float64), minlength=size)


def align(first: np.ndarray, second: np.ndarray, *, equal: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Aligns two tokenizations of a text. `first` [T1] and `second` [T2]: the byte position at which each token ends.
    Returns the index of each token's chunk, [T1] and [T2] int64, or -1 for a token without a counterpart.

    A token without bytes, such as EOS, belongs to the chunk after it. `equal`: number of leading bytes in which the two
    texts are equal, if they are not equal as a whole.
    """
    common = np.intersect1d(first, second)
    common = common if equal is None else common[common <= equal]
    first_ids, second_ids = (np.searchsorted(common, np.append(0, ends)[:-1], side="right") for ends in (first, second))
    last = common.max(initial=-1)
    first_ids, second_ids = np.where(first <= last, first_ids, -1), np.where(second <= last, second_ids, -1)
    shared = np.intersect1d(first_ids, second_ids)
    return np.where(np.isin(first_ids, shared), first_ids, -1), np.where(np.isin(second_ids, shared), second_ids, -1)


def retokenise(context: RolloutContext, rollout: Rollout, role: str, prompt: str) -> Retokenised | None:
    """Returns a rollout in the tokens of another role. `prompt`: the text with which the other role is prompted.

    The response ends with the EOS token of the role if the original response ended with EOS. If the bytes of the
    response are not valid UTF-8, the response is cut at the first invalid byte. Returns None if prompt and response
    have more tokens than max_prompt_tokens + sampling.max_tokens of the role. Raises ValueError for a rollout of
    several turns.
    """
    response = rollout.tokens[rollout.start :]
    if len(response) != rollout.length:
        raise ValueError(f"group {rollout.group!r} has several turns: only single responses can be retokenised")
    tokenizer, ended = context.tokenizers[role], rollout.stop is Stop.EOS
    source = decode(context.tokenizers[rollout.role], response[: len(response) - ended])
    text = _valid(source.raw)
    prompt_tokens, written = tokenize(tokenizer, prompt), list(tokenizer(text, add_special_tokens=False)["input_ids"])
    decoded = decode(tokenizer, written)
    ends = [np.append(part.ends, len(part.raw)) if ended else part.ends for part in (source, decoded)]
    if ended and tokenizer.eos_token_id is not None and len(text.encode()) == len(source.raw):
        written.append(tokenizer.eos_token_id)
    if len(prompt_tokens) + len(written) > context.max_prompt_tokens[role] + context.samplings[role].max_tokens:
        return None
    source_chunks, chunks = align(ends[0], ends[1][: len(written)], equal=_equal_bytes(source.raw, decoded.raw))
    tokens = np.array([*prompt_tokens, *written], np.int32)
    return Retokenised(tokens=tokens, start=len(prompt_tokens), chunks=chunks, source_chunks=source_chunks)


def rewritten(context: RolloutContext, rollout: Rollout, role: str, prompt: str) -> Rollout | None:
    """Returns a rollout on which `role` can be trained, with the text that another role generated. Returns None if the
    text is empty or too long, or if the tokenizer of `role` cannot represent the text.

    `logprobs` holds the log-probs of the model that generated the text: the sum over each chunk, divided equally among
    the tokens of the chunk. So the ratio of the trainer's probabilities to `logprobs` is the importance weight between
    the two models. The ratio is exact for a chunk and for the whole rollout, and loss.correction can apply it. The
    rollout keeps the group and the rewards. `prompt`: the text with which `role` is prompted.
    """
    retokenised = retokenise(context, rollout, role, prompt)
    if retokenised is None or not len(retokenised.chunks) or retokenised.chunks.min() < 0:
        return None
    sums = retokenised.sums(retokenised.source_chunks, rollout.logprobs[rollout.start :])
    counts = retokenised.sums(retokenised.chunks, np.ones(len(retokenised.chunks)))
    return Rollout(
        role=role,
        group=rollout.group,
        tokens=retokenised.tokens,
        logprobs=np.append(np.zeros(retokenised.start), sums[retokenised.chunks] / counts[retokenised.chunks]),
        spans=spans_of(
            (retokenised.start, Author.ENVIRONMENT, NO_VERSION),
            (len(retokenised.chunks), Author.POLICY, context.engines[role].version),
        ),
        stop=rollout.stop,
        payload={**rollout.payload, WRITTEN_BY: rollout.role},
        rewards=rollout.rewards,
    )


def score_texts(
    context: RolloutContext, rollouts: Sequence[Rollout], teacher: str, prompt: Callable[[Mapping[str, Any]], str]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Lets the role `teacher`, whose tokenizer differs, score a student's responses. Returns two lists with an array
    per rollout: the teacher's log-probs, float32 [T], and the log-ratio of student to teacher of each trained token.

    A chunk is a part of the text that ends where both tokenizers end a token. The teacher's log-prob of a token is
    defined as the student's log-prob of the token, plus the difference between the teacher's and the student's log-prob
    of the token's chunk. So the difference between teacher and student, from which the objective `distilled` learns, is
    the difference for the chunk. Tokens outside of chunks get the student's log-prob, so that nothing is learned from
    them; the metric `unaligned` is their share. The log-ratio of a chunk is divided equally among its tokens.

    `prompt`: function that returns the text of a problem's prompt.
    """
    retokenised = [retokenise(context, rollout, teacher, prompt(rollout.payload)) for rollout in rollouts]
    scores = iter(context.engines[teacher].score([response.tokens for response in retokenised if response is not None]))
    scores_of_rollout, gaps, unaligned = [], [], 0
    for rollout, teacher_response in zip(rollouts, retokenised, strict=True):
        difference, gap = np.zeros(len(rollout.tokens)), np.zeros(len(rollout.tokens))
        if teacher_response is not None:
            chunks, response = teacher_response.source_chunks, slice(rollout.start, None)
            theirs = teacher_response.sums(teacher_response.chunks, next(scores)[teacher_response.start :])
            by_chunk = theirs - teacher_response.sums(chunks, rollout.logprobs[response])
            counts = np.maximum(teacher_response.sums(chunks, np.ones(len(chunks))), 1)
            difference[response] = np.where(chunks >= 0, by_chunk[chunks], 0)
            gap[response] = np.where(chunks >= 0, -(by_chunk / counts)[chunks], 0)
        unaligned += rollout.length if teacher_response is None else int((teacher_response.source_chunks < 0).sum())
        scores_of_rollout.append((rollout.logprobs + difference).astype(np.float32))
        gaps.append(gap[rollout.trainable])
    total = sum(rollout.length for rollout in rollouts)
    context.add_metrics(rollouts[0].role, {"unaligned": unaligned / max(1, total)})
    return scores_of_rollout, gaps


def _valid(raw: bytes) -> str:
    """Decodes the longest prefix of `raw` that is valid UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()


def _equal_bytes(first: bytes, second: bytes) -> int:
    """Returns the number of leading bytes in which two byte strings are equal."""
    size = min(len(first), len(second))
    differing = np.flatnonzero(np.frombuffer(first[:size], np.uint8) != np.frombuffer(second[:size], np.uint8))
    return int(differing[0]) if len(differing) else size
