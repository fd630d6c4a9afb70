"""Reads experiments from Python files and checks them.

An experiment is a graph of named tasks, each a command of megatron-rl or a program, with the tasks that it waits for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.cluster.profile import Profile
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, EvalConfig, SftConfig, TrainConfig
from megatron_rl.jobs import submit
from megatron_rl.jobs.submit import Submission
from megatron_rl.run.run_directory import SWEEP
from megatron_rl.spec.resolve import resolve

SCHEMAS: dict[str, Any] = {"train": TrainConfig, "sft": SftConfig, "eval": EvalConfig}
CONFIG = "config.yaml"  # below RUN/jobs


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options that a definition gets."""

    small: bool  # true asks for a laptop's size
    dir: str  # directory of the runs


@dataclass(frozen=True, kw_only=True)
class Task:
    """One `megatron-rl COMMAND SETTINGS`, or with `points` a sweep: a run for each point, with the point's settings."""

    name: str
    command: str  # train, sft or eval
    settings: Sequence[str]  # CONFIG.yaml files, then a.b=c
    after: Sequence[str] = ()  # tasks above it that must have succeeded
    points: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program in one process, such as one that makes data."""

    name: str
    words: Sequence[str]  # file, arguments
    after: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A graph of tasks."""

    name: str
    tasks: Sequence[Task | Program]  # each stands below those that it waits for


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command line that a process group runs."""

    name: str
    words: Sequence[str]  # the arguments of the interpreter
    after: Sequence[str]  # names of the steps that must have succeeded
    directory: Path | None = None  # the run's; None for a program
    nodes: int = 1
    time: str | None = None  # time limit; None takes the profile's


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A task whose config is read and checked.

    It goes through the batch scripts in `submission.scripts`; where there are none, NeMo-Run starts its steps.
    """

    task: Task | Program
    steps: Sequence[Step]
    submission: Submission | None  # None for a program
    why: str = ""  # the reason why it goes through batch scripts of `megatron-rl submit`
    slices: int = 1


def load(path: Path, options: Options) -> Experiment:
    """Returns the experiment that `experiment(options)` of a Python file returns. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(
            f"no definition {path}: give a Python file with a function experiment(options), "
            "such as examples/nemo_run/sweep.py"
        )
    spec = importlib.util.spec_from_file_location(f"definition_{path.stem}", path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file: a definition is one with a function experiment(options)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their modules up there
    spec.loader.exec_module(module)
    if "experiment" not in vars(module):
        raise ConfigError(f"{path} has no function experiment(options)")
    experiment = module.experiment(options)
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"{path}: experiment(options) returned {type(experiment).__name__}; return an experiments.Experiment"
        )
    _check_names(experiment, path)
    return experiment


def with_overrides(experiment: Experiment, words: Sequence[str]) -> Experiment:
    """Returns the experiment with further settings, TASK.a.b=c, after those of its tasks. Raises ConfigError."""
    settings = {task.name: list(task.settings) for task in experiment.tasks if isinstance(task, Task)}
    for word in words:
        name, dot, setting = word.partition(".")
        if not dot or "=" not in setting or name not in settings:
            raise ConfigError(f"{word!r}: give TASK.a.b=c, with a task of {', '.join(settings)}")
        settings[name].append(setting)
    tasks = [
        replace(task, settings=settings[task.name]) if isinstance(task, Task) else task for task in experiment.tasks
    ]
    return replace(experiment, tasks=tasks)


def for_local(experiment: Experiment) -> list[Planned]:
    """Plans the tasks on this machine: configs as they are, on launch.nproc ranks. Raises ConfigError."""
    plans: list[Planned] = []
    steps: dict[str, list[str]] = {}
    for task in experiment.tasks:
        awaited = [step for name in task.after for step in steps[name]]
        with _named(task):
            planned = _program(task, awaited) if isinstance(task, Program) else _on_this_machine(task, awaited)
        steps[task.name] = [step.name for step in planned.steps]
        plans.append(planned)
    return _apart(plans)


def for_slurm(experiment: Experiment, site: Profile) -> list[Planned]:
    """Plans the tasks on a cluster. Raises ConfigError.

    One job goes through NeMo-Run; an array, and what comes after one, goes through batch scripts.
    """
    plans: list[Planned] = []
    reasons: dict[str, str] = {}  # task -> why it goes through slurm/
    for task in experiment.tasks:
        behind = next((name for name in task.after if name in reasons), None)
        if isinstance(task, Program):
            if behind is not None:
                raise ConfigError(
                    f"task {task.name!r}: a program cannot wait for {behind!r}, "
                    f"which {reasons[behind]}; let it come before"
                )
            plans.append(_program(task, task.after))
            continue
        with _named(task):
            planned = _on_cluster(task, site, f"comes after {behind!r}" if behind else "")
        if planned.why:
            reasons[task.name] = planned.why
        plans.append(planned)
    return _apart(plans)


def _on_cluster(task: Task, site: Profile, why: str) -> Planned:
    """Plans one task. `why`: the reason why it goes through slurm/ in any case; empty: its shape decides."""
    config = _read(task)
    slices = 1
    if isinstance(config, EvalConfig):
        submission = submit.plan_eval([config], site, _directory(config))
        files = {CONFIG: submission.files["000.yaml"]}
    elif task.points:
        submission = submit.plan_sweep(
            config,
            [(point, _read(task, point)) for point in task.points],
            site,
            command=task.command,
            to_come=bool(task.after),
        )
        files = {}
        why = f"is a sweep of {len(task.points)} runs, an array"
    else:
        submission = submit.plan_run(config, site, command=task.command, to_come=bool(task.after))
        files, slices = {CONFIG: submission.files[CONFIG]}, config.job.slices
        if slices > 1:
            why = f"is a chain of {slices} slices, an array"
        elif len(submission.scripts) > 1:
            why = "has engines beside its trainer, an array"
    if why:
        return Planned(task=task, steps=[], submission=submission, why=why, slices=slices)
    return replace(
        _single(task, config, task.after),
        submission=Submission(submission.directory, files, [], placement=submission.placement),
    )


def _single(task: Task, config: Any, awaited: Sequence[str]) -> Planned:
    directory = _directory(config)
    words = [
        *_megatron_rl(task, directory / submit.JOBS / CONFIG),
        *(["--skip-done"] if task.command == "eval" else []),
    ]
    job = None if isinstance(config, EvalConfig) else config.job
    step = Step(
        name=task.name, words=words, after=awaited, directory=directory, nodes=job.nodes if job else 1,
        time=job.time if job else None,
    )  # fmt: skip
    return Planned(task=task, steps=[step], submission=Submission(directory, {CONFIG: config_files.dump(config)}, []))


def _on_this_machine(task: Task, awaited: Sequence[str]) -> Planned:
    config = _read(task)
    if not task.points:
        resolve(config, config.launch.nproc, to_come=bool(task.after))
        return _single(task, config, awaited)
    points = [(point, _read(task, point)) for point in task.points]
    configs, listing = submit.sweep_configs(config.directory.absolute(), points)
    for swept in configs:
        resolve(swept, swept.launch.nproc, to_come=bool(task.after))
    # with these files `megatron-rl status` and `report` know the sweep
    files = {f"{swept.run.name}.yaml": config_files.dump(swept) for swept in configs} | {f"../{SWEEP}": listing}
    directory = _directory(config)
    steps = [
        Step(
            name=f"{task.name}_{swept.run.name}", after=awaited, directory=directory / swept.run.name,
            words=_megatron_rl(task, directory / submit.JOBS / f"{swept.run.name}.yaml"),
        )
        for swept in configs
    ]  # fmt: skip
    return Planned(task=task, steps=steps, submission=Submission(directory, files, []))


def _program(task: Program, awaited: Sequence[str]) -> Planned:
    return Planned(task=task, steps=[Step(name=task.name, words=task.words, after=awaited)], submission=None)


def _megatron_rl(task: Task, config: Path) -> list[str]:
    return ["-m", "megatron_rl.main", task.command, str(config)]


def _read(task: Task, point: Mapping[str, Any] | None = None) -> Any:
    """Reads the config of a task, or of one point of its sweep."""
    if task.command not in SCHEMAS:
        raise ConfigError(f"command {task.command!r}: give one of {', '.join(SCHEMAS)}")
    if task.points and task.command == "eval":
        raise ConfigError("a sweep is of train or sft: give evaluations a task each")
    files, assignments = [Path(s) for s in task.settings if "=" not in s], [s for s in task.settings if "=" in s]
    return config_files.load(SCHEMAS[task.command], files, [*assignments, *submit.overrides(point or {})])


def _directory(config: Any) -> Path:
    if isinstance(config, EvalConfig) and config.output is None:
        raise ConfigError("no output: give a JSON file in a directory of its own")
    return config.directory.absolute()


@contextlib.contextmanager
def _named(task: Task | Program) -> Iterator[None]:
    """Puts the task's name before the block's errors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from error


def _apart(planned: list[Planned]) -> list[Planned]:
    """Raises ConfigError for two tasks in one directory, where each has its jobs/."""
    owners: dict[Path, str] = {}
    for plan in planned:
        if plan.submission is None:
            continue
        if plan.submission.directory in owners:
            both = f"{owners[plan.submission.directory]!r} and {plan.task.name!r}"
            raise ConfigError(
                f"tasks {both} both have the directory {plan.submission.directory}: "
                "give each a run.name, or an output, of its own"
            )
        owners[plan.submission.directory] = plan.task.name
    return planned


def _check_names(experiment: Experiment, path: Path) -> None:
    above: list[str] = []
    for task in experiment.tasks:
        if not task.name.replace("_", "").isalnum() or task.name in above:
            raise ConfigError(f"{path}: task {task.name!r}: give each task a name of its own, of letters, digits and _")
        for name in task.after:
            if name not in above:
                raise ConfigError(
                    f"{path}: task {task.name!r} waits for {name!r}, which is none of the tasks above it: {above}"
                )
        above.append(task.name)
    if not above:
        raise ConfigError(f"{path}: an experiment without tasks")
