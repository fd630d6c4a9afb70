"""Episodes of a tool loop on any engine, as JSON values, and what transformers must say of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conformance import CLOSE, NEAR, Judge
from toys import CHARACTERS, characters

from megatron_rl.engines.protocol import Engine, Sampling
from megatron_rl.environments.environment import Environment, EpisodeSettings
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest, Said
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Author, Outcome, Prompt

ROLE = "reader"
ANSWERS, EPISODES, OPENING = 3, 8, 300  # of an episode; at once; characters, several blocks of a prefix cache
SAMPLINGS = {
    "likeliest": Sampling(max_tokens=24, temperature=0.0),
    "drawn": Sampling(max_tokens=24, seed=3),
}


@dataclass
class Counted(Environment):
    """A model reads a long text, and a tool counts the letters of each of its answers but the last."""

    def begin(self, task: Mapping[str, Any], seed: int) -> list[NextRequest]:
        self.left = ANSWERS
        return self._move(task["text"])

    def step(self, said: Said) -> list[NextRequest] | EpisodeEnd:
        self.left -= 1
        if not self.left:
            return EpisodeEnd(rewards={"reader": {"letters": float(len(said.text))}})
        return self._move(_told(said.text))

    def _move(self, text: str) -> list[NextRequest]:
        return [NextRequest(agent="reader", role=ROLE, messages=[{"role": "tool", "content": text}])]


def play(engine: Engine, kind: str) -> list[dict[str, Any]]:
    """Plays conversations whose texts have nothing in common, neither with each other nor with those of another
    `kind` -> the sample of each."""
    rng = random.Random(kind)
    context = RolloutContext(
        engines={ROLE: engine}, tokenizers={ROLE: characters()}, samplings={ROLE: SAMPLINGS[kind]},
        max_prompt_tokens={ROLE: 480}, grade=lambda *_: [],
    )  # fmt: skip
    texts = ["".join(rng.choices(CHARACTERS, k=OPENING)) for _ in range(EPISODES)]
    tasks = [Prompt(id=str(i), tokens=[1], payload={"text": text}) for i, text in enumerate(texts)]
    episodes = Counted().play(context, tasks, range(EPISODES), dict(context.samplings), EpisodeSettings())
    assert [(episode.outcome, episode.why) for episode in episodes] == [(Outcome.SCORE, "")] * EPISODES
    samples = [rollout for episode in episodes for rollout in episode.rollouts]
    return [{name: getattr(r, name).tolist() for name in ("tokens", "logprobs", "spans")} for r in samples]


def written(sample: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns where the answers of a sample begin and end."""
    return [(start, end) for start, end, author, _ in sample["spans"] if author == Author.POLICY]


def cached(samples: list[dict[str, Any]], block: int) -> int:
    """Returns how many tokens of the second and third questions a server finds in its prefix cache, when each
    conversation stays with the server of its first one. The cache holds whole blocks, and what was computed: all but
    the last token of an answer."""
    ends = [end for sample in samples for _, end in written(sample)[:-1]]
    return sum((end - 1) // block * block for end in ends)


def check(judge: Judge, samples: list[dict[str, Any]], kind: str, version: int) -> None:
    """Reads each sample as one sequence with transformers. Every answer is the likeliest one given all that stands
    before it, or has the log-probs that were recorded; between two answers there are the tool's words."""
    assert len(samples) == EPISODES
    tokenizer = characters()
    for sample in samples:
        tokens, answers = sample["tokens"], written(sample)
        assert len(answers) == ANSWERS and {span[3] for span in sample["spans"] if span[2] == Author.POLICY} == {
            version
        }
        every = judge.logits(tokens)[:-1].log_softmax(-1)
        taken = every.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]  # of the tokens from the second on
        for start, end in answers:
            logprobs = taken[start - 1 : end - 1]
            if kind == "likeliest":
                assert (every[start - 1 : end - 1].max(-1).values - logprobs).max() < CLOSE
            else:
                assert sample["logprobs"][start:end] == pytest.approx(logprobs.tolist(), abs=NEAR)
        for (start, end), (following, _) in zip(answers, answers[1:], strict=False):
            text = tokenizer.decode(tokens[start:end], skip_special_tokens=True)
            assert tokenizer.decode(tokens[end:following]) == _told(text)


def _told(answer: str) -> str:
    return f"[{len(answer)} letters]"
