"""Implementation of `megatron-rl submit`, `doctor`, `status`, `stop`, `logs` and `slice`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from megatron_rl.commands.settings import load
from megatron_rl.config.base import refuse
from megatron_rl.config.schema import ConfigError, GenerateConfig, SftConfig, TrainConfig


def run(args: argparse.Namespace) -> int:
    """Runs the command `submit`, `doctor`, `status`, `stop`, `logs` or `slice`. Returns the exit status: 1 if a Slurm
    command fails. Raises ConfigError for arguments or a config that cannot be used."""
    from megatron_rl.jobs.slurm_commands import SlurmError

    try:
        calls = {"submit": _submit, "doctor": _doctor, "status": _status, "stop": _stop, "logs": _logs, "slice": _slice}
        return calls[args.command](args)
    except SlurmError as error:
        print(f"megatron-rl {args.command}: {error}", file=sys.stderr)
        return 1


def _submit(args: argparse.Namespace) -> int:
    from megatron_rl.cluster import job_slices
    from megatron_rl.jobs import slurm_commands, submit
    from megatron_rl.spec import explain, missing_files, resolve

    submission, run = _planned(args)
    left_out = ", ".join(slurm_commands.left_out(os.environ)) or "nothing"
    notes = [*submission.placement]
    notes += [f"left out of this shell's environment (the profile's `environment` is for what jobs need): {left_out}"]
    if run is not None:
        spec = resolve.specify(run, 1)[0]
        notes += [f"note: {note}" for note in [*missing_files.absent_files(spec), *explain.float32_notes(spec)]]
    if args.dry_run:
        for name in submission.scripts:
            print(f"# ---- {submission.directory}/{submit.JOBS}/{name}\n{submission.files[name]}")
        print("\n".join(f"# ---- {note}" for note in notes))
        if submission.finished or run and run.run.resume != "must" and job_slices.finished(submission.directory):
            print(f"# ---- {submission.directory} is finished: `submit` will refuse it")
        return 0
    submit.write(submission)
    if run is not None:
        submit.reopen(run.run)
    for name, job in submit.send(submission).items():
        print(f"submitted {submission.directory}/{submit.JOBS}/{name}: job {job}")
        print("  " + " ".join(re.findall(r"^#SBATCH (.*)$", submission.files[name], re.MULTILINE)))
    print(*notes, sep="\n")
    print(f"megatron-rl status {submission.directory}\nmegatron-rl stop {submission.directory}")
    return 0


def _planned(args: argparse.Namespace) -> tuple[Any, TrainConfig | SftConfig | None]:
    """Returns (Slurm submission that the arguments request, config of the run). The config is None unless a single run
    of `train` or `sft` is submitted."""
    from megatron_rl.cluster import profile
    from megatron_rl.jobs import submit

    if sum((args.checkpoints is not None, args.sweep is not None, args.shape == "roles")) > 1:
        raise ConfigError("--checkpoints, --sweep and --shape roles are three kinds of submission: give one of them")
    site = profile.read(args.profile)
    if args.checkpoints:
        return submit.plan_eval(submit.evaluations(args.settings, args.checkpoints, args.out), site, args.out), None
    command, config = load(args.settings)
    if isinstance(config, GenerateConfig) and not (args.sweep or args.shape == "roles"):
        return submit.plan_generate(config, site), None
    if not isinstance(config, TrainConfig | SftConfig):
        cure = {"generate": "leave out --sweep and --shape", "eval": "give --checkpoints to submit evaluations"}
        raise ConfigError(f"this is a config of `{command}`, which is one job: {cure[command]}")
    if args.sweep:
        grid = submit.read_grid(args.sweep)
        points = [(point, load([*args.settings, *submit.overrides(point)])[1]) for point in grid]
        return submit.plan_sweep(config, points, site, command=command), None
    return submit.plan_run(config, site, command=command, as_roles=args.shape == "roles"), config


def _doctor(args: argparse.Namespace) -> int:
    """Implements `megatron-rl doctor`: runs checks of the cluster and prints their results. Returns 1 if a check fails,
    otherwise 0. Raises ConfigError for a recipe that cannot be built."""
    from rich.console import Console

    from megatron_rl.cluster import profile
    from megatron_rl.jobs import doctor
    from megatron_rl.spec.resolve import specify

    site = profile.read(args.profile) if args.profile else None
    spec = None
    if args.settings:
        config = load(args.settings)[1]
        spec, problems = specify(config, config.launch.nproc)
        refuse(*problems)
    checks = doctor.examine(spec, site, quick=args.quick, environment=os.environ)
    checks += doctor.smoke(Path("gpu_smoke.json")) if args.gpu else []
    doctor.show(
        checks, Console(width=None if sys.stdout.isatty() else 180), only_wrong=args.quick, environment=os.environ
    )
    return 1 if any(check.verdict == "wrong" for check in checks) else 0


def _status(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_rl.jobs import status

    console = Console(width=None if sys.stdout.isatty() else 160)
    runs = status.sweep_status(args.run)
    if runs is not None:
        status.show_sweep(runs, console)
    else:
        status.show(status.read(args.run), console)
    return 0


def _stop(args: argparse.Namespace) -> int:
    from megatron_rl.jobs import status

    print(status.stop(args.run, now=args.now))
    return 0


def _logs(args: argparse.Namespace) -> int:
    from megatron_rl.jobs import status

    for line in status.tails(args.run, args.of, args.lines):
        print(line)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends --follow
        for line in status.follow(args.run, args.of) if args.follow else ():
            print(line, flush=True)
    return 0


def _slice(args: argparse.Namespace) -> int:
    """Implements `megatron-rl slice` for slurm/job.sh.

    slurm/job.sh calls this command at the start and the end of a job. Depending on the argument, prints:
    - `where`: the run directory;
    - `over`: whether the run is over;
    - `begin`, `end`: the next action of the job and the reason for the action."""
    from megatron_rl.cluster import job_slices
    from megatron_rl.cluster.slurm_job import job_from

    config = load(args.settings)[1]
    directory = config.directory.absolute()
    if args.what == "where":
        print(directory)
        return 0
    if args.what == "over":
        print("over" if job_slices.over(directory) else "goes on")
        return 0
    job = job_from(os.environ)
    if job is None:
        raise ConfigError(f"slice {args.what} is for a batch script: there is no SLURM_JOB_ID here")
    if args.what == "begin":
        action, why = job_slices.begin(directory, job, os.environ.get("SLURM_JOB_NODELIST", ""), config.job.stalled)
    else:
        action, why = job_slices.end(directory, job, args.status)
    print(f"{action}: {why}")
    return 0
