"""The commands `megatron-rl status`, `stop` and `logs`, which read the run directory and Slurm's queue."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_rl.cluster import job_slices
from megatron_rl.cluster.job_slices import Slice
from megatron_rl.cluster.slurm_job import STOP
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, GenerateConfig
from megatron_rl.engines.server_registry import Listing, ServerRegistry
from megatron_rl.jobs import slurm_commands
from megatron_rl.jobs.submit import JOBS, jobs_of, read_sweep, runs_of
from megatron_rl.lib.regular_files import touch
from megatron_rl.run.metrics import MetricsRow, failures_text, unlearned
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.session import generation_progress
from megatron_rl.session.run_record import RunRecord
from megatron_rl.session.server_connection import ENGINES

RECENT = 10  # number of last iterations over which the median of the seconds per iteration is taken
# Seconds between two reads of the files in which servers are registered; a running server renews its file every second
LOOK_S = 2.5
FOLLOW_S = 1.0  # seconds between two reads of the logs for `follow`
SHOWN = ("update", "staleness", "version_lag", "skipped", "rests", "loss", "length")  # metrics of a role that are shown
REWARD = "reward/"
NO_JOBS = "no Slurm job of it waits or runs"
# Names of the batch scripts of training runs, which have iterations
RUNS = ("train.sbatch", "roles.sbatch", "sweep.sbatch")
# Names of the batch scripts for SFT data and for evaluations. Jobs of these scripts have no iterations.
DATA, EVALUATIONS = "generate.sbatch", "eval.sbatch"


@dataclass(frozen=True, kw_only=True)
class Status:
    """The progress, jobs and engines of a run at one time."""

    directory: Path
    iterations: int  # number of iterations in the metrics
    planned: int | None  # number of iterations of the whole run; None if the run has not recorded it yet
    saved: int  # number of training iterations done at the newest complete checkpoint
    seconds_per_iteration: float | None
    last: Mapping[str, MetricsRow]  # {scope: its newest metrics line}
    slices: Sequence[Slice]  # starts of the run
    engines: Sequence[tuple[Listing, bool]]  # (registry entry of a server, whether the server is running)
    jobs: Sequence[slurm_commands.Queued]
    state: str  # finished, running, waiting for nodes, failed, stopped, or the reason why the state is unknown
    failed: str | None = None  # reason why the last start failed
    damage: Sequence[str] = ()  # error messages about files that could not be read completely
    # a sentence for each scope whose metrics count replaced samples or cut off gradings, over all iterations
    failures: Sequence[str] = ()
    unlearned: Sequence[str] = ()  # a sentence for each trained role that had iterations but no weight update
    best: Sequence[Mapping[str, Any]] = ()  # see RunRecord.best
    # the progress as text if the jobs make SFT data or evaluations, which have no iterations; None for a training run
    answered: str | None = None


def read(directory: Path, *, look_s: float = LOOK_S, jobs: Sequence[slurm_commands.Queued] | None = None) -> Status:
    """Returns the status of a run.

    `look_s`: seconds to wait, if the run has servers, to see which servers renew their registry files.
    `jobs`: the run's pending and running jobs. If None, Slurm is queried.

    Raises ConfigError if `directory` is not a run directory.
    """
    run_directory = RunDirectory(directory)
    if not (run_directory.config.exists() or (directory / "jobs").exists()):
        raise ConfigError(f"{directory} is no run directory: it has neither config.yaml nor jobs/")
    record = RunRecord(directory)
    rows = [row for row in record.metrics() if row.scope != "preflight"]
    iterations = [row for row in rows if row.scope != "eval"]
    summary, trouble = record.summary(), ""
    planned, failed = summary.get("planned"), summary.get("failed")
    try:
        jobs = slurm_commands.queue(jobs_of(directory)) if jobs is None else jobs
    # e.g. slurmctld is busy: the rest of the status is still known, because it comes from the directory
    except slurm_commands.SlurmError as error:
        jobs, trouble = [], f"what its jobs do is not known ({error})"
    state = _state(directory, jobs, trouble)
    alive = state not in (NO_JOBS, "stopped", "failed")
    recent = [sum(row.time.values()) for row in iterations[-RECENT:]]
    updates = {row.scope: row.metrics["update"] for row in iterations if "update" in row.metrics}
    counts = {role: len({row.iteration for row in iterations if row.scope == role}) for role in updates}
    return Status(
        directory=directory,
        iterations=max((row.iteration + 1 for row in iterations), default=0),
        planned=planned if isinstance(planned, int) else None,
        saved=job_slices.iterations_done(directory),
        seconds_per_iteration=median(recent) if recent else None,
        last={row.scope: row for row in rows},
        slices=_with_accounting(job_slices.read(directory, alive=alive), jobs_of(directory)),
        engines=_engines(directory, look_s),
        jobs=jobs,
        state=state,
        failed=failed if isinstance(failed, str) else None,
        damage=record.damage,
        failures=_failures(rows),
        unlearned=unlearned(counts, updates),
        answered=_answered(directory),
        best=record.best(),
    )


def show(status: Status, console: Console) -> None:
    """Prints the status as lines and tables."""
    planned = "" if status.planned is None else f" of {status.planned}"
    iterations = f"{status.iterations}{planned} iterations, {status.saved} saved"
    if status.seconds_per_iteration is not None and status.state != "finished":
        iterations += f"; {status.seconds_per_iteration:.1f} s an iteration"
        if status.planned is not None:
            left_s = (status.planned - status.iterations) * status.seconds_per_iteration
            iterations += f", {left_s / 3600:.1f} h to go" if left_s >= 3600 else f", {left_s / 60:.0f} min to go"
    console.print(
        f"[bold]{escape(str(status.directory))}[/]: {escape(f'{status.state}; {status.answered or iterations}')}"
    )
    if status.failed:
        console.print(f"[red]its last start failed[/]: {escape(status.failed)}")
    for sentence in status.damage:
        console.print(f"[red]damaged[/]: {escape(sentence)}")
    if status.jobs:
        rows = [(j.id, j.name, j.state.lower(), j.nodes or j.reason, j.time_left) for j in status.jobs]
        console.print(_table("jobs", ("job", "name", "state", "nodes, or why it waits", "time left"), rows))
    if status.engines:
        rows = [
            (e.name, "lives" if lives else Text("silent", style="red"), e.node, e.job, e.url, e.incarnation[:8])
            for e, lives in status.engines
        ]
        console.print(_table("engines", ("engine", "", "node", "job", "address", "incarnation"), rows))
    if status.slices:
        rows = []
        for start in status.slices:
            try:
                began = time.strftime("%m-%d %H:%M:%S", time.localtime(start.began))
            except (OverflowError, ValueError, OSError):  # the record is damaged
                began = "?"
            last = "?" if start.iterations_after is None else start.iterations_after
            cause = start.cause or "it runs, or has just ended"
            rows.append((start.job, start.restart, start.nodes, began, f"{start.iterations_before} to {last}", cause))
        console.print(_table("starts", ("job", "restart", "nodes", "began", "iterations", "ended by"), rows))
    for sentence in (*status.unlearned, *status.failures):
        console.print(f"[red]{escape(sentence)}[/]")
    for entry in status.best:
        place = entry["models"] or "the model that the run was given"
        value = f"{entry['metric']} {entry['value']:.4g}"
        console.print(escape(f"best after iteration {entry['iteration']}: {value}: {place}"))
    for scope, row in status.last.items():
        chosen = {name: value for name, value in row.metrics.items() if name in SHOWN or name.startswith(REWARD)}
        chosen |= {name: value for name, value in row.metrics.items() if "accuracy" in name or "reward_" in name}
        if chosen:
            place = f"at iteration {row.iteration + 1} (cycle {row.cycle + 1})"
            place = f"after iteration {row.iteration}" if scope == "eval" else place
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in chosen.items())
            console.print(escape(f"{scope} {place}: {metrics}"))


def stop(directory: Path, *, now: bool) -> str:
    """Asks a run to save and exit after the current iteration, and cancels the run's pending jobs. Returns a line to
    print.

    `now`: cancel the running jobs, too. Jobs that make SFT data or evaluations are always cancelled at once. Raises
    ConfigError if `directory` does not exist, and SlurmError if a Slurm command fails.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no run directory")
    for run in runs_of(directory):
        run.mkdir(exist_ok=True)  # a run of a sweep may not have begun yet
        touch(run / STOP)
    if _has_answers_alone(directory):
        return f"{directory}: {_cancel_answers(directory)}"
    slurm_commands.cancel(jobs_of(directory), pending=not now)
    if now:
        saved = ", ".join(str(job_slices.iterations_done(run)) for run in runs_of(directory))
        return f"{directory}: its jobs are cancelled; the newest checkpoint has {saved} iterations"
    return (
        f"{directory}: it saves and leaves after the iteration at hand (--now: at once); "
        "the same command, or `megatron-rl submit` of the same config, goes on"
    )


def _has_answers_alone(directory: Path) -> bool:
    """Returns whether all jobs of the directory make SFT data or evaluations. Such jobs have no iterations and no
    checkpoints."""
    scripts = {path.name for path in (directory / JOBS).glob("*.sbatch")}
    return bool(scripts & {DATA, EVALUATIONS}) and not scripts & {*RUNS}


def _cancel_answers(directory: Path) -> str:
    """Cancels the jobs of SFT data or evaluations. Answers that are being generated are lost. Returns the end of the
    line that `stop` prints."""
    goes_on = "finished parts of the answers are kept, and `megatron-rl submit` of the same config goes on after them"
    if not slurm_commands.present():
        return f"there is no Slurm here to cancel its jobs with; they are not queued again; {goes_on}"
    if not slurm_commands.queue(jobs_of(directory)):
        return NO_JOBS
    slurm_commands.cancel(jobs_of(directory))
    return f"its jobs are cancelled; {goes_on}"


def _answered(directory: Path) -> str | None:
    """Returns the progress of SFT data or evaluations as text. Returns None if the directory belongs to a training
    run."""
    if not _has_answers_alone(directory):
        return None
    states = []
    if (directory / JOBS / DATA).exists():
        parts = len([*(directory / generation_progress.PARTS).glob("*.json")])
        states.append("its SFT data are complete" if _complete(directory) else f"parts of its answers written: {parts}")
    if (directory / JOBS / EVALUATIONS).exists():
        outputs = [_output(path) for path in (directory / JOBS).glob("[0-9]*.yaml")]
        have = sum(path is not None and path.exists() for path in outputs)
        states.append(f"{have} of {len(outputs)} evaluations have their results")
    return "; ".join(states)


def _complete(directory: Path) -> bool:
    """Returns whether the SFT data of the config that was submitted last are complete."""
    try:
        config = config_files.load(GenerateConfig, [directory / JOBS / "config.yaml"])
    except ConfigError:
        return False
    return generation_progress.finished({**config_files.tree_of(config), "output": str(directory)})


def _output(config: Path) -> Path | None:
    """Returns the output file of an evaluation's config; None if the config cannot be read or has no output."""
    try:
        settings = config_files.read_yaml(config)
    except ConfigError:
        return None
    return Path(settings["output"]) if isinstance(settings, Mapping) and settings.get("output") else None


def log_files(directory: Path) -> list[Path]:
    """Returns the run's log files, the most recently changed one last. Raises ConfigError if there is no directory
    logs/."""
    if not (directory / "logs").is_dir():
        raise ConfigError(f"{directory} is no run directory: it has no logs/")
    paths = [
        path for path in (directory / "logs").glob("*") if path.is_file() and path.suffix in (".out", ".log", ".txt")
    ]
    return sorted(paths, key=lambda path: path.stat().st_mtime)


def tails(directory: Path, pattern: str, lines: int) -> Iterator[str]:
    """Yields the last `lines` lines of every log file with `pattern` in its name. The lines of a file are preceded by a
    line with the file's path.
    """
    for path in log_files(directory):
        if pattern in path.name:
            yield f"==> {path} <=="
            yield from path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if lines else ()


def follow(directory: Path, pattern: str) -> Iterator[str]:
    """Yields new lines of the logs with `pattern` in their names as they are written, until the run has ended."""
    places = {path: path.stat().st_size for path in log_files(directory)}
    while True:
        for path in log_files(directory):
            if pattern in path.name:
                with path.open("r", encoding="utf-8", errors="replace") as file:
                    file.seek(places.get(path, 0))
                    yield from (f"{path.stem}: {line.rstrip()}" for line in file)
                    places[path] = file.tell()
        if job_slices.over(directory):
            return
        time.sleep(FOLLOW_S)


def sweep_status(directory: Path) -> list[tuple[str, str, Status | None]] | None:
    """Returns [(name, changed settings, status)] of the runs of a sweep, or None if `directory` does not belong to a
    sweep.

    The status of a run that has not begun is None.
    """
    points = read_sweep(directory)
    if points is None:
        return None
    jobs, statuses = slurm_commands.queue(jobs_of(directory)), []
    for index, point in enumerate(points):
        run_directory = directory / point["run"]
        changes = ", ".join(f"{name}={value}" for name, value in point["changes"].items())
        element = [j for j in jobs if j.id.endswith(f"_{index}") and j.name.endswith("-sweep")]  # no engine jobs
        begun = RunDirectory(run_directory).config.exists()
        statuses.append((point["run"], changes, read(run_directory, look_s=0, jobs=element) if begun else None))
    return statuses


def show_sweep(runs: Sequence[tuple[str, str, Status | None]], console: Console) -> None:
    """Prints a table with one row for each run of a sweep. `runs`: the result of `sweep_status`."""
    rows = []
    for run, changes, status in runs:
        done = "" if status is None else f"{status.iterations}" + (f" of {status.planned}" if status.planned else "")
        rows.append((run, changes, "not begun" if status is None else status.state, done))
    console.print(_table("sweep", ("run", "settings", "", "iterations"), rows))


def _failures(rows: Sequence[MetricsRow]) -> list[str]:
    """Returns a sentence for each scope with replaced samples or cut off gradings. `rows`: all metrics of the run."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        sums[row.scope].update(row.metrics)
    return [f"{scope}: {text}" for scope, counts in sums.items() if (text := failures_text(counts))]


def _engines(directory: Path, look_s: float) -> list[tuple[Listing, bool]]:
    """Returns [(listing, whether the server renewed its listing within `look_s` seconds)] of the run's servers."""
    registry = ServerRegistry(directory / ENGINES, directory.stat().st_uid)  # the run may belong to another user
    beats = {(listing.name, listing.incarnation): listing.beat for listing in registry.all()}
    if not beats:
        return []
    time.sleep(look_s)
    return [(listing, beats.get((listing.name, listing.incarnation)) != listing.beat) for listing in registry.all()]


def _with_accounting(starts: Sequence[Slice], jobs: Sequence[str]) -> list[Slice]:
    """Returns the starts of a run. For a start that recorded no cause of its end, the cause is taken from Slurm's
    accounting database, if the database has the cause."""
    causes = slurm_commands.accounted(jobs) if any(start.cause == job_slices.SILENT for start in starts) else {}
    return [
        replace(start, cause=f"{causes[start.job, start.restart]} (sacct)")
        if start.cause == job_slices.SILENT and (start.job, start.restart) in causes
        else start
        for start in starts
    ]


def _state(directory: Path, jobs: Sequence[slurm_commands.Queued], trouble: str) -> str:
    if job_slices.finished(directory):
        return "finished"
    if any(job.state == "RUNNING" for job in jobs):
        return "running"
    if jobs:
        return "waiting for nodes"
    if trouble:
        return trouble
    if RunRecord(directory).failed() is not None:
        return "failed"
    if (directory / STOP).exists():
        return "stopped"
    return NO_JOBS if slurm_commands.present() else "no Slurm here to ask for its jobs"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table
