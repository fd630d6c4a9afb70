"""Toy versions of methods that a stranger to this project might add. Each is one small piece of code that touches
nothing else: they are the test of the centre's design (tests/multi/test_open_centre.py counts their lines and trains
them through the real loop).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.algorithms.objectives import Objective, objective
from megatron_rl.batches.packed_batch import Batch, Statistics
from megatron_rl.contrib.rubric import Rubric
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest, Said
from megatron_rl.recipes.distil import Distil
from megatron_rl.recipes.grpo import GENERATOR, Grpo
from megatron_rl.texts.text import decode_all
from megatron_rl.training.iteration import Iteration, PromptSource, RolloutContext, RolloutsByRole
from megatron_rl.types import Prompt, Rollout

LINES: dict[str, tuple[int, int]] = {}  # name of a toy: its lines of code, and the most that it may have


def lines_of_code(source: str) -> int:
    """Returns the number of lines of a Python source that are neither blank nor of a comment or docstring."""
    lines = {i for i, line in enumerate(source.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def within(lines: int) -> Any:
    """Notes how many lines the decorated toy may have."""

    def note(toy: Any) -> Any:
        source = toy.function if isinstance(toy, Objective) else toy
        LINES[source.__name__] = (lines_of_code(inspect.getsource(source)), lines)
        return toy

    return note


def texts_of(context: RolloutContext, role: str, rollouts: Sequence[Rollout]) -> list[str]:
    return decode_all(context.tokenizers[role], [r.response for r in rollouts])


@within(60)
@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Grpo):
    """GRPO that takes more prompts until enough groups have rewards that differ (DAPO, arXiv 2503.14476)."""

    groups: int = 4  # with signal, that an update trains on
    rounds: int = 10  # of taking more prompts, at most

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        kept: list[Rollout] = []
        taken = 0
        for number in range(self.rounds):
            prompts = source.take(self.groups)
            taken += len(prompts)
            rollouts = super().rollout(
                replace(iteration, number=iteration.number * self.rounds + number), _Given(prompts), context
            )
            credited = assign_advantages(rollouts[GENERATOR], reward="outcome", estimator=self.estimator)
            kept += [replace(r, group=f"{number}/{r.group}") for r in credited if abs(r.advantages) > 1e-6]
            if len({r.group for r in kept}) >= self.groups:
                break
        context.add_metrics(GENERATOR, {"prompts_taken": float(taken), "rounds": number + 1.0})
        return {GENERATOR: kept}


@dataclass
class _Given:
    """A source of prompts that are at hand."""

    prompts: list[Prompt]

    @property
    def prompts_per_iteration(self) -> int:
        return len(self.prompts)

    def take(self, count: int | None = None, fits: Callable[[Prompt], bool] = lambda prompt: True) -> list[Prompt]:
        return [*filter(fits, self.prompts)]


@within(25)
@objective(needs=("advantages", "old"))
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
    advantages = np.empty_like(rewards)
    for group in np.unique(groups):
        members = groups == group
        advantages[members] = rewards[members] - np.median(rewards[members])
    return advantages


within(140)(Rubric)  # the method itself, which was a toy here


@within(120)
@dataclass
class Counting(Environment):
    """An environment of two turns: the model writes, a tool says how many letters there were, the model goes on."""

    def begin(self, task: Mapping[str, Any], seed: int) -> Sequence[NextRequest]:
        self.turn = 0
        return self._move(str(task["question"]))

    def step(self, said: Said) -> Sequence[NextRequest] | EpisodeEnd:
        letters = sum(c.isalpha() for c in said.text)
        self.turn += 1
        if self.turn == 1:
            return self._move(f"[{letters}]")
        return EpisodeEnd(rewards={"agent": {"letters": letters / max(1, len(said.text))}})

    def _move(self, text: str) -> Sequence[NextRequest]:
        return [NextRequest(agent="agent", role="agent", messages=[{"role": "user", "content": text}])]


@within(20)
@objective(needs=("teacher_logprobs",))
def toward_teacher(live: Statistics, batch: Batch) -> Any:
    """Distils on-policy: the k2 estimate of KL(student || teacher) on sampled tokens. -> [N]"""
    return 0.5 * (live.logprobs - batch.values["teacher_logprobs"]) ** 2


within(60)(Distil)  # likewise
