"""Measures a reviewer on a fixed, balanced set of solutions to held-out problems, drawn once and kept in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_rl.recipes.base import Solution, with_steps
from megatron_rl.recipes.review import Reviewer, StepLabels, aligned, gold_confusion, outcome_confusion
from megatron_rl.training.rollouts import greedy, plain
from megatron_rl.training.turns import Players
from megatron_rl.types import Prompt, Stop, Trajectory


def balanced_set(
    rounds: Iterable[Sequence[Solution]], fits: Callable[[Solution], bool], per_class: int
) -> list[Solution]:
    """Takes solutions round by round until there are `per_class` right and as many wrong ones, or no more rounds.

    Ungraded solutions and those that do not fit the reviewer are passed over. The right ones come first.
    """
    kept: dict[bool, list[Solution]] = {True: [], False: []}
    for solutions in rounds:
        for s in solutions:
            if s.correct is not None and len(kept[s.correct]) < per_class and fits(s):
                kept[s.correct].append(s)
        if all(len(side) >= per_class for side in kept.values()):
            break
    return kept[True] + kept[False]


def judge(
    players: Players, reviewer: Reviewer, solutions: Sequence[Solution], step_labels: StepLabels | None, seed: int
) -> dict[str, float]:
    """Figures of the reviewer, named `role/figure`, of verdicts drawn at temperature 1 and (with `_greedy` behind) of greedy ones.

    outcome_f1 and (with gold labels) step_f1 are harmonic means of the accuracies on right and on wrong solutions or steps, left out
    when a class is empty; aligned is the share with one verdict per step; predicted_positive that judged right. And class counts.
    """
    right, role = sum(bool(s.correct) for s in solutions), reviewer.role
    figures: dict[str, float | None] = {"num_right": float(right), "num_wrong": float(len(solutions) - right)}
    draws = {"": plain(players.samplings[role], seed=seed), "_greedy": greedy(players.samplings[role], seed=seed)}
    for suffix, sampling in draws.items():
        rows = [r for group in reviewer.review(players, solutions, sampling) for r in group]
        outcome = outcome_confusion(rows)
        figures[f"outcome_f1{suffix}"] = outcome.f1
        figures[f"step_f1{suffix}"] = gold_confusion(rows, step_labels).f1 if step_labels else None
        figures[f"aligned{suffix}"] = aligned(rows)
        figures[f"predicted_positive{suffix}"] = outcome.predicted_positive
    return {f"{role}/{name}": value for name, value in figures.items() if value is not None}


def solutions_to_json(solutions: Sequence[Solution]) -> list[dict[str, Any]]:
    """Of each solution the problem's id, the response's token ids, and how it ended and was graded: what a checkpoint keeps of a set."""
    return [
        {"id": _problem_id(s), "response": s.trajectory.response, "stop": s.trajectory.stop.value, "correct": s.correct}
        for s in solutions
    ]


def solutions_from_json(rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], tokenizer: Any) -> list[Solution]:
    """Joins kept responses to their problems again. Raises ValueError for a problem that is no longer among `prompts`."""
    problems = {p.id: p for p in prompts}
    out = []
    for i, row in enumerate(rows):
        if row["id"] not in problems:
            raise ValueError(
                f"held-out problem {row['id']!r} of the checkpoint is gone: put evaluation.prompts back as it was"
            )
        prompt, response = problems[row["id"]], list(row["response"])
        trajectory, text = with_steps(
            Trajectory(
                group=f"{i}:{prompt.id}",
                tokens=[*prompt.tokens, *response],
                trainable=[False] * len(prompt.tokens) + [True] * len(response),
                logprobs=[0.0] * (len(prompt.tokens) + len(response)),
                version=0,
                stop=Stop(row["stop"]),
                payload=prompt.payload,
            ),
            tokenizer,
        )
        out.append(Solution(trajectory=trajectory, text=text, correct=row["correct"]))
    return out


def _problem_id(solution: Solution) -> str:
    """The id of the problem in the group name that rollout.sample gave."""
    return solution.trajectory.group.partition(":")[2]
