"""Toy versions of methods that a stranger to this project might add. Each is one small piece of code that touches
nothing else: they are the test of the centre's design (tests/multi/test_open_centre.py counts their lines and trains
them through the real loop).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.algorithms.objectives import Objective, objective
from megatron_rl.batches.batch import Batch, Statistics
from megatron_rl.recipes.distil import Distil
from megatron_rl.recipes.grpo import GENERATOR, Grpo
from megatron_rl.recipes.rubric import Rubric
from megatron_rl.text import decode_all
from megatron_rl.training.rollouts import tokenize
from megatron_rl.training.turns import Part, Recipe, Schedule, Source, Table, Turn
from megatron_rl.types import Author, Prompt, Rollout, Stop, spans_of

LINES: dict[str, tuple[int, int]] = {}  # name of a toy: the lines that it has, and the most that it may have


def within(lines: int) -> Any:
    """Notes how many lines the decorated toy may have."""

    def note(toy: Any) -> Any:
        source = toy.function if isinstance(toy, Objective) else toy
        LINES[source.__name__] = (len(inspect.getsource(source).splitlines()), lines)
        return toy

    return note


def texts_of(table: Table, role: str, rollouts: Sequence[Rollout]) -> list[str]:
    return decode_all(table.tokenizers[role], [r.response for r in rollouts])


@within(60)
@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Grpo):
    """GRPO that takes more prompts until enough groups have rewards that differ (DAPO, arXiv 2503.14476)."""

    groups: int = 4  # with signal, that an update trains on
    rounds: int = 10  # of taking more prompts, at most

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        kept: list[Rollout] = []
        taken = 0
        for number in range(self.rounds):
            prompts = source.take(self.groups)
            taken += len(prompts)
            rollouts = super().play(replace(turn, number=turn.number * self.rounds + number), _Given(prompts), table)
            kept += [replace(r, group=f"{number}/{r.group}") for r in rollouts[GENERATOR] if abs(r.advantages) > 1e-6]
            if len({r.group for r in kept}) >= self.groups:
                break
        table.note(GENERATOR, {"prompts_taken": float(taken), "rounds": number + 1.0})
        return {GENERATOR: kept}


@dataclass
class _Given:
    """A source of prompts that are at hand."""

    prompts: list[Prompt]

    def take(self, count: int | None = None) -> list[Prompt]:
        return self.prompts


@within(25)
@objective(needs=("old",))
def sequence_ratio(live: Statistics, batch: Batch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Any:
    """GSPO (arXiv 2507.18071): one clipped importance ratio per sequence, the geometric mean of its tokens'. -> [N]"""
    counts = batch.sequence_sums(batch.counted.float()).clamp(min=1)
    mean = batch.sequence_sums((live.logprobs - batch.old_logprobs).detach()) / counts
    ratio = (batch.spread(mean) + live.logprobs - live.logprobs.detach()).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(ratio * batch.advantages).minimum(clipped * batch.advantages)


@within(25)
def median_baseline(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Compares each reward with the median of its group. [B] each -> [B]"""
    out = np.empty_like(rewards)
    for group in np.unique(groups):
        own = groups == group
        out[own] = rewards[own] - np.median(rewards[own])
    return out


within(140)(Rubric)  # the method itself, which was a toy here


class Counting:
    """An environment of two turns: the model writes, a tool says how many letters there were, the model goes on."""

    def begin(self, task: Mapping[str, Any]) -> str:
        return str(task["question"])

    def step(self, turn: int, text: str) -> tuple[str | None, float]:
        """Returns what the tool says to the model's text (None: the episode is over), and the reward so far."""
        letters = sum(c.isalpha() for c in text)
        return (f"[{letters}]", 0.0) if turn == 0 else (None, letters / max(1, len(text)))


@within(120)
@dataclass(frozen=True, kw_only=True)
class ToolTurns(Recipe):
    """Trains on conversations with an environment, token for token: the tool's tokens are part of the rollout and are
    never trained on.
    """

    updates: int
    group_size: int = 4

    def roles(self) -> Mapping[str, Part]:
        return {"agent": Part(samples=self.group_size)}

    def schedule(self) -> Schedule:
        return [[("agent",)]] * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return Counting().begin(payload)

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        prompts = [p for p in source.take() for _ in range(self.group_size)]
        sampling = replace(table.samplings["agent"], n=1, seed=table.seed_for(turn.number, "agent"))
        session, tokenizer = table.session("agent"), table.tokenizers["agent"]
        so_far = [np.asarray(p.tokens, np.int32) for p in prompts]
        parts = [[(len(p.tokens), Author.ENVIRONMENT, -1)] for p in prompts]
        logprobs = [[np.zeros(len(p.tokens), np.float32)] for p in prompts]
        rewards, turns = {}, dict.fromkeys(range(len(prompts)), 0)
        keys = {}
        for i, tokens in enumerate(so_far):
            keys[i] = i
            session.ask(i, tokens, sampling)
        for key, [said] in session.answers():
            i = keys[key]
            so_far[i] = np.concatenate([so_far[i], said.tokens])
            parts[i].append((len(said.tokens), Author.POLICY, table.engines["agent"].version))
            logprobs[i].append(said.logprobs)
            answer, rewards[i] = Counting().step(turns[i], decode_all(tokenizer, [said.tokens])[0])
            turns[i] += 1
            if answer is not None:
                told = np.asarray(tokenize(tokenizer, answer), np.int32)
                so_far[i] = np.concatenate([so_far[i], told])
                parts[i].append((len(told), Author.ENVIRONMENT, -1))
                logprobs[i].append(np.zeros(len(told), np.float32))
                keys[len(keys)] = i
                session.ask(len(keys) - 1, so_far[i], sampling, after=key)
        rollouts = [
            Rollout(
                role="agent", group=p.id, tokens=so_far[i], logprobs=np.concatenate(logprobs[i]),
                spans=spans_of(*parts[i]), stop=Stop.LENGTH, payload=p.payload, rewards={"letters": rewards[i]},
            )
            for i, p in enumerate(prompts)
        ]  # fmt: skip
        return {"agent": assign_advantages(rollouts, reward="letters", estimator="grpo")}


@within(20)
@objective(needs=("teacher_logprobs",), uses_advantages=False)
def toward_teacher(live: Statistics, batch: Batch) -> Any:
    """Distils on-policy: the k2 estimate of KL(student || teacher) on sampled tokens. -> [N]"""
    return 0.5 * (live.logprobs - batch.values["teacher_logprobs"]) ** 2


within(60)(Distil)  # likewise
