#!/usr/bin/env python3
"""Runs an experiment, a graph of megatron-rl's commands written in Python, by NeMo-Run: here, or on a Slurm cluster.

    make nemo-run      # once: NeMo-Run in an environment of its own
    .venv-nemo/bin/python tools/launch.py examples/nemo_run/sft_tango_eval.py --small
    .venv-nemo/bin/python tools/launch.py examples/nemo_run/sft_tango_eval.py --executor slurm --profile a100 --dryrun
    .venv-nemo/bin/python tools/launch.py examples/nemo_run/sweep.py rates.run.iterations=20 --executor slurm --wait

Every task's config is resolved first and written to RUN/jobs, as `megatron-rl submit` does; the tasks run with the
profile's python. On Slurm an array, and what comes after one, goes through the batch scripts of `megatron-rl submit`:
NeMo-Run would wait for an array for ever. The same command goes on where it stood (docs/how_to/nemo_run.md).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))  # the project is not installed beside NeMo-Run

from experiments import (  # noqa: E402
    Experiment,
    Options,
    Planned,
    Step,
    Task,
    for_local,
    for_slurm,
    load,
    with_overrides,
)

from megatron_rl.cluster import job_slices, profile  # noqa: E402
from megatron_rl.cluster.profile import Profile  # noqa: E402
from megatron_rl.config.schema import ConfigError  # noqa: E402
from megatron_rl.jobs import slurm_commands, submit  # noqa: E402
from megatron_rl.jobs.batch_script import common_settings  # noqa: E402

DONE, LOST = "SUCCEEDED", "NOT STARTED"  # states of a local task: NeMo-Run's word, and ours
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
)
DRY = "dryrun"
SRUN = """\
unset SLURM_UNBUFFEREDIO  # srun would give the tasks a terminal, and their logs a live table
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since Slurm 22.05 srun does not take it from the job by itself"""
TAKEN = "/nemo_run"  # NeMo-Run replaces this by the job's directory, wherever it stands in a batch script


def main(argv: Sequence[str] | None = None) -> int:
    """Launches an experiment.

    Returns 0 (all tasks succeeded or were submitted), 1 (one failed) or 2 (wrong definition, config or arguments).
    """
    args = _parser().parse_intermixed_args(argv)
    nemo_words = [args.experiment, *args.settings]
    files = [word for word in nemo_words if word.endswith(".py") and "=" not in word]
    try:
        if len(files) != 1:
            raise ConfigError(f"give one definition, a .py file; this has {len(files)}")
        site = profile.read(args.profile or {"local": "cpu", "slurm": "a100"}[args.executor])
        experiment = load(Path(files[0]), Options(small=args.small, dir=args.dir))
        experiment = with_overrides(experiment, [word for word in nemo_words if word not in files])
        return _local(experiment, site, args) if args.executor == "local" else _slurm(experiment, site, args)
    except ConfigError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    except slurm_commands.SlurmError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "experiment", metavar="DEFINITION.py", help="with a function experiment(options), as in examples/nemo_run"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="TASK.a.b=c", help="settings of its tasks, over those of the definition"
    )
    parser.add_argument(
        "--executor", choices=("local", "slurm"), default="local", help="where tasks run (default: %(default)s)"
    )
    parser.add_argument(
        "--profile",
        help="the site: a name in slurm/profiles, or a YAML file (default: cpu; with --executor slurm a100)",
    )
    parser.add_argument(
        "--dryrun", action="store_true", help="print commands and batch scripts; write, start and submit nothing"
    )
    parser.add_argument("--small", action="store_true", help="take the definition's laptop size")
    parser.add_argument("--dir", default="runs", help="directory of the runs (default: %(default)s)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="local: number of tasks at a time (default: %(default)s)"
    )
    parser.add_argument("--wait", action="store_true", help="slurm: stay until all jobs have ended, and say how")
    parser.add_argument(
        "--every",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time between two looks of --wait (default: %(default)s)",
    )
    return parser


def _nemo_run() -> Any:
    try:
        import nemo_run
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable} has no NeMo-Run ({error}): `make nemo-run`, then .venv-nemo/bin/python tools/launch.py"
        ) from error
    return nemo_run


def _local(experiment: Experiment, site: Profile, args: argparse.Namespace) -> int:
    if site.setup or site.container:
        raise ConfigError(
            "setup and container of a profile are for batch scripts: with --executor local do these in your shell"
        )
    if args.at_once < 1:
        raise ConfigError(f"--at-once {args.at_once}: give 1 or more")
    planned = for_local(experiment)
    python = common_settings(site)["PYTHON"]
    if args.dryrun:
        for step in (step for plan in planned for step in plan.steps):
            print(f"# {step.name}{_behind(step.after)}\n{shlex.join([str(python), *step.words])}")
        return 0
    nemo = _nemo_run()
    with _Forwarded() as signals:
        states = _run_steps(
            nemo,
            experiment.name,
            [step for plan in planned for step in _written(plan)],
            site,
            at_once=args.at_once,
            signals=signals,
        )
    for name, state in states.items():
        print(f"{name}: {state}")
    return 128 + signals.number if signals.number else int(set(states.values()) != {DONE})


class _Forwarded:
    """A block whose SIGINT and SIGTERM go on to the tasks, which save and leave; NeMo-Run waits for them.

    `number` is the last signal, or 0.
    """

    def __enter__(self) -> _Forwarded:
        self.number = 0
        self._before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)


def _run_steps(
    nemo: Any, name: str, steps: Sequence[Step], site: Profile, *, at_once: int, signals: _Forwarded
) -> dict[str, str]:
    """Runs the steps and returns their states. After a signal nothing is started.

    Every NeMo-Run experiment has only what is ready and fits: given the whole graph, NeMo-Run's local executor would
    start a task although one before it failed.
    """
    python, states = str(common_settings(site)["PYTHON"]), dict[str, str]()
    waiting = {step.name: step for step in steps}
    while waiting:
        for step in steps:
            if step.name in waiting and (
                signals.number or any(states.get(awaited, DONE) != DONE for awaited in step.after)
            ):
                states[step.name] = LOST
                del waiting[step.name]
        ready = [step for step in waiting.values() if all(awaited in states for awaited in step.after)][:at_once]
        if not ready:
            break
        with nemo.Experiment(name, skip_status_at_exit=True, enable_goodbye_message=False) as running:
            for step in ready:
                executor = nemo.LocalExecutor(packager=nemo.Packager(), env_vars=_environment(site))
                running.add(_script(nemo, [python, *step.words]), executor=executor, name=step.name, tail_logs=True)
                del waiting[step.name]
            running.run()
        states |= {job.id: job.state.name for job in running.jobs}
    return states


def _slurm(experiment: Experiment, site: Profile, args: argparse.Namespace) -> int:
    planned = for_slurm(experiment, site)
    _refuse_taken([step for plan in planned for step in plan.steps], site)
    if args.dryrun:
        _print_scripts(_nemo_run(), experiment.name, planned, site)
        return 0
    slurm_commands.require()
    nemo = _nemo_run()
    for name in (left_out := slurm_commands.left_out(os.environ)):
        del os.environ[name]  # NeMo-Run calls sbatch with this process's environment
    for plan in planned:
        if plan.submission is not None:
            submit.refuse_busy(plan.submission.directory)
    ids = _submit_steps(nemo, experiment.name, [step for plan in planned for step in _written(plan)], site)
    for plan in planned:
        if plan.submission is not None and plan.why:
            print(f"{plan.task.name} {plan.why}: it goes through the batch scripts of `megatron-rl submit`")
            submit.write(plan.submission)
            ids[plan.task.name] = [*submit.send(plan.submission, dependency=_dependency(plan, planned, ids)).values()]
        elif plan.submission is not None:
            submit.record_job(plan.submission.directory, f"{plan.task.name}_sbatch.sh", ids[plan.task.name][0])
    for name, jobs in ids.items():
        print(f"submitted {name}: job {', '.join(jobs)}")
    print(*_placement(planned), f"left out of this shell's environment: {', '.join(left_out) or 'nothing'}", sep="\n")
    return _follow(planned, ids, args.every) if args.wait else 0


def _print_scripts(nemo: Any, name: str, planned: Sequence[Planned], site: Profile) -> None:
    """Prints the batch scripts. NeMo-Run's dry run writes its own to files, which are printed and removed."""
    with nemo.Experiment(name, id=f"{name}_{DRY}", serialize_metadata_for_scripts=False) as dry:
        for step in (step for plan in planned for step in plan.steps):
            dry.add(
                _script(nemo, _slurm_words(step, site)),
                executor=_slurm_executor(nemo, name, step, site),
                name=step.name,
            )
        directories = {job.executor.experiment_dir for job in dry.jobs}
        dry.dryrun(log=False, exist_ok=True, delete_exp_dir=False)
    texts = {
        path.name.removesuffix("_sbatch.sh"): path.read_text()
        for d in directories
        for path in Path(d).glob("*_sbatch.sh")
    }
    for directory in directories:
        shutil.rmtree(directory)
    for plan in planned:
        for step in plan.steps:
            print(f"# ---- {step.name}, by NeMo-Run{_behind(step.after)}\n{texts[step.name]}")
        if plan.submission is not None and plan.why:
            for script in plan.submission.scripts:
                path = f"{plan.submission.directory}/{submit.JOBS}/{script}"
                print(f"# ---- {plan.task.name} {plan.why}: {path}{_behind(plan.task.after)}")
                print(plan.submission.files[script])
    for line in _placement(planned):
        print(f"# ---- {line}")


def _placement(planned: Sequence[Planned]) -> list[str]:
    """Returns the lines on what each node of each run holds, with the tasks' names."""
    submissions = {plan.task.name: plan.submission for plan in planned if plan.submission is not None}
    return [f"{name}: {line}" for name, submission in submissions.items() for line in submission.placement]


def _submit_steps(nemo: Any, name: str, steps: Sequence[Step], site: Profile) -> dict[str, list[str]]:
    """Submits the steps as one NeMo-Run experiment with dependencies. Returns the jobs by task. Raises SlurmError.

    The experiment is not waited for: NeMo-Run would ask sacct, which not every site has.
    """
    if not steps:
        return {}
    from invoke.exceptions import UnexpectedExit  # comes with NeMo-Run, which calls sbatch by it

    with nemo.Experiment(name, skip_status_at_exit=True, enable_goodbye_message=False) as running:
        for step in steps:
            executor = _slurm_executor(nemo, name, step, site)
            running.add(
                _script(nemo, _slurm_words(step, site)),
                executor=executor,
                name=step.name,
                dependencies=list(step.after),
            )
        try:
            running.run(detach=True)
        except UnexpectedExit as error:
            slurm_commands.cancel([_job_id(job) for job in running.jobs if job.handle])
            raise slurm_commands.SlurmError(
                f"{error.result.command}: {error.result.stderr.strip()}; what was submitted before is cancelled"
            ) from error
    return {job.id: [_job_id(job)] for job in running.jobs}


def _slurm_executor(nemo: Any, name: str, step: Step, site: Profile) -> Any:
    """Returns the executor of a step.

    Exports stand in setup_lines, because NeMo-Run writes its env_vars without quotes and in capitals.
    """
    is_program = step.directory is None
    ranks, gpus = (1, 0) if is_program else (site.ranks_per_node, site.gpus_per_node)
    image = site.container if site.container is not None and site.container.runtime == "pyxis" else None
    folder = os.getcwd()  # relative paths of configs count from here; of two such options srun takes the last
    words = [*site.srun, f"--container-workdir={folder}" if image else f"--chdir={folder}"]
    more = {
        "chdir": folder,
        "propagate": "NONE",
        "kill_on_invalid_dep": "yes",
        "qos": site.qos,
        "constraint": site.constraint,
        **_sbatch_words(site),
    }
    if gpus and site.gpu_type:
        more["gpus_per_node"] = f"{site.gpu_type}:{gpus}"
    exports = [f"export {key}={_quoted(value)}" for key, value in site.environment.items()]
    pythonpath = f"export PYTHONPATH={_quoted(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}\n{SRUN}"
    executor = nemo.SlurmExecutor(
        account=site.account, partition=site.partition, time=step.time or site.time, nodes=step.nodes,
        ntasks_per_node=ranks, gpus_per_node=gpus or None, cpus_per_task=site.cpus_per_rank * max(1, gpus // ranks),
        mem=None if is_program else site.memory, exclusive=True if site.exclusive and not is_program else None,
        job_name_prefix=f"{name}.", packager=nemo.Packager(), container_image=image.image if image else None,
        container_mounts=list(image.mounts) if image else [], srun_args=words,
        additional_parameters={key: value for key, value in more.items() if value is not None},
        tunnel=nemo.LocalTunnel(job_dir=""),
        setup_lines="\n".join([*exports, pythonpath, *site.setup]), poll_estimated_start_time=False,
    )  # fmt: skip
    if step.directory is not None:
        executor.job_details.folder = str(step.directory / "logs")  # where `megatron-rl logs` looks
    return executor


def _sbatch_words(site: Profile) -> dict[str, Any]:
    """Converts the profile's sbatch options for NeMo-Run: --comment=x is {comment: x}, --word is {word: True}."""
    pairs = [word.removeprefix("--").partition("=") for word in site.sbatch]
    return {name.replace("-", "_"): value if equals else True for name, equals, value in pairs}


def _slurm_words(step: Step, site: Profile) -> list[str]:
    """Returns the command's words, quoted, because NeMo-Run puts them into its script as they are."""
    shared = common_settings(site)
    words = [*shared["CONTAINER"], str(shared["PYTHON"]), *step.words]
    return [_quoted(word) for word in words]


def _quoted(word: str) -> str:
    """Quotes a word for bash, in parts where NeMo-Run would change it (TAKEN)."""
    half = TAKEN[: len(TAKEN) // 2]
    return shlex.quote(word).replace(TAKEN, f"{half}''{TAKEN.removeprefix(half)}")


def _refuse_taken(steps: Sequence[Step], site: Profile) -> None:
    """Raises ConfigError for TAKEN in a text that cannot be quoted in parts."""
    texts = [
        os.getcwd(),
        *(str(step.directory) for step in steps if step.directory),
        *site.setup,
        *site.srun,
        *site.sbatch,
    ]
    if wrong := next((text for text in texts if TAKEN in text), None):
        raise ConfigError(
            f"{wrong}: NeMo-Run puts its own directory where a batch script has {TAKEN}; take a path without it"
        )


def _script(nemo: Any, words: Sequence[str]) -> Any:
    return nemo.Script(path=words[1], args=list(words[2:]), entrypoint=words[0])


def _environment(site: Profile) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {**site.environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}


def _written(planned: Planned) -> Sequence[Step]:
    """Writes the task's files and returns its steps."""
    if planned.submission is not None and planned.steps:
        submit.write_files(planned.submission)
        for step in planned.steps:
            if step.directory is not None:
                submit.allow_start(step.directory)
    return planned.steps


def _dependency(plan: Planned, planned: Sequence[Planned], ids: Mapping[str, Sequence[str]]) -> str | None:
    """Returns a task's dependency as sbatch takes it, or None.

    A chain cancels the slices that it does not need, which Slurm takes for a failure. A task after a chain starts after
    any end, and fails where the chain has left no model.
    """
    chains = {candidate.task.name for candidate in planned if candidate.slices > 1}
    return ",".join(f"{'afterany' if name in chains else 'afterok'}:{ids[name][0]}" for name in plan.task.after) or None


def _follow(planned: Sequence[Planned], ids: Mapping[str, Sequence[str]], every_s: float) -> int:
    """Prints what changes until all jobs have ended. Returns 1 when a task did not succeed, else 0."""
    last: dict[str, str] = {}
    states: dict[str, str] = {}
    while True:
        try:
            now = slurm_commands.states([job for jobs in ids.values() for job in jobs])
        except slurm_commands.SlurmError as error:  # slurmctld is busy or away; the jobs are not
            print(f"{time.strftime('%H:%M:%S')} {error}", flush=True)
            time.sleep(every_s)
            continue
        states |= now
        for name, jobs in ids.items():
            text = ", ".join(
                sorted({state.lower() for element, state in states.items() if element.partition("_")[0] in jobs})
            )
            if text != last.get(name):
                last[name] = text
                print(f"{time.strftime('%H:%M:%S')} {name}: {text}", flush=True)
        if all(state in ENDED for state in now.values()):
            break
        time.sleep(every_s)
    bad = [plan.task.name for plan in planned if not _succeeded(plan, ids[plan.task.name], states)]
    print(f"not done: {', '.join(bad)}" if bad else "all tasks are done")
    return 1 if bad else 0


def _succeeded(plan: Planned, jobs: Sequence[str], states: Mapping[str, str]) -> bool:
    if isinstance(plan.task, Task) and plan.submission is not None and plan.task.command != "eval":
        return all(job_slices.finished(run) for run in submit.runs_of(plan.submission.directory))
    return {state for element, state in states.items() if element.partition("_")[0] in jobs} == {"COMPLETED"}


def _behind(awaited: Sequence[str]) -> str:
    """Returns the words on what a step waits for."""
    return f", after {', '.join(awaited)}" if awaited else ""


def _job_id(job: Any) -> str:
    return job.handle.rpartition("/")[2]


if __name__ == "__main__":
    sys.exit(main())
