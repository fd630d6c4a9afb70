"""What recipes share: sampled solutions, read by their own token offsets and graded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_rl.chat import decode_with_offsets, token_span
from megatron_rl.config import ConfigError
from megatron_rl.engines.base import Sampling
from megatron_rl.rewards.pool import Outcome, check_failures
from megatron_rl.rewards.tags import step_spans
from megatron_rl.rollout import greedy, plain, sample
from megatron_rl.turns import Players
from megatron_rl.types import Prompt, Trajectory

RIGHT = 0.5  # a solution whose score is above counts as right


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One graded answer to a problem."""

    trajectory: Trajectory  # with its steps, the reward `outcome`, and `correct` in the payload
    text: str
    correct: bool | None  # None: it could not be graded; its outcome is 0


def solve(players: Players, role: str, prompts: Sequence[Prompt], sampling: Sampling) -> list[Solution]:
    """Samples [P * n] solutions and grades them. Raises RewardFailure when too many gradings fail."""
    with players.watch("rollout"):
        rollouts = sample(players.engines[role], prompts, sampling)
    with players.watch("reward"):
        read = [with_steps(t, players.tokenizers[role]) for t in rollouts]
        return grade(players, [t for t, _ in read], [text for _, text in read])


def grade(players: Players, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Solution]:
    """[B] solutions and their texts -> graded."""
    graded = players.grade(texts, [t.payload for t in trajectories])
    check_failures(graded, players.max_failure_share)
    out = []
    for trajectory, text, result in zip(trajectories, texts, graded, strict=True):
        correct = result.score > RIGHT if result.outcome is Outcome.SCORE else None
        payload = {**trajectory.payload, "correct": correct, "grading": result.outcome.value}
        scored = replace(trajectory, payload=payload).with_rewards(outcome=result.score)
        out.append(Solution(trajectory=scored, text=text, correct=correct))
    return out


def with_steps(trajectory: Trajectory, tokenizer: Any) -> tuple[Trajectory, str]:
    """Marks the step blocks by the sampled tokens' own offsets. -> (trajectory, text of its response)."""
    start = trajectory.prompt_length
    text, ends = decode_with_offsets(tokenizer, trajectory.tokens[start:])
    spans = [token_span(first, last, ends) for first, last in step_spans(text)]
    return replace(trajectory, steps=[(start + first, start + last) for first, last in spans]), text


def solution_metrics(solutions: Sequence[Solution]) -> dict[str, float]:
    """steps_per_solution, and how many gradings gave no score."""
    gradings = [s.trajectory.payload["grading"] for s in solutions]
    steps = [float(len(s.trajectory.steps)) for s in solutions]
    failures = {f"graded/{kind.value}": float(gradings.count(kind.value)) for kind in (Outcome.TIMEOUT, Outcome.ERROR)}
    return failures | {"steps_per_solution": fmean(steps) if steps else 0.0}


def accuracies(players: Players, role: str, prompts: Sequence[Prompt], seed: int) -> tuple[dict[str, float], list[Solution]]:
    """Accuracy of one draw per problem at temperature 1, and of greedy decoding -> ({figure: value}, the sampled solutions)."""
    draws = {"sampled": plain(players.samplings[role], seed=seed), "greedy": greedy(players.samplings[role], seed=seed)}
    solved = {name: solve(players, role, prompts, sampling) for name, sampling in draws.items()}
    figures = {f"{role}/accuracy_{name}": fmean(float(bool(s.correct)) for s in solutions) for name, solutions in solved.items()}
    return figures | {f"{role}/num_problems": float(len(prompts))}, solved["sampled"]


def check_groups(sizes: Mapping[str, int], estimator: str) -> None:
    """Raises ConfigError for groups too small for what their samples are compared with."""
    at_least(sizes, 1 if estimator == "reinforce_pp" else 2)  # it compares over the batch, the others within a group


def at_least(settings: Mapping[str, int], floor: int) -> None:
    """Raises ConfigError for the first setting below `floor`."""
    for name, value in settings.items():
        if value < floor:
            raise ConfigError(f"recipe.args.{name} = {value}: give at least {floor}")
