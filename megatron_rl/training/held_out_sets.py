"""Evaluates a recipe on the sets of held-out problems of a run, and compares evaluations to find the best checkpoints
and to end a run early."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from megatron_rl.config.base import ConfigError, hint
from megatron_rl.config.evaluation import Best, EarlyStop
from megatron_rl.training.collector import Collector
from megatron_rl.training.iteration import EvaluationDraws, Recipe, RolloutContext
from megatron_rl.training.iteration_engines import CutOffCounter
from megatron_rl.training.progress import Progress
from megatron_rl.types import CUT_OFF, Prompt

# {name of the set: {role: [P][n] graded answers}}
Answers = Mapping[str, Mapping[str, list[list[dict[str, Any]]]]]
# metrics that are summed over sets, besides num_*; other metrics are averaged
COUNTS = ("ungraded", "ungraded_greedy", "replaced", "replaced_greedy", "too_long", CUT_OFF)


@dataclass(frozen=True, kw_only=True)
class HeldOutSet:
    """A set of held-out problems: the prompts, and the settings with which answers are sampled and graded."""

    name: str
    prompts: Sequence[Prompt]
    draws: EvaluationDraws
    # {field of RolloutContext: value for this set}, for grade, threshold, lowest_reward and max_failure_share.
    # A field that is missing has the run's value.
    grading: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the current weights that has begun.

    `result` waits until all answers are graded, and returns the metrics and the answers; a second call returns the same
    values. It returns None if the evaluation was cancelled, see Collector.beside.
    """

    number: int  # number of finished iterations
    cycles_begun: int
    kept: dict[str, Any]  # the value of Progress.kept after the evaluation, which `result` fills
    result: Callable[[], tuple[dict[str, float], Answers] | None]


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """Evaluates the policies of a run. Used on the driver.

    `served`: returns whether each role has an engine with the current weights.
    """

    recipe: Recipe
    sets: Sequence[HeldOutSet]
    context: RolloutContext
    rollouts: Collector
    served: Callable[[], bool] = lambda: True

    def begin(self, progress: Progress, *, beside: bool) -> Evaluation:
        """Begins an evaluation of the current weights. With `beside`, the evaluation runs in a thread, and training
        goes on; otherwise it runs in the first call of `result`.
        """
        kept = copy.deepcopy(progress.kept)  # a copy, because a checkpoint must not have a part of the values
        context = replace(self.context, kept=kept)
        evaluate = functools.partial(evaluate_sets, self.recipe, self.sets)
        if beside:
            result = self.rollouts.beside(context, progress.number, evaluate, self.served)
        else:
            result = functools.cache(functools.partial(evaluate, context))
        return Evaluation(progress.number, progress.cycles_begun, kept, result)


def evaluate_sets(
    recipe: Recipe, sets: Sequence[HeldOutSet], context: RolloutContext
) -> tuple[dict[str, float], Answers]:
    """Evaluates a recipe on all sets. Used on the driver. Returns the metrics, and the graded answers.

    For a metric that all sets have, `role/metric` is the mean over the sets with equal weights; a count is summed over
    the sets that have it. The metric `role/cut_off` of the recipe's first role is the number of gradings that were cut
    off, and is left out if it is 0. With several sets there are also the metrics of each set, `role/SET/metric`.
    `context.kept` is {name of the set: values that later evaluations of the set need}.
    """
    found: dict[str, dict[str, float]] = {}
    answers: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
    for own in sets:
        answers[own.name] = {}
        kept = context.kept.setdefault(own.name, {})
        alone = replace(context, evaluation=own.draws, answers=answers[own.name], kept=kept, **own.grading)
        cut_offs = CutOffCounter(alone.grade)
        found[own.name] = recipe.evaluate(own.prompts, replace(alone, grade=cut_offs))
        if cut_offs.count:
            found[own.name][f"{next(iter(recipe.roles()))}/{CUT_OFF}"] = float(cut_offs.count)
    first, *others = found.values()
    shared = [name for name in first if not _is_count(name) and all(name in metrics for metrics in others)]
    means = {name: fmean(own[name] for own in found.values()) for name in shared}
    counts = dict.fromkeys(name for own in found.values() for name in own if _is_count(name))
    means |= {name: sum(own.get(name, 0.0) for own in found.values()) for name in counts}
    if not others:
        return means, answers
    for name, metrics in found.items():
        for metric, value in metrics.items():
            role, _, rest = metric.rpartition("/")
            means["/".join([role, name, rest] if role else [name, rest])] = value
    return means, answers


def ranked(
    best: Sequence[tuple[int, float]], done: int, metrics: Mapping[str, float], settings: Best
) -> list[tuple[int, float]]:
    """Adds a new evaluation to the list of the best evaluations. Returns (number of finished iterations, value of
    `settings.metric`) of up to `settings.keep` evaluations, the best first. Of equal values, the earliest comes first.
    An evaluation without a finite value of the metric is not added.

    `best`: the list without the new evaluation. `done`: number of finished iterations at the new evaluation. `metrics`:
    metrics of the new evaluation. Raises ConfigError if neither `metrics` nor an earlier evaluation has
    `settings.metric`.
    """
    sign, value = -1 if settings.mode == "max" else 1, value_of(metrics, settings, known=bool(best))
    both = [*best, *([] if value is None else [(done, value)])]
    return sorted(both, key=lambda one: (sign * one[1], one[0]))[: settings.keep]


def followed(
    before: tuple[float, int] | None, metrics: Mapping[str, float], settings: EarlyStop
) -> tuple[float, int] | None:
    """Returns (best value of `settings.metric` so far, number of evaluations since the best value); None before the
    first finite value. `before`: the result for the previous evaluation; None for the first evaluation. `metrics`:
    metrics of the new evaluation. An evaluation without a finite value counts as not better. Raises ConfigError if
    neither `metrics` nor an earlier evaluation has `settings.metric`.
    """
    value = value_of(metrics, settings, known=before is not None)
    if value is not None and (before is None or (value > before[0] if settings.mode == "max" else value < before[0])):
        return value, 0
    return None if before is None else (before[0], before[1] + 1)


def stopped_early(settings: EarlyStop | None, state: tuple[float, int] | None) -> bool:
    """Returns whether the metric of the early stop has not improved in the last `settings.patience` evaluations.
    `state`: the result of `followed` for the last evaluation.
    """
    return settings is not None and state is not None and state[1] >= settings.patience


def value_of(metrics: Mapping[str, float], settings: Best | EarlyStop, *, known: bool) -> float | None:
    """Returns the value of `settings.metric`; None if the evaluation has no finite value of the metric. Some metrics
    are undefined in some evaluations, for example F1 where all solutions are correct. `known`: whether an earlier
    evaluation had a value; if False, a missing metric raises ConfigError.
    """
    if settings.metric not in metrics and not known:
        place = "best" if isinstance(settings, Best) else "early_stop"
        raise ConfigError(
            f"evaluation.{place}.metric = {settings.metric!r}: the evaluation has no such metric; it has "
            f"{', '.join(metrics)}; {hint(settings.metric, metrics, 'name one of them')}"
        )
    value = metrics.get(settings.metric, math.nan)
    return value if math.isfinite(value) else None


def _is_count(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last.startswith("num_") or last in COUNTS
