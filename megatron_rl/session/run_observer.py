"""Logs the events of a training run: to the console, to the metric sinks and to files of the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.run.metrics import Sample
from megatron_rl.session import evaluations
from megatron_rl.session.run_setup import Driver
from megatron_rl.session.run_timeline import Timeline
from megatron_rl.spec.evaluated_sets import EvaluatedSet
from megatron_rl.texts.text import decode
from megatron_rl.training.events import Evaluated, Event, Measured, Observer, Said, Trained
from megatron_rl.types import Rollout


def run_observer(
    driver: Driver, tokenizers: Mapping[str, Any], sets: Sequence[EvaluatedSet], timeline: Timeline, *, seed: int
) -> Observer:  # fmt: skip
    """Returns the observer of a run. Used on the driver (rank 0). `sets`: the problem sets of the run's evaluations.
    `seed`: the setting run.seed."""

    def observe(event: Event) -> None:
        match event:
            case Said():
                driver.say(event.text)
            case Measured():
                driver.log(event.cycle, event.scope, event.metrics, iteration=event.iteration)
            case Trained():
                timeline.write(event.iteration)
                _show(driver, tokenizers, event)
            case Evaluated():
                evaluations.write_results(driver.directory, sets, event.iterations, event.answers, seed=seed)
                if driver.tracker is not None:
                    evaluations.show_answers(driver.tracker, event.iterations, event.answers)

    return observe


def _show(driver: Driver, tokenizers: Mapping[str, Any], event: Trained) -> None:
    """Sends some rollouts of an iteration, decoded to text, to the metric sinks (such as TensorBoard or W&B)."""
    for role, rollouts in event.rollouts.items():
        if driver.tracker is not None and rollouts and (count := driver.tracker.num_samples):
            samples = [_sample(tokenizers[role], rollout) for rollout in rollouts[:count]]
            driver.tracker.show(event.iteration.number, role, samples)


def _sample(tokenizer: Any, rollout: Rollout) -> Sample:
    text = lambda tokens: decode(tokenizer, tokens).text  # noqa: E731
    return Sample(
        group=rollout.group, prompt=text(rollout.prompt), response=text(rollout.response),
        rewards=rollout.rewards, length=rollout.length,
    )  # fmt: skip
