"""What a site's Slurm wants: one YAML file for a cluster, beside the configs of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, config

SHIPPED = Path(__file__).parent.parent.parent / "slurm"


@config
class Container:
    runtime: Literal["pyxis", "apptainer"]
    image: str  # of pyxis: an .sqsh file or docker://...; of apptainer: a .sif file
    mounts: tuple[str, ...] = ()  # /host/path:/path/inside


@config
class Profile:
    """null leaves the word out: the cluster's default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "04:00:00"  # limit of one slice
    warning_s: PositiveInt = 600  # before it, the run is asked to save and leave
    ranks_per_node: PositiveInt = 8
    gpus_per_node: NonNegativeInt = 8  # 0: none are asked for
    gpu_type: str | None = None
    cpus_per_rank: PositiveInt = 12
    memory: str | None = None  # --mem; "0": all of a node's
    exclusive: bool = False  # no other job on the trainer's nodes
    constraint: str | None = None
    host: str = "auto"  # interface that servers, refits and ranks listen at
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()  # shell lines before the program
    python: str = ".venv/bin/python"  # from the checkout's root, or absolute; inside the container
    engine_python: str = ".venv-vllm/bin/python"
    container: Container | None = None
    sbatch: tuple[str, ...] = ()  # further words of #SBATCH
    srun: tuple[str, ...] = ()


def read(name: str) -> Profile:
    """`name`: of a profile that is shipped, or a YAML file. Raises ConfigError."""
    if not SHIPPED.is_dir():
        raise ConfigError(f"{SHIPPED} is not there: install megatron_rl from a checkout, with pip install -e")
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / "profiles" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (SHIPPED / "profiles").glob("*.yaml")))
        raise ConfigError(f"--profile {name}: no file {path}; give one of {known}, or a YAML file of your own")
    return config_files.load(Profile, [path])
