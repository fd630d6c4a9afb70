"""`megatron-rl submit`: writes the batch scripts of runs, sweeps, SFT data and evaluations, and submits them to
Slurm."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.cluster import job_slices
from megatron_rl.cluster.profile import Profile, interpreter
from megatron_rl.cluster.slurm_job import STOP
from megatron_rl.config import files as config_files
from megatron_rl.config.base import path_problems, refuse
from megatron_rl.config.schema import (
    ConfigError,
    EvalConfig,
    GenerateConfig,
    JobConfig,
    Run,
    Servers,
    SftConfig,
    TrainConfig,
)
from megatron_rl.jobs import site, slurm_commands
from megatron_rl.jobs.batch_script import ScriptShape, common_settings, script
from megatron_rl.jobs.node_placement import ServerJobs, placement, server_jobs
from megatron_rl.run import json_lines
from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.run_directory import SWEEP, RunDirectory, check_start
from megatron_rl.session import generation_progress
from megatron_rl.session.run_record import read_points
from megatron_rl.spec import automatic, server_gpus
from megatron_rl.spec.resolve import resolve
from megatron_rl.spec.run_spec import TrainingSpec

JOBS = "jobs"  # subdirectory of the run directory with batch scripts, configs, and the files SITE and SUBMITTED
# Names of two files: SITE has the cluster's profile, and SUBMITTED has the ids of the submitted jobs.
SITE, SUBMITTED = "site.yaml", "submitted.jsonl"
# Names of two files: TRAINER has the job id of the trainer, and ENGINES has the job id of the engines.
# slurm/job.sh cancels the job in ENGINES when the trainer ends, and starts no engine if the job in TRAINER has ended.
TRAINER, ENGINES = "trainer", "engines"
# Seconds before the time limit at which Slurm sends the warning signal to jobs with servers.
# A server may take 30 s to end, and the warning signal may be up to 30 s late.
ENGINE_WARNING_S = 120
MAX_ELEMENTS = 1000  # maximum number of elements of a job array; Slurm's MaxArraySize is 1001 by default


@dataclass(frozen=True)
class Submission:
    """The files and batch scripts of a run, a sweep, SFT data or an evaluation, ready to be written and submitted."""

    directory: Path  # directory of the run, the sweep, the SFT data or the evaluation
    files: Mapping[str, str]  # {path below directory/jobs: text}
    scripts: Sequence[str]  # names of the batch scripts, in the order of submission
    # {batch script of engines: (batch script of the trainer that they serve, array index of this trainer)}
    # The array index of a trainer is None if the run is not part of a sweep.
    trainers: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    placement: Sequence[str] = ()  # lines about what each node holds, see node_placement.placement
    finished: str | None = None  # error message if the jobs would have nothing to do, otherwise None


def plan_run(
    config: TrainConfig | SftConfig, profile: Profile, *, command: str, as_roles: bool = False, to_come: bool = False
) -> Submission:
    """Returns the submission of a run: a job array with the trainer's consecutive jobs (slices), and a job array of the
    engine servers if the config has servers in separate jobs.

    `command`: train or sft. `as_roles`: put the trainer and the servers into one job array. `to_come`: the models do
    not exist yet, because an earlier job writes them. Raises ConfigError if the config cannot be run on the site.
    """
    config, spec = for_site(config, profile, config.job.nodes * profile.ranks_per_node, to_come=to_come)
    job, directory = config.job, spec.directory.absolute()
    array = f"0-{job.slices - 1}%1" if job.slices > 1 else "0"
    shape = _trainer_shape(spec.cluster.job, profile, template="train", name=config.run.name, array=array, of=directory)
    paths = {"CONFIG": str(directory / JOBS / "config.yaml")}
    settings = {**paths, "WARNING_S": str(shape.warning_s), "COMMAND": command, "PROFILE": str(directory / JOBS / SITE)}
    files = {"config.yaml": config_files.dump(config), SITE: config_files.dump(profile)}
    servers, nodes = server_jobs(spec, profile), placement(spec, profile, array="roles" if as_roles else "engines")
    if as_roles:
        if servers is None or job.nodes > 1 or job.slices > 1:
            raise ConfigError(
                "--shape roles is one array of servers and a trainer, whose elements are alike: set job.nodes=1, "
                "job.slices=1 and an engine whose servers are outside of the trainer's job, or omit --shape"
            )
        roles_shape = replace(shape, template="roles", array=f"0-{servers.number}")
        files["roles.sbatch"] = _script(roles_shape, profile, {**settings, **servers.settings})
        return Submission(directory, files, ["roles.sbatch"], placement=nodes)
    files["train.sbatch"] = _script(shape, profile, settings)
    if servers is None:
        return Submission(directory, files, ["train.sbatch"], placement=nodes)
    files["engines.sbatch"] = _engines_script(servers, job.engine_time, profile, shape, paths)
    trainers = {"engines.sbatch": ("train.sbatch", None)}
    return Submission(directory, files, ["train.sbatch", "engines.sbatch"], trainers, placement=nodes)


def _trainer_shape(
    job: JobConfig, profile: Profile, *, template: str, name: str, array: str, of: Path
) -> ScriptShape:  # fmt: skip
    """Returns the shape of a trainer's job: the resources that its batch script requests. `of`: the run
    directory, to which the logs are written. Raises ConfigError if the time limit is so short that Slurm's warning
    signal would be sent as soon as the job starts."""
    shape = ScriptShape(
        template=template, name=name, nodes=job.nodes, ranks=profile.ranks_per_node, gpus=profile.gpus_per_node,
        time=job.time or profile.time, array=array, warning_s=job.warning_s or profile.warning_s,
        exclusive=profile.exclusive, logs=of / "logs",
    )  # fmt: skip
    check_warning("job.warning_s", shape)
    return shape


def _script(shape: ScriptShape, profile: Profile, settings: Mapping[str, str | Sequence[str]]) -> str:
    """Returns the text of a batch script, with the settings that all templates have, and with `settings`."""
    common = common_settings(profile, Path.cwd())
    return script(shape, profile, {**common, **settings}, Path.cwd())


def _engines_script(
    servers: ServerJobs, time: str | None, profile: Profile, trainer: ScriptShape,
    settings: Mapping[str, str | Sequence[str]],
) -> str:  # fmt: skip
    """Returns the batch script of a run's servers, which is a job array.

    `time`: the time limit of the job; None selects the trainer's time limit. `settings`: additional settings of the
    script, such as CONFIG; the settings of the servers and of all scripts are always included. Raises ConfigError if
    the time limit is invalid or too short.
    """
    shape = replace(
        trainer, template="engines", nodes=1, ranks=1, gpus=servers.gpus, exclusive=False,
        time=time or trainer.time, array=f"0-{servers.number - 1}", warning_s=ENGINE_WARNING_S,
    )  # fmt: skip
    check_warning("the warning of engines (job.engine_time)", shape)
    return _script(shape, profile, {**settings, **servers.settings, "TRAINER": ""})


def for_site(config: Any, profile: Profile, ranks: int, *, to_come: bool = False) -> tuple[Any, Any]:
    """Returns (config adapted to the profile, specification of the adapted config for `ranks` ranks).

    The profile determines the Python interpreter of servers, and the address at which servers of a training run listen.
    Separate jobs start the servers of a training run, unless the servers share the trainer's GPUs. `to_come`: the
    models do not exist yet, because an earlier job writes them. Raises ConfigError if the config cannot be run on the
    site.
    """
    settings = getattr(config, "engine", None)
    if isinstance(settings, Servers) and isinstance(config, TrainConfig):
        settings = replace(settings, start=settings.colocate, host=profile.host)
    elif isinstance(settings, Servers) and getattr(config, "job", JobConfig()).nodes > 1:  # servers of a teacher
        settings = replace(settings, host=profile.host)
    if isinstance(settings, Servers):
        python = settings.python if settings.urls else engine_python(settings, profile)
        config = replace(config, engine=replace(settings, python=python))
    spec = resolve(automatic.chosen(config, ranks), ranks, to_come=to_come)
    refuse(*site.problems(spec, profile))
    if not isinstance(spec, TrainingSpec):
        refuse(*server_gpus.device_problems(spec.engine if profile.gpus_per_node else None, ranks))
        return config, spec
    check_start(config.run, config_files.dump(config))
    # With run.resume = never, a job that Slurm requeues would fail, because the run directory then exists already.
    again = replace(config.run, resume="auto") if config.run.resume == "never" else config.run
    return replace(config, run=again), spec


def check_warning(name: str, shape: ScriptShape) -> None:
    """Raises ConfigError if the time limit is invalid, or so short that the warning would come at the start of the job.
    `name`: the setting that the error message names."""
    limit = limit_seconds(shape.time)
    if limit is not None and shape.warning_s is not None and shape.warning_s >= limit:
        raise ConfigError(
            f"{name}: a warning {shape.warning_s} s before the end of {shape.time} comes at the start: give more time"
        )


def limit_seconds(limit: str) -> int | None:
    """Returns a time limit in seconds, or None for no limit ("unlimited"). Raises ConfigError for an invalid format.

    The formats of sbatch are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    if limit.lower() in ("infinite", "unlimited"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        raise ConfigError(f"time limit {limit!r}: give minutes, HH:MM:SS or D-HH:MM:SS")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def engine_python(engine: Servers, profile: Profile) -> str:
    """Returns the Python interpreter of the engine's environment on a site.

    The profile's setting overrides the config's setting, because a config is independent of the site. If neither is
    set, the interpreter is that of the environment which `make engines` (or `make engines-sglang`) creates. Raises
    ConfigError if servers run in a container and the profile does not name the interpreter in the container.
    """
    if profile.container is not None and profile.engine_python is None:
        raise ConfigError(
            f"the profile has the container {profile.container.image} and no engine_python: name the interpreter in it "
            "that has the engine, such as /opt/vllm/bin/python of slurm/Dockerfile"
        )
    return interpreter(profile.engine_python or engine.python, f".venv-{engine.kind}/bin/python")


def sweep_configs(directory: Path, points: Sequence[tuple[Mapping[str, Any], Any]]) -> tuple[list[Any], str]:
    """Returns the configs of a sweep's runs, each with a separate run directory, and the text of the file SWEEP, which
    lists the runs.

    `points`: [(changed settings, complete config)] of the runs. Raises ConfigError if several runs would send their
    weights to the same servers.
    """
    configs = [
        replace(config, run=replace(config.run, dir=str(directory), name=f"{index:03d}"))
        for index, (_, config) in enumerate(points)
    ]
    trained = [config for config in configs if isinstance(config, TrainConfig)]
    engines = [config.engine for config in trained if isinstance(config.engine, Servers)]
    urls = [url for engine in engines for listed in engine.urls.values() for url in listed]
    cure = "leave urls out, so that each run has servers of its own, or give each point of the sweep urls of its own"
    twice = sorted({url for url in urls if urls.count(url) > 1})
    refuse(*(f"engine.urls: several runs of the sweep would send their weights to {url}; {cure}" for url in twice))
    runs = [
        {"run": config.run.name, "changes": dict(changes)} for config, (changes, _) in zip(configs, points, strict=True)
    ]
    return configs, json.dumps(runs, indent=1) + "\n"


def plan_sweep(
    config: TrainConfig | SftConfig, points: Sequence[tuple[Mapping[str, Any], Any]], profile: Profile, *,
    command: str, to_come: bool = False,
) -> Submission:  # fmt: skip
    """Returns the submission of a sweep: an array with one run for each point, and an array of servers for each run
    whose servers are started by separate jobs.

    `points`: [(changed settings, complete config)] of the runs. `to_come`: the models do not exist yet, because an
    earlier job writes them. Raises ConfigError if a config cannot be run on the site.
    """
    directory = config.directory.absolute()
    configs, listing = sweep_configs(directory, points)
    sited = [
        for_site(member, profile, member.job.nodes * profile.ranks_per_node, to_come=to_come) for member in configs
    ]
    shape = _trainer_shape(
        config.job, profile, template="sweep", name=config.run.name, array=f"0-{len(points) - 1}", of=directory
    )
    settings = {"CONFIGS": str(directory / JOBS), "WARNING_S": str(shape.warning_s)}
    settings |= {"COMMAND": command, "PROFILE": str(directory / JOBS / SITE)}
    files = {f"../{SWEEP}": listing, SITE: config_files.dump(profile)}
    files["sweep.sbatch"] = _script(shape, profile, settings)
    trainers, runs_of_line = dict[str, tuple[str, int | None]](), dict[str, list[str]]()
    for index, (member, spec) in enumerate(sited):
        for line in placement(spec, profile):
            runs_of_line.setdefault(line, []).append(member.run.name)
        files[f"{member.run.name}.yaml"] = config_files.dump(member)
        if servers := server_jobs(spec, profile):
            name = f"{member.run.name}_engines.sbatch"
            trainers[name] = ("sweep.sbatch", index)
            files[name] = _engines_script(
                servers, member.job.engine_time, profile, replace(shape, name=f"{config.run.name}-{member.run.name}"),
                {"CONFIG": str(directory / JOBS / f"{member.run.name}.yaml")},
            )  # fmt: skip
    lines = [
        line if len(runs) == len(sited) else f"{line} (of {', '.join(runs)})" for line, runs in runs_of_line.items()
    ]
    return Submission(directory, files, ["sweep.sbatch", *trainers], trainers, placement=lines)


def plan_eval(configs: Sequence[EvalConfig], profile: Profile, directory: Path) -> Submission:
    """Returns the submission of evaluations: an array with one element for each config. Every config must have an
    output. Raises ConfigError if a config cannot be run on the site."""
    refuse(*path_problems("--out", str(directory)))
    directory = directory.absolute()
    configs = [for_site(config, profile, profile.ranks_per_node)[0] for config in configs]
    files = {f"{index:03d}.yaml": config_files.dump(config) for index, config in enumerate(configs)}
    shape = ScriptShape(
        template="eval", name=directory.name, ranks=profile.ranks_per_node, gpus=profile.gpus_per_node,
        time=profile.time, array=f"0-{len(configs) - 1}", logs=directory / "logs",
    )  # fmt: skip
    files["eval.sbatch"] = _script(shape, profile, {"CONFIGS": str(directory / JOBS)})
    return Submission(directory, files, ["eval.sbatch"])


def plan_generate(config: GenerateConfig, profile: Profile) -> Submission:
    """Returns the submission of one job that writes SFT data to the config's output.

    With servers, the job has one rank on each node, which starts servers on the node's GPUs; with the embedded engine,
    it has one rank per GPU. Raises ConfigError if the config cannot be run on the site.
    """
    job, ranks = config.job, 1 if isinstance(config.engine, Servers) else profile.ranks_per_node
    config, spec = for_site(config, profile, ranks * job.nodes)
    directory = Path(config.output).absolute()
    shape = ScriptShape(
        template="generate", name=directory.name, nodes=job.nodes, ranks=ranks, gpus=profile.gpus_per_node,
        time=job.time or profile.time, array=None, warning_s=job.warning_s or ENGINE_WARNING_S,
        logs=directory / "logs",
    )  # fmt: skip
    check_warning("the warning of the job (job.time, or time of the profile)", shape)
    files = {"config.yaml": config_files.dump(config)}
    files["generate.sbatch"] = _script(shape, profile, {"CONFIG": str(directory / JOBS / "config.yaml")})
    mark = directory / generation_progress.MARK
    done = (
        f"{directory} is finished: it has the answers that this config asks for; give another output, or remove {mark} "
        "to ask the teacher again, as when the files that data.path names have changed"
    )
    finished = done if generation_progress.finished(spec.settings) else None
    return Submission(directory, files, ["generate.sbatch"], finished=finished)


def evaluations(settings: Sequence[str], checkpoints: Sequence[str], directory: Path) -> list[EvalConfig]:
    """Returns the configs of all combinations of evaluations and checkpoints. The outputs are separate files in
    `directory`.

    `settings`: YAML files, one for each evaluation, and overrides a.b=c for all of them. `checkpoints`: model
    directories. Raises ConfigError if a config is invalid or two evaluations would have the same output.
    """
    files, overrides = [Path(s) for s in settings if "=" not in s], [s for s in settings if "=" in s]
    if not files:
        raise ConfigError("--checkpoints: give at least one config of `eval`, before the options")
    configs = []
    for path in checkpoints:
        model = Path(path)
        name = "_".join(part for part in model.parts[-3:] if part not in ("models", "model", "/", "runs"))
        for file in files:
            config = config_files.load(EvalConfig, [file], [*overrides, f"model.path={path}"])
            configs.append(replace(config, output=str((directory / f"{name}.{file.stem}.json").absolute())))
    outputs = [config.output for config in configs]
    twice = sorted({str(output) for output in outputs if outputs.count(output) > 1})
    refuse(*(f"two evaluations would write {output}: give models and configs of different names" for output in twice))
    return configs


def read_grid(path: Path) -> list[dict[str, Any]]:
    """Returns the points of a sweep file, each a dict of settings.

    The file is a list of points, or a mapping of settings to lists of values, which stands for all combinations of the
    values. Raises ConfigError if the file has another form, or more than MAX_ELEMENTS points.
    """
    grid = config_files.read_yaml(path)
    if isinstance(grid, Mapping) and grid and all(isinstance(values, list) and values for values in grid.values()):
        points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    elif isinstance(grid, list) and grid and all(isinstance(point, Mapping) for point in grid):
        points = [dict(point) for point in grid]
    else:
        raise ConfigError(
            f"--sweep {path}: give a mapping of settings to lists of values (all combinations run), "
            "or a list of mappings"
        )
    if len(points) > MAX_ELEMENTS:
        raise ConfigError(f"--sweep {path}: {len(points)} runs; an array has room for {MAX_ELEMENTS}")
    return points


def overrides(point: Mapping[str, Any]) -> list[str]:
    """Returns the settings of one point of a sweep as a list of command-line overrides in the form a.b=c."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in point.items()]


def write(submission: Submission) -> None:
    """Writes the files of a submission, and creates the directories that the jobs write to.

    Raises ConfigError if there is no Slurm, if the jobs would have nothing to do, or if a job of this directory is
    pending or running, because the next start of this job would read the new files.
    """
    if submission.finished is not None:
        raise ConfigError(submission.finished)
    slurm_commands.require()
    refuse_busy(submission.directory)
    write_files(submission)


def write_files(submission: Submission) -> None:
    """Writes the files of a submission and creates the directories, without any check."""
    for place in (submission.directory / JOBS, submission.directory / "logs"):
        place.mkdir(parents=True, exist_ok=True)
    for name, text in submission.files.items():
        write_text((submission.directory / JOBS).resolve() / name, text)


def reopen(run: Run) -> None:
    """Marks a finished run as unfinished if run.resume=must, so that it can be extended. No-op for an unfinished run.

    Raises ConfigError if the run is finished and run.resume is not must, because the run's jobs would have nothing to
    do.
    """
    directory = Path(run.dir) / run.name
    if not job_slices.finished(directory):
        return
    if run.resume != "must":
        raise ConfigError(f"{directory} is finished: give another run.name, or more iterations and run.resume=must")
    RunDirectory(directory).update_summary({"finished": False})


def send(submission: Submission, *, dependency: str | None = None) -> dict[str, str]:
    """Submits all batch scripts of a submission whose files have been written. Returns {script: job id}.

    `dependency`: sbatch's --dependency for the scripts that do not depend on another script of the submission. Raises
    SlurmError if a script cannot be submitted, after it has cancelled the jobs of the scripts submitted before.
    """
    allow_start(submission.directory)
    runs = runs_of(submission.directory)
    for run in runs:
        for name in (TRAINER, ENGINES):
            (run / JOBS / name).unlink(missing_ok=True)
    ids: dict[str, str] = {}
    for name in submission.scripts:
        first, element = submission.trainers.get(name, (None, None))
        try:
            ids[name] = slurm_commands.submit(
                submission.directory / JOBS / name,
                dependency=f"after:{ids[first]}_{element or 0}" if first else dependency,
            )
        except slurm_commands.SlurmError:
            slurm_commands.cancel([*ids.values()])
            raise
        record_job(submission.directory, name, ids[name])
        if first is not None:
            jobs = runs[element or 0] / JOBS
            jobs.mkdir(parents=True, exist_ok=True)
            write_text(jobs / TRAINER, ids[first] + ("" if element is None else f"_{element}") + "\n")
            write_text(jobs / ENGINES, ids[name] + "\n")
    return ids


def refuse_busy(directory: Path) -> None:
    """Raises ConfigError if a job of this directory is pending or running."""
    if busy := slurm_commands.queue(jobs_of(directory)):
        listed = ", ".join(f"{job.id} ({job.state.lower()})" for job in busy)
        raise ConfigError(f"{directory} has jobs already: {listed}; megatron-rl stop {directory} ends them")


def allow_start(directory: Path) -> None:
    """Removes the files that ask the directory's runs to stop, so that submitted jobs continue the runs."""
    for run in runs_of(directory):
        (run / STOP).unlink(missing_ok=True)


def record_job(directory: Path, script: str, job: str) -> None:
    """Records the id of a submitted job of this directory, for `megatron-rl status` and `stop`."""
    json_lines.append(
        directory / JOBS / SUBMITTED, json.dumps({"script": script, "job": job, "time": time.time()}).encode()
    )


def jobs_of(directory: Path) -> list[str]:
    """Returns the ids of all jobs that were submitted for this directory."""
    lines = json_lines.read(directory / JOBS / SUBMITTED, dict).values  # skips a partial line, e.g. after a full disk
    return [line["job"] for line in lines if isinstance(line.get("job"), str)]


def runs_of(directory: Path) -> list[Path]:
    """Returns the run directories of a sweep; for any other directory, the directory itself."""
    points = read_sweep(directory)
    return [directory] if points is None else [directory / point["run"] for point in points]


def read_sweep(directory: Path) -> list[dict[str, Any]] | None:
    """Returns the runs of a sweep's directory as [{"run", "changes"}], or None if `directory` does not belong to a
    sweep.
    """
    path = directory / SWEEP
    return read_points(path) if path.exists() else None
