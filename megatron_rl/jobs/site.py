"""Checks whether a run fits a site (cluster): whether a node has the GPUs that a server needs, and whether the site's
container contains the paths in the config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.cluster.profile import IN_CHECKOUT, ROOT, Profile
from megatron_rl.config.schema import Servers
from megatron_rl.spec.run_spec import Spec, TrainingSpec

MAX_PATH = 4096  # maximum length of a path in Linux


def problems(spec: Spec, profile: Profile) -> Iterator[str]:
    """Yields an error message for each setting that does not fit the cluster's profile: engine servers that need GPUs
    which a node does not have, and paths that the profile's container does not mount under the same path."""
    settings, gpus = None if spec.engine is None else spec.engine.settings, profile.gpus_per_node
    if isinstance(settings, Servers) and not settings.urls and gpus > 0:
        if gpus < settings.tp:
            yield (
                f"engine.tp = {settings.tp}: a node of the profile has {gpus} GPUs, and a server has one node. Lower "
                "engine.tp, or set gpus_per_node of the profile"
            )
        if not isinstance(spec, TrainingSpec) and (beyond := [number for number in settings.gpus if number >= gpus]):
            yield (
                f"engine.gpus = {list(settings.gpus)}: a node of the profile has {gpus} GPUs, counted from 0, and not "
                f"{beyond}. Name GPUs that it has, with engine.replicas and engine.tp for them; or set gpus_per_node "
                "of the profile"
            )
    if profile.container is None:
        return
    mounts = [mount.split(":") for mount in profile.container.mounts]
    shown = [Path(mount[0]) for mount in mounts if len(mount) == 1 or Path(mount[0]) == Path(mount[1])]
    shown += [Path.home(), Path.cwd(), Path("/tmp")] if profile.container.runtime == "apptainer" else []
    shown += [Path.home()] if "--container-mount-home" in profile.srun else []
    needed = {"the checkout": ROOT} if IN_CHECKOUT else {}
    needed |= {"this directory": Path.cwd(), "the run directory": spec.directory}
    needed |= {
        name: Path(value) for name, value in _paths(spec.settings) if name != "engine.python" and Path(value).exists()
    }
    absolute = {name: Path(os.path.abspath(path)) for name, path in needed.items()}
    if hidden := [f"{n} {p}" for n, p in absolute.items() if not any(p.is_relative_to(place) for place in shown)]:
        listed = "\n  ".join(hidden)
        yield (
            f"the container does not show, under the same name:\n  {listed}\n"
            f"its mounts are {list(profile.container.mounts)}: add /path:/path of a directory that holds them to "
            "container.mounts of the profile"
        )


def _paths(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yields (name of the setting, string) for each string in a config that may be a path."""
    if isinstance(value, str):
        if "/" in value and len(value) < MAX_PATH and value.isprintable():
            yield where, value
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, where)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _paths(inner, f"{where}.{name}" if where else name)
