"""Makes the cases that plans are made of, from configs and recipes of tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import TrainConfig
from megatron_rl.models.shape import Shape
from megatron_rl.planning.case import Case
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.workload import IterationWork, cycle_work, models_of
from megatron_rl.spec.resolve import specify
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.training.iteration import Recipe


class Unscored(Recipe):
    """A recipe of a test that is planned and never run, and that asks the trainer for no scores."""

    def prompt(self, payload):
        raise NotImplementedError("the recipe is planned, not run")

    def rollout(self, iteration, source, context):
        raise NotImplementedError("the recipe is planned, not run")


def spec_of(config: TrainConfig, recipe: Any = None) -> RunSpec:
    """Returns the specification of a config, unchecked; with `recipe` in place of the recipe that the config names."""
    spec, problems = specify(config, 1)
    assert isinstance(spec, RunSpec) and not problems, problems
    return spec if recipe is None else replace(spec, recipe=recipe)


def case_of(config: TrainConfig, cluster: str, recipe: Any = None, models: Mapping[str, Shape] | None = None) -> Case:
    spec = spec_of(config, recipe)
    shapes = models_of(spec.roles, []) if models is None else models
    return Case(spec=spec, cluster=parse_cluster(cluster), models=shapes, work=work_of_run(spec))


def work_of_run(spec: RunSpec, **options: Any) -> list[IterationWork]:
    return cycle_work(spec.recipe, spec.roles, spec.run.prompts_per_iteration, **options)
