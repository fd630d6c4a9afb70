"""Converts an agent's part of an episode to a solution whose steps are the agent's turns, so that a verifier can judge
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.batches.units import joined, members
from megatron_rl.recipes.episode_rollouts import OUTCOME, EpisodesGraded, OverEpisodes
from megatron_rl.recipes.solutions import Solution
from megatron_rl.texts.control_tokens import ControlTokens
from megatron_rl.texts.text import decode, fill
from megatron_rl.types import AGENT, EPISODE, STEP, Annotations, Author, Outcome, Rollout, is_correct


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transcript(Solution):
    """The graded conversation of one agent in an episode. Its rollout is the concatenation of all samples of the agent.
    Turn k is the reasoning step (annotation) k. Tokens of the environment between two turns belong to no turn, also if
    the transcript was truncated.
    """

    turns: list[str]  # texts that the agent generated, without the environment's messages
    samples: Sequence[Rollout] = ()  # samples to train on, in order; several if the transcript was truncated

    @property
    def steps(self) -> list[str]:
        return self.turns

    @property
    def form(self) -> float:
        """The format score. Always 1.0: turns can always be separated, so a verification must have one verdict per
        turn.
        """
        return 1.0

    def to_train(self, verified: Rollout) -> list[Rollout]:
        return parted(verified, self.samples)


@dataclass(frozen=True, kw_only=True)
class TranscriptForm:
    """The format in which a conversation is presented to the verifier."""

    turn: str  # template of a turn with {text}, and {number} counted from 1
    observation: str  # template of the environment's text before a turn, with {text}

    def write(self, question: str, observations: Sequence[str], turns: Sequence[str]) -> str:
        """Returns a conversation as text.

        `turns`: [K] texts of the agent. `observations`: [K] texts of the environment; text k is the one before turn k.
            The first text of the environment is omitted if it contains the question, because the verifier's template
            shows the question.
        """
        parts = []
        for number, (heard, turn) in enumerate(zip(observations, turns, strict=True), start=1):
            if heard.strip() and not (number == 1 and question in heard):
                parts.append(fill(self.observation, text=heard.strip()))
            parts.append(fill(self.turn, number=str(number), text=turn.strip()))
        return "".join(parts).strip()


def transcripts(
    played: EpisodesGraded, recipe: OverEpisodes, tokenizer: Any, form: TranscriptForm, reader: ControlTokens,
    threshold: float | None,
) -> list[Transcript]:  # fmt: skip
    """Converts every agent of the successful episodes to a transcript, in order. The reward `outcome` of a transcript
    is the weighted sum of rewards that the recipe defines. A transcript is correct if this reward is above `threshold`
    (see types.is_correct).

    `reader`: control tokens of the verifier's tokenizer. They are escaped in the transcript, so neither the generator
        nor a tool can end the verifier's prompt and write in the verifier's place.

    The environment's texts are taken from its messages. If an episode does not record the messages (as with the library
    verifiers), the texts are decoded from the samples; a sample that begins after a truncation then shows the text of
    its whole prompt.
    """
    converted = []
    for unit in members(played.rollouts):
        samples = [played.rollouts[index] for index in unit]
        reward = recipe.total(samples[-1])
        correct = bool(is_correct(reward, threshold))
        payload = {**samples[-1].payload, "correct": correct, "grading": Outcome.SCORE.value}
        rollout = replace(annotate_turns(joined(samples)), payload=payload, rewards={OUTCOME: reward})
        turns = turn_texts(rollout, tokenizer)
        observations = played.episodes[int(payload[EPISODE])].observations.get(payload[AGENT], ())
        if len(observations) != len(turns):
            observations = _heard(rollout, tokenizer)
        text = reader.spell(form.write(str(payload["question"]), observations, turns))
        converted.append(Transcript(rollout=rollout, text=text, correct=correct, turns=turns, samples=samples))
    return converted


def parted(joined_rollout: Rollout, samples: Sequence[Rollout]) -> list[Rollout]:
    """Splits the annotations of an agent's joined rollout among the agent's samples, and returns the new samples. Each
    sample gets the payload of the joined rollout, and the annotations, scores and verdicts of its own turns.
    `joined_rollout`: the joined rollout (see `joined`). `samples`: the samples that were concatenated.
    """
    annotations, parts, start = joined_rollout.annotations_of(STEP), [], 0
    for sample in samples:
        end = start + len(sample.tokens)
        in_sample = (start <= annotations.ranges[:, 0]) & (annotations.ranges[:, 0] < end)
        payload = dict(joined_rollout.payload)
        if len(verdicts := payload.get("verdicts", ())) == len(annotations) > 0:
            payload["verdicts"] = [verdict for verdict, mine in zip(verdicts, in_sample.tolist(), strict=True) if mine]
        scored = Annotations(
            annotations.ranges[in_sample] - start, None if annotations.scores is None else annotations.scores[in_sample]
        )
        parts.append(replace(sample, payload=payload, annotations={**sample.annotations, STEP: scored}))
        start = end
    return parts


def annotate_turns(rollout: Rollout) -> Rollout:
    """Annotates each turn of a conversation as a reasoning step. A turn is a maximal run of generated tokens between
    environment tokens, regardless of weight versions.
    """
    spans = rollout.spans[rollout.spans[:, 2] != Author.ENVIRONMENT]
    apart = spans[1:, 0] != spans[:-1, 1]
    starts = spans[np.append([True], apart)[: len(spans)], 0]
    ends = spans[np.append(apart, [True])[: len(spans)], 1]
    return replace(rollout, annotations={**rollout.annotations, STEP: Annotations(np.stack([starts, ends], axis=1))})


def turn_texts(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Returns the text of each annotated turn."""
    return [
        decode(tokenizer, rollout.tokens[start:end]).text for start, end in rollout.annotations_of(STEP).ranges.tolist()
    ]


def _heard(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Returns the decoded text before each annotated turn."""
    ranges = rollout.annotations_of(STEP).ranges.tolist()
    ends = [0, *(end for _, end in ranges)]
    return [decode(tokenizer, rollout.tokens[ends[k] : start]).text for k, (start, _) in enumerate(ranges)]
