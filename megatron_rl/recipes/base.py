"""What recipes share: sampled solutions, read by their own token offsets and graded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.base import Sampling, Streaming
from megatron_rl.rewards.pool import Graded, Outcome, check_failures
from megatron_rl.rewards.tags import step_spans
from megatron_rl.text import decode_with_offsets, token_span
from megatron_rl.training.rollouts import Draws, check_senior_share, greedy, plain
from megatron_rl.training.turns import Players
from megatron_rl.types import Prompt, Trajectory

RIGHT = 0.5  # a solution whose score is above counts as right


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One graded answer to a problem."""

    trajectory: Trajectory  # with its steps, the reward `outcome`, and `correct` in the payload
    text: str
    correct: bool | None  # None: it could not be graded; its outcome is 0
    graded: Graded = Graded(Outcome.SCORE, 0.0)  # how the grading went


def solve(
    players: Players, role: str, prompts: Sequence[Prompt], sampling: Sampling, then: Callable[[int, Solution], None] = lambda i, s: None
) -> list[Solution]:  # fmt: skip
    """Samples [P * n] solutions and grades them. Raises RewardFailure when too many gradings fail; EngineError for a tandem whose
    author mask is missing or cannot be true.

    `then` gets each (place among the [P * n], solution) when it is graded: with an engine that streams, while others are still written.
    """
    engine, start = players.engines[role], time.perf_counter()
    draws, found, graded_s = Draws(engine, sampling), dict[int, Solution](), 0.0
    for i, prompt in enumerate(prompts):
        draws.ask(i, prompt)
    for batch in ([one] for one in draws.collect()) if isinstance(engine, Streaming) else [list(draws.collect())]:
        begun = time.perf_counter()
        read = [with_steps(t, players.tokenizers[role]) for _, group in batch for t in group]
        places = [i * sampling.n + j for i, group in batch for j in range(len(group))]
        for place, solution in zip(
            places, grade(players, [t for t, _ in read], [text for _, text in read]), strict=True
        ):
            found[place] = solution
            then(place, solution)
        graded_s += time.perf_counter() - begun
    players.watch.add("reward", graded_s)
    players.watch.add("rollout", time.perf_counter() - start - graded_s)
    check_failures([s.graded for _, s in sorted(found.items())], players.max_failure_share)
    check_senior_share([s.trajectory for s in found.values()], sampling.tandem)
    return [found[place] for place in sorted(found)]


def grade(players: Players, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Solution]:
    """[B] solutions and their texts -> graded."""
    graded = players.grade(texts, [t.payload for t in trajectories])
    players.watch.beat()
    out = []
    for trajectory, text, result in zip(trajectories, texts, graded, strict=True):
        correct = result.score > RIGHT if result.outcome is Outcome.SCORE else None
        payload = {**trajectory.payload, "correct": correct, "grading": result.outcome.value}
        scored = replace(trajectory, payload=payload).with_rewards(outcome=result.score)
        out.append(Solution(trajectory=scored, text=text, correct=correct, graded=result))
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


def accuracies(
    players: Players, role: str, prompts: Sequence[Prompt], seed: int
) -> tuple[dict[str, float], list[Solution]]:
    """Accuracy of one draw per problem at temperature 1, and of greedy decoding -> ({figure: value}, the sampled solutions)."""
    draws = {"sampled": plain(players.samplings[role], seed=seed), "greedy": greedy(players.samplings[role], seed=seed)}
    solved = {name: solve(players, role, prompts, sampling) for name, sampling in draws.items()}
    figures = {
        f"{role}/accuracy_{name}": fmean(float(bool(s.correct)) for s in solutions)
        for name, solutions in solved.items()
    }
    return figures | {f"{role}/num_problems": float(len(prompts))}, solved["sampled"]


def check_groups(sizes: Mapping[str, int], estimator: str) -> None:
    """Raises ConfigError for groups too small for what their samples are compared with."""
    at_least(sizes, 1 if estimator == "reinforce_pp" else 2)  # it compares over the batch, the others within a group


def at_least(settings: Mapping[str, int], floor: int) -> None:
    """Raises ConfigError for the first setting below `floor`."""
    for name, value in settings.items():
        if value < floor:
            raise ConfigError(f"recipe.args.{name} = {value}: give at least {floor}")
