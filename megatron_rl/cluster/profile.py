"""Reads a site's profile: one YAML file with what a cluster's Slurm wants, apart from the configs of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, config

SHIPPED = Path(__file__).parent.parent.parent / "slurm"  # batch scripts and profiles of the checkout


@config
class Container:
    """The container in which a site runs the program."""

    runtime: Literal["pyxis", "apptainer"]
    image: str  # for pyxis an .sqsh file or docker://..., for apptainer a .sif file
    mounts: tuple[str, ...] = ()  # each as /host/path:/path/inside


@config
class Profile:
    """A site's settings. null leaves an option out of the batch scripts, so that the cluster's default holds."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "04:00:00"  # time limit of one slice
    warning_s: PositiveInt = 600  # seconds before the limit at which the run is asked to save and leave
    ranks_per_node: PositiveInt = 8
    gpus_per_node: NonNegativeInt = 8  # 0 asks for none
    gpu_type: str | None = None
    cpus_per_rank: PositiveInt = 12
    memory: str | None = None  # --mem; "0" takes all of a node's memory
    exclusive: bool = False  # true lets no other job onto the trainer's nodes
    constraint: str | None = None
    host: str = "auto"  # interface at which servers, refits and ranks listen
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()  # shell lines before the program
    python: str = ".venv/bin/python"  # absolute, or from the checkout's root; inside the container
    # Interpreter that has the engine, in the place of the config's engine.python. null: that one, else the checkout's
    # .venv-vllm or .venv-sglang. With a container it must be set, to the interpreter inside.
    engine_python: str | None = None
    container: Container | None = None
    sbatch: tuple[str, ...] = ()  # further options for #SBATCH lines
    srun: tuple[str, ...] = ()  # further options of srun


def read(name: str) -> Profile:
    """Reads a profile. `name`: a profile in slurm/profiles, or a YAML file. Raises ConfigError when there is none."""
    if not SHIPPED.is_dir():
        raise ConfigError(f"{SHIPPED} is not there: install megatron_rl from a checkout, with pip install -e")
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / "profiles" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (SHIPPED / "profiles").glob("*.yaml")))
        raise ConfigError(f"--profile {name}: no file {path}; give one of {known}, or a YAML file of your own")
    return config_files.load(Profile, [path])
