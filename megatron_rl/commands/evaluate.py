"""`megatron-rl eval`: accuracy of a model on a problem set, with its standard error, and every graded response as JSON."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from statistics import fmean

from megatron_rl.checkpoint import write_text
from megatron_rl.commands.common import Answered, answers, open_world
from megatron_rl.commands.launch import Place, run_directory
from megatron_rl.config import EvalConfig
from megatron_rl.rewards.pool import GradePool, Outcome, check_failures


def run(config: EvalConfig, place: Place) -> int:
    """Every rank runs it. Prints the figures; returns the exit status."""
    parts = None if config.output is None else Path(f"{config.output}.parts")
    with open_world(place, run_directory(config)) as world:
        found = answers(config, world, parts)
        if found is not None:
            _write(config, found)
            if parts is not None:
                shutil.rmtree(parts)
    return 0


def _write(config: EvalConfig, found: list[Answered]) -> None:
    with GradePool(config.reward) as pool:
        graded = pool.grade([a.text for a in found], [a.problem.values for a in found])
    by_problem: dict[int, list[float]] = {}
    for answer, grade in zip(found, graded, strict=True):
        by_problem.setdefault(answer.problem.row, []).append(grade.score)
    means = [fmean(scores) for scores in by_problem.values()]
    accuracy = fmean(means)
    spread = fmean((m - accuracy) ** 2 for m in means)
    figures = {
        "accuracy": accuracy,
        "standard_error": math.sqrt(spread / max(1, len(means) - 1)),
        "problems": len(means),
        "samples_per_problem": config.n,
        "finished": fmean(float(a.finished) for a in found),
        "mean_tokens": fmean(float(a.tokens) for a in found),
        "failed_gradings": sum(g.outcome is not Outcome.SCORE for g in graded),
    }
    if config.output is not None:
        rows = [
            {**a.problem.values, "response": a.text, "score": g.score, "grading": g.outcome.value}
            for a, g in zip(found, graded, strict=True)
        ]
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"figures": figures, "responses": rows}, indent=1, default=str) + "\n")
    check_failures(graded, config.reward.max_failure_share)
    print(f"{'graded by':20} {config.reward.target}")
    print("\n".join(f"{name:20} {value:.4f}" if isinstance(value, float) else f"{name:20} {value}" for name, value in figures.items()))
