"""`megatron-rl doctor`: checks whether this host meets the requirements of a run, and says how to fix problems."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl.cluster.host_address import own_address
from megatron_rl.cluster.profile import Profile
from megatron_rl.config import hub_cache
from megatron_rl.config.schema import ConfigError, RoleConfig, Servers
from megatron_rl.jobs import slurm_commands, versions
from megatron_rl.jobs.submit import engine_python
from megatron_rl.models.shape import Shape, read_shape
from megatron_rl.planning import totals
from megatron_rl.run import directory_lock
from megatron_rl.run.environment_record import packages
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.spec import missing_files
from megatron_rl.spec.run_spec import EngineSpec, RunSpec, Spec, TrainingSpec
from megatron_rl.weights import counting

Verdict = Literal["ok", "note", "wrong"]
PYTHON = (3, 11)
PACKAGES = {"torch": "", "megatron-core": ">=0.16.1,<0.20", "transformers": ""}  # {needed package: supported versions}
# MiB that are written to the run directory to measure its speed. {True: in the quick check; False: in the full check}
PROBE_MIB = {True: 1, False: 64}
SLOW_MIB_S = 20.0  # a file system that writes fewer MiB per second is reported as slow
GIB = 1 << 30
ELSEWHERE = "on a login node this says nothing about the nodes of a job"
NO_FLOCK = (
    "a file stands in the lock's place, which a trainer that is killed on another host leaves there; better mount it "
    "with flock (Lustre: -o flock), or give another run.dir"
)


@dataclass(frozen=True)
class Check:
    """The result of one check, a row of the table. `what`: what was checked. `finding`: what was found. `verdict`: ok,
    note or wrong. `cure`: how to fix the problem if the verdict is not ok."""

    what: str
    finding: str
    verdict: Verdict = "ok"
    cure: str = ""


def judged(what: str, finding: str, good: bool, cure: str, *, bad: Verdict = "wrong") -> Check:
    """Returns a check with the verdict ok if `good` is True, and otherwise with the verdict `bad` and a cure."""
    return Check(what, finding) if good else Check(what, finding, bad, cure)


def examine(spec: Spec | None, profile: Profile | None, *, quick: bool, environment: Mapping[str, str]) -> list[Check]:
    """Returns the results of all checks that apply.

    `spec`: the specification of the run, or None for checks of the host only. `profile`: the profile of the cluster.
    `quick`: make only the checks that a starting job makes on each of its nodes. These take one or two seconds.
    `environment`: the environment variables.
    """
    parts: list[Callable[[], Iterator[Check]]] = [
        _packages,
        lambda: _gpus(profile, environment),
        lambda: _network(engine, profile, environment),
    ]
    engine = spec.engine if isinstance(spec, RunSpec) and isinstance(spec.engine.settings, Servers) else None
    if spec is not None:
        parts += [lambda: _files(spec.directory, quick), lambda: _space(spec, quick), lambda: _inputs(spec, quick)]
        parts += [] if quick else [lambda: _hub(spec, environment)]
        parts += [] if engine is None else [lambda: _engine(engine, profile, environment)]
    if not quick:
        parts.append(lambda: _slurm(profile))
    return [check for part in parts for check in part()]


def smoke(output: Path, *, tiny: bool = False) -> list[Check]:
    """Runs the smoke checks of tools/gpu_kit on the first GPU and writes their measurements to `output`. Returns the
    results, with a note that asks the user to send `output` to the project.

    The checks use the benchmarks and test helpers of the repository, which an installed package lacks. `tiny`: use
    small tensors.
    """
    import torch

    root = Path(__file__).parents[2]
    if not (root / "tools/gpu_kit/smoke.py").exists():
        cure = "clone the repository, and in it: `make setup` and .venv/bin/megatron-rl doctor --gpu"
        return [Check("smoke checks", f"there is no tools/gpu_kit in {root}", "wrong", cure)]
    if not torch.cuda.is_available():
        cure = "run it on a node with a GPU, with a torch that is built for CUDA"
        return [Check("smoke checks", f"torch {torch.__version__} sees no GPU", "wrong", cure)]
    sys.path[:0] = [str(root / name) for name in ("tools/gpu_kit", "benchmarks", "tests/helpers")]
    results = importlib.import_module("smoke").main([str(output), "--budget", "300", *(["--tiny"] if tiny else [])])
    checks = []
    for name, result in results.items():
        figures = ", ".join(f"{key} {value}" for key, value in result.items() if key != "ok")
        cure = f"send {output} and this output in an issue of the project; what works without it: docs/how_to/gpu.md"
        checks.append(judged(name, figures[:300], result.get("ok", False), cure))
    to_send = Check("to send", f"{output.resolve()}", "note", "also when all is ok: no run was seen on such a GPU")
    return [*checks, to_send]


def show(checks: list[Check], console: Console, *, only_wrong: bool, environment: Mapping[str, str]) -> None:
    """Prints the checks as a table, the most serious results last. `only_wrong`: print only checks with the verdict
    wrong."""
    host = socket.gethostname()
    node = environment.get("SLURMD_NODENAME", host)
    chosen = [check for check in checks if not only_wrong or check.verdict == "wrong"]
    if only_wrong and not chosen:
        console.print(f"{node}: all {len(checks)} checks passed")
        return
    title = f"{node}" + (f" ({host})" if host != node else "")
    table = Table("", "check", "found", "cure", title=title, title_justify="left")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[red]wrong[/]"}
    for check in sorted(chosen, key=lambda check: ("ok", "note", "wrong").index(check.verdict)):
        table.add_row(marks[check.verdict], *map(escape, (check.what, check.finding, check.cure)))
    console.print(table)


def _packages() -> Iterator[Check]:
    """Checks the versions of Python and of the packages in PACKAGES. If Transformer Engine is installed, also checks
    whether its version meets the requirement in megatron-core's metadata."""
    python_version, installed = ".".join(map(str, sys.version_info[:3])), packages()
    yield judged("Python", python_version, sys.version_info >= PYTHON, "3.11 or newer is needed")
    for name, supported in PACKAGES.items():
        if (version := installed.get(name)) is None:
            cure = "pip install -e . (or `make setup`) in the environment that jobs use"
            yield Check(name, "not installed", "wrong", cure)
        else:
            good = SpecifierSet(supported).contains(version, prereleases=True)
            yield judged(name, version, good, f"{supported} is supported")
    requirement = versions.bounds("megatron-core", "transformer-engine")
    if (version := installed.get("transformer-engine")) is not None:
        specifier = SpecifierSet() if requirement is None else requirement.specifier
        cure = f"megatron-core {installed.get('megatron-core')} asks for {specifier}: slurm/gpu/install.sh has it"
        yield judged("transformer-engine", version, specifier.contains(version, prereleases=True), cure, bad="note")


def _gpus(profile: Profile | None, environment: Mapping[str, str]) -> Iterator[Check]:
    in_job, num_gpus = "SLURM_JOB_ID" in environment, profile and profile.gpus_per_node
    # an interactive Slurm job may have only some of the node's GPUs
    slurm_gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    num_gpus = int(slurm_gpus) if in_job and slurm_gpus.isdigit() else num_gpus
    if shutil.which("nvidia-smi") is None:
        bad = bool(num_gpus) and in_job
        cure = "the job asked for GPUs: is this a node with GPUs, and its driver loaded?" if bad else ELSEWHERE
        yield Check("GPUs", "none here (no nvidia-smi)", "wrong" if bad else "note", "" if num_gpus == 0 else cure)
        return
    query = "--query-gpu=name,memory.total,driver_version,ecc.errors.uncorrected.volatile.total"
    try:
        lines = slurm_commands.run(["nvidia-smi", query, "--format=csv,noheader"]).strip().splitlines()
    except slurm_commands.SlurmError as error:
        yield Check("GPUs", str(error), "wrong", "the driver does not answer: drain this node")
        return
    description = f"{len(lines)} x {lines[0] if lines else ''}"
    lost = bool(num_gpus) and len(lines) < num_gpus and in_job
    cure = f"this job was to have {num_gpus} here: if one is lost, drain this node; else correct gpus_per_node"
    yield judged("GPUs", description, not lost, cure)


def _network(engine: EngineSpec | None, profile: Profile | None, environment: Mapping[str, str]) -> Iterator[Check]:
    hosts = {"profile host": profile.host} if profile is not None else {}
    if engine is not None and isinstance(engine.settings, Servers):
        hosts["engine.host"] = engine.settings.host
    hosts |= {name: environment[name].partition(",")[0] for name in ("GLOO_SOCKET_IFNAME",) if environment.get(name)}
    in_job = "SLURM_JOB_ID" in environment
    for name, host in hosts.items():
        try:
            address = own_address(host)
            with socket.socket() as probe:
                probe.bind((address, 0))
                port = probe.getsockname()[1]
        except (ConfigError, OSError) as error:
            cure = "give an interface of the nodes (ip -brief address), or auto" if in_job else ELSEWHERE
            yield Check(name, f"{host}: {error}", "wrong" if in_job else "note", cure)
            continue
        alone = address.startswith("127.") and in_job
        cure = "other nodes do not reach this address: give the interface between nodes"
        yield judged(name, f"{host} is {address}, port {port} is free", not alone, cure, bad="note")


def _files(directory: Path, quick: bool) -> Iterator[Check]:
    """Checks that files in the run directory can be written, renamed and locked, and measures the write speed."""
    while not directory.exists():
        directory = directory.absolute().parent
    probe, size = directory / f".doctor.{socket.gethostname()}.{os.getpid()}", PROBE_MIB[quick]
    # The names of the test files are unique to this process, because other nodes may make the check at the same time.
    moved = probe.with_name(probe.name + ".moved")
    try:
        start = time.perf_counter()
        with probe.open("wb") as file:
            file.write(b"\0" * (size << 20))
            file.flush()
            os.fsync(file.fileno())
            locks_here = directory_lock.flock(file.fileno())
        rate = size / (time.perf_counter() - start)
        probe.rename(moved)
    except OSError as error:
        cure = "the run directory must take writes and renames; give another run.dir"
        yield Check("run directory", f"{directory}: {error}", "wrong", cure)
        return
    finally:
        for leftover in (probe, moved):
            with contextlib.suppress(OSError):
                leftover.unlink()
    slow = rate < SLOW_MIB_S and not quick
    cures = ["saving will be slow here: give run.dir on a faster file system"] * slow
    cures += [NO_FLOCK] * (not locks_here)
    description = f"{directory}: writes {rate:.0f} MiB/s, renames, {'locks' if locks_here else 'has no flock'}"
    yield judged("run directory", description, not cures, "; ".join(cures), bad="note")


def _space(spec: Spec, quick: bool) -> Iterator[Check]:
    """Checks the free space of the run directory's file system. At least 1 GiB must be free. A training run needs space
    for the exported models, and for the checkpoints that are still missing, but at least one. The sizes and the numbers
    of checkpoints and models are those of `plan`."""
    directory = place = spec.directory
    while not place.exists():
        place = place.absolute().parent
    free, need, text, unknown = shutil.disk_usage(place).free / GIB, 1.0, "", ""
    if isinstance(spec, TrainingSpec) and not quick:
        with contextlib.suppress(ConfigError, ValueError):  # reported by _inputs
            best = spec.loop.evaluation.best if isinstance(spec, RunSpec) else None
            best_count, size, models = best.keep if best else 0, 0.0, 0.0
            for name in spec.trained_policies if isinstance(spec, RunSpec) else spec.roles:
                role = spec.roles[name]
                if (shape := _shape(role)) is None:
                    unknown = f"; the run may need more: the size of {role.model.path} is unknown"
                    continue
                checkpoint, model = totals.saved_bytes(role, shape)
                size, models = size + checkpoint / GIB, models + model / GIB
            existing = len([*RunDirectory(directory).checkpoints.glob("iteration_*")])
            count = max(1, spec.run.keep + 1 + best_count - existing)
            need = max(need, count * size + (1 + best_count) * models)
            text = f"; {count} more checkpoints of {size:.3g} GiB, and models: {need:.3g} GiB"
    if unknown and free > need:
        yield Check("space there", f"{free:.3g} GiB free{unknown}", "note", "fetch the model first, or see `plan`")
        return
    cure = "make room, lower run.keep, or give a run.dir on another file system"
    yield judged("space there", f"{free:.3g} GiB free{text}", free > need, cure)


def _inputs(spec: Spec, quick: bool) -> Iterator[Check]:
    for file in missing_files.absent_files(spec):
        problem = file.problem
        if problem is not None:
            yield Check(file.name, problem if file.on_hub else str(file), "wrong", f"put it there, or mend {file.name}")
        elif not hub_cache.is_cached(file.path, file.kind):
            token = "" if hub_cache.has_token() else "; gated ones need a token: `hf auth login`, or HF_TOKEN"
            yield Check(file.name, str(file), "note", f"the run fetches it; to do so before: `{file.fetch}`{token}")
        else:
            yield Check(file.name, f"{file.path}, from {hub_cache.cache()}")
    if quick:
        return
    for name, role in spec.roles.items() if isinstance(spec, TrainingSpec) else ():
        try:
            shape = _shape(role)
        except (ConfigError, ValueError) as error:
            cure = "is this a Hugging Face directory, all of it?"
            yield Check(f"model of {name}", f"{role.model.path}: {error}", "wrong", cure)
            continue
        if shape is not None:
            size = f"{counting.total(shape) / 1e9:.3g} B parameters ({shape.sizes.family})"
            yield Check(f"model of {name}", size)


def _hub(spec: Spec, environment: Mapping[str, str]) -> Iterator[Check]:
    """Reports the directory of the Hugging Face cache, whether the hub is contacted, and whether there is a token."""
    if not any(file.on_hub for file in missing_files.absent_files(spec)):
        return
    cache_directory = environment.get("HF_HOME") or environment.get("HF_HUB_CACHE")
    cure = "set HF_HOME to a folder that all nodes see, so that a model is fetched once"
    where = f"{hub_cache.cache()}" + ("" if cache_directory else " (not set)")
    yield judged("HF_HOME", where, bool(cache_directory), cure, bad="note")
    if hub_cache.offline():
        yield Check("Hugging Face hub", "not asked: HF_HUB_OFFLINE is set")
    else:
        cure = "nodes without a network: fetch on a login node, then set HF_HUB_OFFLINE=1 in the job"
        yield Check("Hugging Face hub", "asked for what is not there", cure=cure)
    cure = "gated models and private data need one: `hf auth login`, or HF_TOKEN"
    has = hub_cache.has_token()
    yield judged("hub token", "there is one" if has else "none", has, cure, bad="note")


def _engine(engine: EngineSpec, profile: Profile | None, environment: Mapping[str, str]) -> Iterator[Check]:
    settings = engine.settings
    assert isinstance(settings, Servers)
    try:
        python = engine_python(settings, profile) if profile else settings.python or sys.executable
    except ConfigError as error:
        yield Check("engine.python", "not known", "wrong", str(error))
        return
    if profile and profile.container and "SLURM_JOB_ID" not in environment:
        yield Check("engine.python", f"{python}, in the container", "note", "the run's job looks for it there")
        return
    package, cure = settings.kind, "`make engines`, or set engine.python to the interpreter that has the engine"
    try:
        installed = versions.of_interpreter(python)
    except versions.NoEnvironmentError as error:
        yield Check("engine.python", str(error), "wrong", cure)
        return
    version = installed.get(package) or installed.get(f"{package}-cpu")
    description = f"{python} has no {package}" if version is None else f"{python}: {package} {version}"
    yield judged("engine.python", description, version is not None, cure)
    if version is not None:
        yield _shared(engine.refit.transport, packages(), installed)


def _shared(transport: str, trainer: Mapping[str, str], engine: Mapping[str, str]) -> Check:
    """Compares the torch and NCCL versions of the trainer with those of the engines, because a difference may prevent
    or slow down the transfer of weights from the trainer to the engines.

    `transport`: the setting refit.transport. `trainer`, `engine`: {package: version} of the trainer and the engines.
    """
    what = "torch of trainer and engines"
    if different := versions.differences(trainer, engine):
        bad = transport == "nccl" and any(line.startswith("NCCL") for line in different)
        cure = "install both by slurm/gpu/install.sh, which gives them one torch"
        slow = "" if bad else ": weights may go over TCP, which is slower"
        return Check(what, "; ".join(different), "wrong" if bad else "note", cure + slow)
    nccl = versions.nccl(trainer)
    return Check(what, f"{trainer.get('torch', 'none')} in both" + (f", NCCL {nccl}" if nccl else ""))


def _slurm(profile: Profile | None) -> Iterator[Check]:
    if not slurm_commands.present():
        yield Check("Slurm", "no sbatch here", "note", "submit from a login node")
        return
    try:
        yield Check("Slurm", slurm_commands.run(["sbatch", "--version"]).strip())
        if profile is not None and profile.partition is not None:
            nodes = slurm_commands.run(["sinfo", "--noheader", f"--partition={profile.partition}", "--format=%D %t %l"])
            states = [line for line in nodes.split("\n") if line]
            bad = f"there is none: {slurm_commands.run(['sinfo', '--noheader', '--format=%R']).split()}"
            cure = "correct the profile's partition"
            yield judged(f"partition {profile.partition}", "; ".join(states) or bad, bool(states), cure)
    except slurm_commands.SlurmError as error:
        cure = "to submit from here: is it a host of the cluster, and slurmctld up?"
        yield Check("Slurm", str(error).partition("\n")[0], "note", cure)


def _shape(role: RoleConfig) -> Shape | None:
    """Returns the shape of a role's model from its config.json. If the file is not on this host, returns the shape of
    the public model of this name, or None if no public model of this name is known."""
    with contextlib.ExitStack() as stack:
        if not (Path(role.model.path) / "config.json").is_file():
            stack.enter_context(contextlib.suppress(ConfigError))
        shape = read_shape(role.model.path)
        return replace(shape, sizes=shape.sizes.with_head(role.head))
    return None
