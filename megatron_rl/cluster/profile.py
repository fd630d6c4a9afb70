"""Reads the profile of a site: a YAML file with the Slurm settings of a cluster, separate from the configs of runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, config

_PACKAGE = Path(__file__).parents[1]
IN_CHECKOUT = (_PACKAGE.parent / "pyproject.toml").is_file()
# directory that contains slurm/: the root of the checkout, or the package's directory if it is installed from a wheel
ROOT = _PACKAGE.parent if IN_CHECKOUT else _PACKAGE
SHIPPED = ROOT / "slurm"  # directory with the templates of batch scripts and the profiles


@config
class Container:
    """The container in which the program runs at a site (a cluster with a profile)."""

    runtime: Literal["pyxis", "apptainer"]
    image: str  # container image: for pyxis an .sqsh file or docker://..., for apptainer a .sif file
    mounts: tuple[str, ...] = ()  # each as /host/path:/path/inside


@config
class Profile:
    """The Slurm settings of a site. An option that is null is omitted from the batch scripts, so that the cluster's
    default applies."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "04:00:00"  # time limit of one Slurm job of the run
    warning_s: PositiveInt = 600  # number of seconds before the time limit at which the run is asked to save and exit
    ranks_per_node: PositiveInt = 8
    gpus_per_node: NonNegativeInt = 8  # 0 requests no GPUs
    gpu_type: str | None = None
    cpus_per_rank: PositiveInt = 12
    memory: str | None = None  # value of sbatch's --mem; "0" requests all memory of a node
    exclusive: bool = False  # whether no other job may run on the nodes of the job
    constraint: str | None = None
    host: str = "auto"  # address or network interface at which servers, weight transfers and ranks listen
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()  # shell lines that the batch script executes before the program
    # Path of the Python interpreter that runs the program. If the profile has a container, the path is inside it.
    # A relative path starts at the checkout or, if the package is installed from a wheel, at the current directory.
    # null selects .venv/bin/python of the checkout. With a wheel, null selects the interpreter that runs `submit`.
    python: str | None = None
    # Python interpreter that has the engine installed. Overrides engine.python of the config.
    # If null, engine.python is used. If engine.python is null too, .venv-vllm or .venv-sglang of the checkout is used.
    # A package installed from a wheel has no such environments, so it uses the interpreter that runs `submit`.
    # With a container, engine_python of the profile is required, and must be in the container.
    engine_python: str | None = None
    container: Container | None = None
    sbatch: tuple[str, ...] = ()  # additional options for #SBATCH lines
    srun: tuple[str, ...] = ()  # additional options of srun


def read(name: str) -> Profile:
    """Reads a profile.

    `name`: a100 or cpu, or the path of a YAML file. Raises ConfigError if the file does not exist.
    """
    shipped = sorted(p.stem for p in (SHIPPED / "profiles").glob("*.yaml"))
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / "profiles" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"--profile {name}: there is no file {path}; give one of {', '.join(shipped)}, or the path of a YAML file"
        )
    return config_files.load(Profile, [path])


def interpreter(python: str | None, default: str) -> str:
    """Returns the Python interpreter for the nodes of a job: an absolute path, or a name that is looked up in PATH.

    `python`: the interpreter that a profile or a config names, or None for the default. `default`: path in the checkout
    that is used if `python` is None. A package that is installed from a wheel has no checkout, and uses the running
    interpreter by default.
    """
    if python is None and not IN_CHECKOUT:
        return sys.executable
    path = python or default
    return str((ROOT if IN_CHECKOUT else Path.cwd()) / path) if "/" in path else path
