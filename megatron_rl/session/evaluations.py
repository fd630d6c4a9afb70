"""The evaluations of a training run: the problem sets and their graders, the result files, and the best models."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.evaluation import Reward
from megatron_rl.evaluation import evaluation_page
from megatron_rl.evaluation.samples import Samples, chosen_answers
from megatron_rl.evaluation.set_metrics import SetMetrics, macro, metrics_of
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.rewards.source_grading import GradePools
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.metrics import Sample, Tracker
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.spec.evaluated_sets import EvaluatedSet
from megatron_rl.training.held_out_sets import Answers, HeldOutSet
from megatron_rl.training.iteration import EvaluationDraws
from megatron_rl.types import Prompt


def held_out_sets(
    evaluated: Sequence[EvaluatedSet],
    prompts: Mapping[str, Sequence[Prompt]],
    run_reward: Reward,
    stack: contextlib.ExitStack,
    *,
    greedy: bool,
) -> list[HeldOutSet]:
    """Returns the problem sets of a run's evaluations. `prompts`: {name of a problem set: prompts of its problems}. A
    problem set without an entry in `prompts` is left out. `greedy`: see Evaluation.greedy.

    Sets with the run's reward settings are graded by the run's grader. Other sets are graded in pools of worker
    processes, one pool for all sets with equal reward settings. The first evaluation starts the workers, and closing
    `stack` ends them.
    """
    pools, out = GradePools(stack), []
    for own in evaluated:
        if own.name not in prompts:
            continue
        grading, reward = dict[str, Any](), own.reward
        if reward != run_reward:
            grading = {
                "grade": pools.of(reward).grade, "threshold": reward.threshold, "lowest_reward": reward.bounds[0],
                "max_failure_share": reward.max_failure_share,
            }  # fmt: skip
        draws = EvaluationDraws(
            n=own.n, k=own.k, temperature=own.temperature, top_p=own.top_p, top_k=own.top_k,
            greedy=greedy,
        )  # fmt: skip
        out.append(HeldOutSet(name=own.name, prompts=prompts[own.name], draws=draws, grading=grading))
    return out


def write_results(
    directory: RunDirectory, sets: Sequence[EvaluatedSet], number: int, answers: Answers, *, seed: int
) -> None:  # fmt: skip
    """Writes the results of an evaluation: the metrics with confidence intervals to a file such as
    RUN/evaluations/iteration_000012.json, and all answers to RUN/evaluations/iteration_000012.jsonl. Both files have
    the format of the files that `megatron-rl eval` writes. `number`: number of finished iterations. Called on the
    driver (rank 0)."""
    place = directory.evaluations / f"iteration_{number:06d}.json"
    samples, found = Samples(None, ""), list[SetMetrics]()
    for own in sets:
        for role, groups in answers.get(own.name, {}).items():
            measure = SOLVE if len(answers[own.name]) == 1 else role
            samples.add([{"set": own.name, "measure": measure, **row} for row in group] for group in groups)
            found.append(metrics_of(samples, own.name, own.title, measure, ks=own.k, seed=seed))
    if not found:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    samples.write(place.with_suffix(".jsonl"))
    evaluation_page.write_metrics(place, found, macro(found, seed=seed), {"iteration": number})


def show_answers(tracker: Tracker, number: int, answers: Answers) -> None:
    """Sends some answers of each problem set to the metric sinks (such as W&B): at most `tracker.num_samples` answers
    per set, half of them correct if there are enough correct and wrong answers. `number`: number of finished
    iterations.
    """
    for name, by_role in answers.items():
        rows = [row for groups in by_role.values() for group in groups for row in group]
        if chosen := chosen_answers(rows, tracker.num_samples):
            tracker.show(number - 1, f"eval/{name}", [_shown(row) for row in chosen])


def keep_best(
    directory: RunDirectory, number: int, best: Sequence[tuple[int, float]], export: Callable[[Path], None]
) -> None:  # fmt: skip
    """Exports the current models to a directory such as RUN/best/iteration_000012 if their evaluation is among the
    best. Collective.

    `number`: number of finished iterations. `best`: (number of finished iterations, value of the metric) for each of
    the best evaluations. `export`: collective function that writes the models into a directory. The models before the
    first iteration are not exported, because their weights are those of the run's initial model.
    """
    if number and any(one[0] == number for one in best):
        export(directory.best / f"iteration_{number:06d}")


def remove_surpassed(
    directory: RunDirectory, checkpoints: Checkpoints, best: Sequence[tuple[int, float]]
) -> None:  # fmt: skip
    """Removes checkpoints that are no longer protected, and exported models that are no longer among the best.

    `best`: (number of finished iterations, value of the metric) for each of the best evaluations. Called on the driver
    (rank 0).
    """
    checkpoints.prune()
    kept = {f"iteration_{number:06d}" for number, _ in best}
    for folder in directory.best.glob("iteration_*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)  # can fail if a process reads the folder; the next call retries


def best_record(directory: RunDirectory, metric: str, best: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Returns the entry `best` of the run's summary: a list of the best evaluations, the best first.

    Each item has the number of finished iterations, the metric's name and value, and the directories of the checkpoint
    and of the exported models. Both directories are null for the evaluation before the first iteration, because the
    run's initial model is not saved again.
    """
    return [
        {
            "iteration": number, "metric": metric, "value": value,
            "checkpoint": str(directory.checkpoints / f"iteration_{number:06d}") if number else None,
            "models": str(directory.best / f"iteration_{number:06d}/models") if number else None,
        }
        for number, value in best
    ]  # fmt: skip


def _shown(row: Mapping[str, Any]) -> Sample:
    rewards = {"reward": row["score"]} | ({} if row["correct"] is None else {"correct": float(row["correct"])})
    group = f"{row['row']}, sample {row['sample']}"
    response = "\n\n".join(filter(None, (row["response"], row.get("verification"))))
    return Sample(
        group=group, prompt=str(row.get("question", "")), response=response, rewards=rewards, length=row["tokens"]
    )
