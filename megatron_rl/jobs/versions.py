"""Reads which versions of torch, NCCL and others an environment has, from its packages' metadata, and compares two."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.requirements import Requirement

ANSWER_S = 30.0
NCCL = "nvidia-nccl"  # with the suffix of a CUDA version: nvidia-nccl-cu13
# Prints the version of every package of an environment as JSON. It runs in an interpreter that lacks this project.
LIST = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}))"
)


class NoEnvironmentError(Exception):
    """An interpreter does not run, or does not say what it has."""


def here() -> dict[str, str]:
    """Returns the versions of this environment's packages by their names, in lower case with hyphens."""
    return _named({each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]})


def of_interpreter(python: str) -> dict[str, str]:
    """Returns the versions of the packages that another interpreter finds. Raises NoEnvironmentError."""
    try:
        done = subprocess.run([python, "-c", LIST], capture_output=True, text=True, timeout=ANSWER_S)
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise NoEnvironmentError(f"{python}: {error}") from error
    if not isinstance(found, dict):
        raise NoEnvironmentError(f"{python} does not start: {done.stderr.strip()[-200:] or 'it says nothing'}")
    return _named(found)


def nccl(versions: Mapping[str, str]) -> str:
    """Returns the version of the NCCL wheel, `2.29.7`; empty where there is none, as with a build of torch for CPUs."""
    return next((versions[name] for name in sorted(versions) if name.startswith(f"{NCCL}-cu")), "")


def differences(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """Returns where the two environments differ in what weights pass through, in words; none where they agree.

    What one of them does not have is not compared.
    """
    pairs = [("torch", trainer.get("torch", ""), engine.get("torch", "")), ("NCCL", nccl(trainer), nccl(engine))]
    return [f"{name} {own} here, {other} there" for name, own, other in pairs if own and other and own != other]


def bounds(package: str, needs: str) -> Requirement | None:
    """Returns what an installed package's metadata asks of another package, in any of its extras; None where it names
    none."""
    try:
        lines: Iterable[str] = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Requirement(line) for line in lines)
    return next((one for one in found if _name(one.name) == needs and one.specifier), None)


def _named(versions: Mapping[str, str]) -> dict[str, str]:
    return {_name(name): version for name, version in versions.items()}


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
