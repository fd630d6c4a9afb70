"""`megatron-rl submit`: writes the batch scripts of a run, a sweep or an evaluation, and gives them to Slurm."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.cluster import slices, slurm
from megatron_rl.cluster.job import STOP
from megatron_rl.cluster.profile import SHIPPED, Profile
from megatron_rl.cluster.render import Shape, common_settings, script
from megatron_rl.config import checks as config_checks
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, EvalConfig, Servers, SftConfig, TrainConfig
from megatron_rl.run.checkpoint import read_json, write_text
from megatron_rl.run.directory import SWEEP, RunDirectory
from megatron_rl.session.launch import run_directory

JOBS, SITE, SUBMITTED = "jobs", "site.yaml", "submitted.jsonl"  # in the run directory
TRAINER, ENGINES = (
    "trainer",
    "engines",
)  # a job's number each, for slurm/job.sh: the trainer cancels engines, which do not outlive it
ENGINE_WARNING_S = 120  # a server may take 30 s to end, and the warning comes up to 30 s late
MAX_ELEMENTS = 1000  # MaxArraySize is 1001 by default


@dataclass(frozen=True)
class Plan:
    """What is to be written and submitted: scripts in order; `after`: it starts when that script's first element has begun."""

    directory: Path  # of the run, the sweep or the evaluation
    files: Mapping[str, str]  # below directory/jobs
    scripts: Sequence[str]
    after: Mapping[str, str]


def plan_run(
    config: TrainConfig | SftConfig, profile: Profile, *, command: str, as_roles: bool = False, to_come: bool = False
) -> Plan:
    """A chain of the trainer's slices, and engines beside it where the config has servers. `as_roles`: all in one array. `to_come`: an
    earlier job writes the models. Raises ConfigError."""
    config = for_site(config, profile, to_come=to_come)
    job, directory = config.job, run_directory(config).absolute()
    own = Shape(
        template="train", name=config.run.name, nodes=job.nodes, ranks=profile.ranks_per_node, gpus=profile.gpus_per_node,
        time=job.time or profile.time, array=f"0-{job.slices - 1}%1" if job.slices > 1 else "0",
        warning_s=job.warning_s or profile.warning_s, exclusive=profile.exclusive, logs=directory / "logs",
    )  # fmt: skip
    shared = {**common_settings(profile, SHIPPED.parent, Path.cwd()), "CONFIG": str(directory / JOBS / "config.yaml")}
    settings = {**shared, "WARNING_S": str(own.warning_s), "COMMAND": command, "PROFILE": str(directory / JOBS / SITE)}
    files = {"config.yaml": config_files.dump(config), SITE: config_files.dump(profile)}
    check_warning("job.warning_s", own)
    if not isinstance(config, TrainConfig) or not isinstance(config.engine, Servers):
        if as_roles:
            raise ConfigError(
                "--shape roles: the config has no servers, so the trainer is the only role; leave --shape out"
            )
        return Plan(
            directory, files | {"train.sbatch": script(own, profile, settings, Path.cwd())}, ["train.sbatch"], {}
        )
    servers = {"ROLES": [*config.roles], "REPLICAS": str(config.engine.replicas)}
    count = len(config.roles) * config.engine.replicas
    if as_roles:
        if job.nodes > 1 or job.slices > 1:
            raise ConfigError(
                "--shape roles is one array whose elements are alike: set job.nodes=1 and job.slices=1, or leave --shape out"
            )
        whole = replace(own, template="roles", array=f"0-{count}")
        files["roles.sbatch"] = script(whole, profile, settings | servers, Path.cwd())
        return Plan(directory, files, ["roles.sbatch"], {})
    engines = replace(
        own, template="engines", nodes=1, ranks=1, gpus=config.engine.tp if profile.gpus_per_node else 0, exclusive=False,
        time=job.engine_time or own.time, array=f"0-{count - 1}", warning_s=ENGINE_WARNING_S,
    )  # fmt: skip
    check_warning("the warning of engines (job.engine_time)", engines)
    files["train.sbatch"] = script(own, profile, settings, Path.cwd())
    files["engines.sbatch"] = script(engines, profile, shared | servers | {"TRAINER": ""}, Path.cwd())
    return Plan(directory, files, ["train.sbatch", "engines.sbatch"], {"engines.sbatch": "train.sbatch"})


def for_site(config: TrainConfig | SftConfig, profile: Profile, *, to_come: bool = False) -> Any:
    """With what the profile decides: where servers listen, which interpreter has them, and that jobs of their own start them. Checked for
    the ranks that it will have."""
    if isinstance(config, TrainConfig) and isinstance(config.engine, Servers):
        python = engine_python(config.engine, profile.engine_python)
        config = replace(config, engine=replace(config.engine, start=False, host=profile.host, python=python))
    config_checks.check(config, config.job.nodes * profile.ranks_per_node, to_come=to_come)
    return config


def check_warning(name: str, shape: Shape) -> None:
    """Raises ConfigError for a time limit that Slurm cannot read, and where the warning would come as the job starts."""
    limit = seconds(shape.time)
    if limit is not None and shape.warning_s is not None and shape.warning_s >= limit:
        raise ConfigError(
            f"{name}: a warning {shape.warning_s} s before the end of {shape.time} comes at the start: give more time"
        )


def seconds(limit: str) -> int | None:
    """Of a time limit as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None: there is none. Raises ConfigError."""
    if limit.lower() in ("infinite", "unlimited"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        raise ConfigError(f"time limit {limit!r}: give minutes, HH:MM:SS or D-HH:MM:SS")
    days, *rest = found.groups()
    given = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(given, units, strict=False))


def engine_python(engine: Servers, otherwise: str) -> str:
    """The interpreter that has the engine; a relative path counts from the checkout."""
    python = engine.python or otherwise
    return str(SHIPPED.parent / python) if "/" in python and not Path(python).is_absolute() else python


def plan_sweep(
    config: TrainConfig | SftConfig, points: Sequence[tuple[Mapping[str, Any], Any]], profile: Profile, *, command: str,
    to_come: bool = False,
) -> Plan:  # fmt: skip
    """`points`: (what differs, the whole config of that run). `to_come`: an earlier job writes the models."""
    directory = run_directory(config).absolute()
    files, found = dict[str, str](), []
    for index, (changes, own) in enumerate(points):
        own = for_site(
            replace(own, run=replace(own.run, dir=str(directory), name=f"{index:03d}")), profile, to_come=to_come
        )
        if isinstance(own, TrainConfig) and isinstance(own.engine, Servers):
            raise ConfigError(
                f"a sweep starts runs with embedded engines; engine.kind = {own.engine.kind!r} wants a submission for each"
            )
        files[f"{index:03d}.yaml"] = config_files.dump(own)
        found.append({"run": own.run.name, "changes": dict(changes)})
    files[SITE] = config_files.dump(profile)
    files[f"../{SWEEP}"] = json.dumps(found, indent=1) + "\n"
    job = config.job
    shape = Shape(
        template="sweep", name=config.run.name, nodes=job.nodes, ranks=profile.ranks_per_node, gpus=profile.gpus_per_node,
        time=job.time or profile.time, array=f"0-{len(points) - 1}", warning_s=job.warning_s or profile.warning_s,
        exclusive=profile.exclusive, logs=directory / "logs",
    )  # fmt: skip
    check_warning("job.warning_s", shape)
    settings = {
        **common_settings(profile, SHIPPED.parent, Path.cwd()), "CONFIGS": str(directory / JOBS), "WARNING_S": str(shape.warning_s),
        "COMMAND": command, "PROFILE": str(directory / JOBS / SITE),
    }  # fmt: skip
    files["sweep.sbatch"] = script(shape, profile, settings, Path.cwd())
    return Plan(directory, files, ["sweep.sbatch"], {})


def plan_eval(configs: Sequence[EvalConfig], profile: Profile, directory: Path) -> Plan:
    """One element for each config; all have an output."""
    directory = directory.absolute()
    for config in configs:
        config_checks.check(config, profile.ranks_per_node)
    files = {f"{index:03d}.yaml": config_files.dump(config) for index, config in enumerate(configs)}
    shape = Shape(
        template="eval", name=directory.name, ranks=profile.ranks_per_node, gpus=profile.gpus_per_node, time=profile.time,
        array=f"0-{len(configs) - 1}", logs=directory / "logs",
    )  # fmt: skip
    settings = {**common_settings(profile, SHIPPED.parent, Path.cwd()), "CONFIGS": str(directory / JOBS)}
    files["eval.sbatch"] = script(shape, profile, settings, Path.cwd())
    return Plan(directory, files, ["eval.sbatch"], {})


def grid(path: Path) -> list[dict[str, Any]]:
    """The points of a sweep file: a mapping of setting -> values gives all combinations, a list of mappings these. Raises ConfigError."""
    found = config_files.read_yaml(path)
    if isinstance(found, Mapping) and found and all(isinstance(values, list) and values for values in found.values()):
        points = [dict(zip(found, values, strict=True)) for values in itertools.product(*found.values())]
    elif isinstance(found, list) and found and all(isinstance(point, Mapping) for point in found):
        points = [dict(point) for point in found]
    else:
        raise ConfigError(
            f"--sweep {path}: give a mapping of settings to lists of values (all combinations run), or a list of mappings"
        )
    if len(points) > MAX_ELEMENTS:
        raise ConfigError(f"--sweep {path}: {len(points)} runs; an array has room for {MAX_ELEMENTS}")
    return points


def write(plan: Plan) -> None:
    """The files, and the places that the jobs write to. Raises ConfigError where a job of this directory still waits or runs: its next
    start would read them."""
    slurm.require()
    refuse_busy(plan.directory)
    put(plan)


def put(plan: Plan) -> None:
    """The files and places alone."""
    for place in (plan.directory / JOBS, plan.directory / "logs"):
        place.mkdir(parents=True, exist_ok=True)
    for name, text in plan.files.items():
        write_text((plan.directory / JOBS / name).resolve(), text)


def reopen(config: TrainConfig | SftConfig) -> None:
    """A finished run goes on where run.resume=must asks for more of it. Raises ConfigError else: its jobs would have nothing to do."""
    directory = run_directory(config)
    if not slices.finished(directory):
        return
    if config.run.resume != "must":
        raise ConfigError(f"{directory} is finished: give another run.name, or more steps and run.resume=must")
    RunDirectory(directory).update_summary({"finished": False})


def send(plan: Plan, *, dependency: str | None = None) -> dict[str, str]:
    """What is written -> the jobs' ids by script. All of them or none. `dependency`: as sbatch takes it, of the scripts that do not wait
    for another one of the plan. Raises SlurmError."""
    allow_start(plan.directory)
    for name in (TRAINER, ENGINES):
        (plan.directory / JOBS / name).unlink(missing_ok=True)
    ids: dict[str, str] = {}
    for name in plan.scripts:
        first = plan.after.get(name)
        try:
            ids[name] = slurm.submit(
                plan.directory / JOBS / name, dependency=f"after:{ids[first]}_0" if first else dependency
            )
        except slurm.SlurmError:
            slurm.cancel([*ids.values()])
            raise
        note(plan.directory, name, ids[name])
        if "engines.sbatch" in plan.scripts:
            write_text(plan.directory / JOBS / (ENGINES if name == "engines.sbatch" else TRAINER), ids[name] + "\n")
    return ids


def refuse_busy(directory: Path) -> None:
    """Raises ConfigError where a job of this directory still waits or runs."""
    if busy := slurm.queue(jobs_of(directory)):
        listed = ", ".join(f"{job.id} ({job.state.lower()})" for job in busy)
        raise ConfigError(f"{directory} has jobs already: {listed}; megatron-rl stop {directory} ends them")


def allow_start(directory: Path) -> None:
    """Of runs that were stopped: whoever submits them wants them to go on."""
    for run in runs_of(directory):
        (run / STOP).unlink(missing_ok=True)


def note(directory: Path, script: str, job: str) -> None:
    """A job of this directory, for `megatron-rl status` and `stop`."""
    with (directory / JOBS / SUBMITTED).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"script": script, "job": job, "time": time.time()}) + "\n")


def jobs_of(directory: Path) -> list[str]:
    """All that were ever submitted for this directory."""
    path = directory / JOBS / SUBMITTED
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, of a disk that was full
            found.append(json.loads(line)["job"])
    return found


def runs_of(directory: Path) -> list[Path]:
    """Those of a sweep; else the directory itself."""
    points = read_sweep(directory)
    return [directory] if points is None else [directory / point["run"] for point in points]


def read_sweep(directory: Path) -> list[dict[str, Any]] | None:
    """[{"run", "changes"}] of a sweep's directory; None for another one."""
    path = directory / SWEEP
    return read_json(path) if path.exists() else None
