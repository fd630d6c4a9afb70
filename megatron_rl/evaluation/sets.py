"""Loads the problem sets of an evaluation: benchmarks by name, and a data set of the user."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config.data_settings import resolve
from megatron_rl.config.schema import ConfigError, Reward
from megatron_rl.data.problems import Problem, read_problems
from megatron_rl.evaluation.benchmarks import benchmark, read_benchmark, solution, source_of
from megatron_rl.spec.run_spec import EvalSpec

GENERATOR_TEMPLATE, JUDGED_TEMPLATE = "tango_generator", "tango_verifier"  # prompt templates for data sets of the user


@dataclass(frozen=True, kw_only=True)
class GradedSet:
    """A set of problems to evaluate on, with its prompt template and its grader."""

    name: str
    title: str
    problems: list[Problem]
    reward: Reward
    judged: bool  # whether the set has solutions that a verifier judges
    template: str  # name or file of the prompt template


def read_sets(spec: EvalSpec) -> list[GradedSet]:
    """Loads all problem sets of an evaluation. Raises ConfigError for an unknown benchmark, a benchmark without data,
    and two sets with the same name."""
    config, out = spec.config, []
    for name in config.benchmarks:
        found = benchmark(name)
        problems = read_benchmark(found, source_of(found, config.data_dir, limit=config.limit))
        reward = replace(config.reward, target=found.grader, args={})
        template = config.template or found.template
        out.append(
            GradedSet(
                name=name, title=found.title, problems=problems, reward=reward, judged=found.judged, template=template
            )
        )
    if config.data is not None:
        problems, path = read_problems(config.data), Path(config.data.path)
        # A set that is read from a file test.* or train.* gets the name of the file's directory, not of the file.
        plain = path.stem in ("test", "train") and path.parent.name
        name = path.parent.name if plain else path.stem
        judged = "steps" in resolve(config.data).fields
        if judged:
            problems = [replace(p, values=solution(p.values)) for p in problems]
        template = config.template or (JUDGED_TEMPLATE if judged else GENERATOR_TEMPLATE)
        out.append(
            GradedSet(name=name, title=name, problems=problems, reward=config.reward, judged=judged, template=template)
        )
    names = [source.name for source in out]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"benchmarks and data: {', '.join(twice)} is there twice; name it once, "
            "or give data.path a file of another name"
        )
    return out
