"""Generates batch scripts from the templates in slurm/, with the #SBATCH lines and settings of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.cluster.profile import IN_CHECKOUT, ROOT, SHIPPED, Profile, interpreter
from megatron_rl.config.base import ConfigError, refuse

SETTINGS, END = "# --- settings", "# --- end of settings"


@dataclass(frozen=True, kw_only=True)
class ScriptShape:
    """The resources that one batch script requests: nodes, ranks, GPUs, time limit and array."""

    template: str  # name of the script's template: train, engines, roles, sweep, generate or eval
    name: str  # job name without the suffix -TEMPLATE
    nodes: int = 1
    ranks: int  # ranks on each node
    gpus: int  # GPUs on each node
    time: str
    array: str | None  # value of --array; None for a job without an array
    warning_s: int | None = None
    exclusive: bool = False
    logs: Path  # directory for the output files of the batch script (not of the ranks)


def script(
    shape: ScriptShape, profile: Profile, values: Mapping[str, str | int | Sequence[str]], directory: Path
) -> str:
    """Returns the text of a batch script: the template for the job kind of `shape`, with the #SBATCH header and the
    settings filled in.

    `values`: settings by name; lists become bash arrays.
    `directory`: working directory of the job, against which relative paths in the config are resolved.

    Raises ConfigError for a setting that the template does not have, for an invalid variable name in the profile's
    environment, and for an #SBATCH value that contains a line break or another control character.
    """
    lines = (SHIPPED / f"{shape.template}.sbatch").read_text(encoding="utf-8").splitlines()
    body = [line for line in lines[1:] if not line.startswith("#SBATCH")]
    first, last = (next(i for i, line in enumerate(body) if line.startswith(mark)) for mark in (SETTINGS, END))
    template_settings = {line.partition("=")[0] for line in body[first + 1 : last]}
    refuse(*(f"{shape.template}.sbatch has no setting {name}" for name in sorted(values.keys() - template_settings)))
    odd = [name for name in profile.environment if not (name.isidentifier() and name.isascii())]
    refuse(*(f"environment of the profile: {name!r} is no name of a variable: letters, digits and _" for name in odd))
    exported = [f"export {name}={_quoted(value)}" for name, value in profile.environment.items()]
    assignments = []
    for name, value in values.items():
        text = _quoted(value) if isinstance(value, str | int) else f"({' '.join(map(_quoted, value))})"
        assignments.append(f"{name}={text}")
    settings = ["# --- settings, written by megatron-rl submit", *exported, *assignments]
    return "\n".join([lines[0], *header(shape, profile, directory), *body[:first], *settings, *body[last:]]) + "\n"


def header(shape: ScriptShape, profile: Profile, directory: Path) -> list[str]:
    """Returns the #SBATCH lines of the options that the profile or the run sets. All other options keep the cluster's
    default.

    Raises ConfigError for a value that contains a line break or another control character.
    """
    gpus = f"{profile.gpu_type}:{shape.gpus}" if profile.gpu_type else str(shape.gpus)
    output = f"{str(shape.logs).replace('%', '%%')}/{shape.template}-{'%A_%a' if shape.array else '%j'}.out"
    words = {
        "job-name": f"{shape.name}-{shape.template}",
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.ranks,
        "gpus-per-node": gpus if shape.gpus else None,
        "cpus-per-task": profile.cpus_per_rank * max(1, shape.gpus // shape.ranks),
        # a job that uses only some GPUs of a node gets the cluster's default memory, not the profile's memory
        "mem": profile.memory if shape.gpus == profile.gpus_per_node else None,
        "constraint": profile.constraint,
        "time": shape.time,
        "array": shape.array,
        "signal": None if shape.warning_s is None else f"B:USR1@{shape.warning_s}",
        "chdir": directory,
        "output": output,
        "open-mode": "append",
        "propagate": "NONE",  # limits (ulimit) of the submitting shell are not applied to the job
    }
    options = {f"#SBATCH --{name}": value for name, value in words.items() if value is not None}
    every = [*options.items(), *(("sbatch of the profile", word) for word in profile.sbatch)]
    odd = [f"{option}: {str(value)!r}" for option, value in every if not str(value).isprintable()]
    refuse(*(f"{option} has a line break or another control character: take it out" for option in odd))
    lines = [f"{option}={_quoted(value)}" for option, value in options.items()]
    lines += ["#SBATCH --requeue", *(["#SBATCH --exclusive"] if shape.exclusive else [])]
    return lines + [f"#SBATCH {word}" for word in profile.sbatch]


def common_settings(profile: Profile, directory: Path | None = None) -> dict[str, str | Sequence[str]]:
    """Returns {name: value} of the settings that every template of a batch script has.

    `directory`: working directory of the program inside a container. If None, the working directory of the container
    image is used.
    """
    srun, words = [*profile.srun], []
    if profile.container is not None and profile.container.runtime == "pyxis":
        srun.append(f"--container-image={profile.container.image}")
        srun += [f"--container-mounts={','.join(profile.container.mounts)}"] if profile.container.mounts else []
        srun += [f"--container-workdir={directory}"] if directory else []
    elif profile.container is not None:
        words = ["apptainer", "exec"] + ["--nv"] * (profile.gpus_per_node > 0)
        words += [f"--pwd={directory}"] if directory else []
        words += [f"--bind={mount}" for mount in profile.container.mounts] + [profile.container.image]
    if profile.container is not None and profile.python is None and not IN_CHECKOUT:
        raise ConfigError(
            f"the profile has the container {profile.container.image} and no python: name the interpreter in it that "
            "has megatron-rl, such as /usr/bin/python3"
        )
    python = interpreter(profile.python, ".venv/bin/python")
    setup = "\n".join(profile.setup)
    return {"ROOT": str(ROOT), "PYTHON": python, "SETUP": setup, "SRUN": srun, "CONTAINER": words}


def _quoted(value: str | int) -> str:
    return shlex.quote(str(value))
