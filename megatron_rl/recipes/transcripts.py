"""Makes an agent's part in an episode a solution whose steps are its turns, so that a verifier can judge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.algorithms.advantages import TRAINED
from megatron_rl.control_tokens import ControlTokens
from megatron_rl.environments.episode_types import AGENT
from megatron_rl.recipes.episode_rollouts import EPISODE, OUTCOME, EpisodesGraded, OverEpisodes, by_agent
from megatron_rl.recipes.solutions import Solution
from megatron_rl.text import decode, fill
from megatron_rl.types import STEP, Annotations, Author, Outcome, Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transcript(Solution):
    """The conversation of one agent of an episode, graded. Its rollout has all of the agent's samples one behind the
    other: turn k is annotation k, and what follows a turn counts for it also where the transcript was truncated."""

    turns: list[str]  # what the agent wrote, without what it was told
    samples: Sequence[Rollout] = ()  # in order, to be trained on; several where the transcript was truncated

    @property
    def steps(self) -> list[str]:
        return self.turns

    @property
    def form(self) -> float:
        """Turns are told apart whatever was written: a verification must have one verdict for each."""
        return 1.0

    def to_train(self, credited: Rollout) -> list[Rollout]:
        return parted(credited, self.samples)


@dataclass(frozen=True, kw_only=True)
class TranscriptForm:
    """The way in which a conversation is written down for the verifier."""

    turn: str  # with {text}, and {number} from 1 on
    told: str  # with {text}: what the environment said before a turn

    def write(self, question: str, told: Sequence[str], turns: Sequence[str]) -> str:
        """Returns a conversation as text: [K] what was said before each turn, and the turns. What opened it is left out
        where the question is part of it, as the verifier reads that anyway."""
        parts = []
        for number, (heard, turn) in enumerate(zip(told, turns, strict=True), start=1):
            if heard.strip() and not (number == 1 and question in heard):
                parts.append(fill(self.told, text=heard.strip()))
            parts.append(fill(self.turn, number=str(number), text=turn.strip()))
        return "".join(parts).strip()


def transcripts(
    played: EpisodesGraded, recipe: OverEpisodes, tokenizer: Any, form: TranscriptForm, reader: ControlTokens,
    threshold: float,
) -> list[Transcript]:  # fmt: skip
    """Makes every agent of the episodes that count a transcript, in order. Its reward `outcome` is the sum of rewards
    that counts in the recipe; above threshold it is correct. `reader`: the verifier's control tokens, which no
    transcript has: neither the generator nor a tool can end the verifier's prompt and speak in its place.

    What an agent was told is the text of the messages. Where an episode does not tell (those of the library verifiers),
    it is decoded from the samples, and a sample behind a cut shows all that it opens with.
    """
    found = []
    for samples in by_agent(played.rollouts):
        reward = recipe.total(samples[-1])
        payload = {**samples[-1].payload, "correct": reward > threshold, "grading": Outcome.SCORE.value}
        rollout = replace(annotate_turns(joined(samples)), payload=payload, rewards={OUTCOME: reward})
        turns = turn_texts(rollout, tokenizer)
        told = played.episodes[int(payload[EPISODE])].told.get(payload[AGENT], ())
        if len(told) != len(turns):
            told = _heard(rollout, tokenizer)
        text = reader.spell(form.write(str(payload["question"]), told, turns))
        found.append(Transcript(rollout=rollout, text=text, correct=reward > threshold, turns=turns, samples=samples))
    return found


def joined(samples: Sequence[Rollout]) -> Rollout:
    """Puts samples one behind the other, as one rollout to compute credit on. It cannot be trained on."""
    starts = np.cumsum([0, *(len(sample.tokens) for sample in samples[:-1])])
    spans = [sample.spans + np.array([start, start, 0, 0]) for sample, start in zip(samples, starts, strict=True)]
    return replace(
        samples[-1],
        tokens=np.concatenate([sample.tokens for sample in samples]),
        logprobs=np.concatenate([sample.logprobs for sample in samples]),
        spans=np.concatenate(spans),
        annotations={},
        values={},
        experts=None,
    )


def parted(whole: Rollout, samples: Sequence[Rollout]) -> list[Rollout]:
    """Gives the samples that were joined to `whole` what it has got since: payload, annotations, advantages and the
    reward that they compare. A sample has the annotations, scores and verdicts of its own turns."""
    annotations, parts, start = whole.annotations_of(STEP), [], 0
    for sample in samples:
        end = start + len(sample.tokens)
        own = (start <= annotations.ranges[:, 0]) & (annotations.ranges[:, 0] < end)
        payload = dict(whole.payload)
        if len(verdicts := payload.get("verdicts", ())) == len(annotations) > 0:
            payload["verdicts"] = [verdict for verdict, mine in zip(verdicts, own.tolist(), strict=True) if mine]
        scored = Annotations(
            annotations.ranges[own] - start, None if annotations.scores is None else annotations.scores[own]
        )
        given = whole.advantages
        parts.append(
            replace(
                sample,
                payload=payload,
                rewards={**sample.rewards, TRAINED: whole.rewards[TRAINED]},
                annotations={**sample.annotations, STEP: scored},
                advantages=given[start:end] if isinstance(given, np.ndarray) else given,
            )
        )
        start = end
    return parts


def annotate_turns(rollout: Rollout) -> Rollout:
    """Annotates the stretches that models wrote between what the environment said, whatever their weight versions."""
    spans = rollout.spans[rollout.spans[:, 2] != Author.ENVIRONMENT]
    apart = spans[1:, 0] != spans[:-1, 1]
    starts = spans[np.append([True], apart)[: len(spans)], 0]
    ends = spans[np.append(apart, [True])[: len(spans)], 1]
    return replace(rollout, annotations={**rollout.annotations, STEP: Annotations(np.stack([starts, ends], axis=1))})


def turn_texts(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Returns the text of each turn that is annotated."""
    return [
        decode(tokenizer, rollout.tokens[start:end]).text for start, end in rollout.annotations_of(STEP).ranges.tolist()
    ]


def _heard(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Decodes what stands before each turn that is annotated."""
    ranges = rollout.annotations_of(STEP).ranges.tolist()
    ends = [0, *(end for _, end in ranges)]
    return [decode(tokenizer, rollout.tokens[ends[k] : start]).text for k, (start, _) in enumerate(ranges)]
