"""Reads the versions of packages such as torch and NCCL in a Python environment, and compares two environments."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ANSWER_S = 30.0
NCCL = "nvidia-nccl"  # package of NCCL without the CUDA suffix; the full name is, for example, nvidia-nccl-cu13
# A program that prints {package: version} of an environment as JSON. It needs no package of this project.
LIST = (
    "import importlib.metadata as m, json; found = reversed([*m.distributions()]); "
    "print(json.dumps({d.metadata['Name']: d.version for d in found if d.metadata['Name']}))"
)


class NoEnvironmentError(Exception):
    """Raised when a Python interpreter does not run, or does not report its packages."""


def of_interpreter(python: str) -> dict[str, str]:
    """Returns {package: version} of another interpreter's environment. Raises NoEnvironmentError if the interpreter
    does not run or does not report its packages.
    """
    try:
        done = subprocess.run([python, "-c", LIST], capture_output=True, text=True, timeout=ANSWER_S)
        packages = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise NoEnvironmentError(f"{python}: {error}") from error
    if not isinstance(packages, dict):
        raise NoEnvironmentError(f"{python} does not start: {done.stderr.strip()[-200:] or 'it says nothing'}")
    return {canonicalize_name(name): version for name, version in packages.items()}


def nccl(versions: Mapping[str, str]) -> str:
    """Returns the version of the NCCL package, such as "2.29.7", or "" if the package is not in `versions`, for example
    with a CPU build of torch.
    """
    return next((versions[name] for name in sorted(versions) if name.startswith(f"{NCCL}-cu")), "")


def differences(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """Returns a text for each difference between the torch and NCCL versions of the trainer and those of the engine to
    which the trainer sends weights. A package that one of the two lacks is not compared."""
    pairs = [("torch", trainer.get("torch", ""), engine.get("torch", "")), ("NCCL", nccl(trainer), nccl(engine))]
    return [f"{name} {a} here, {b} there" for name, a, b in pairs if a and b and a != b]


def bounds(package: str, needs: str) -> Requirement | None:
    """Returns the version requirement that the installed package `package` has for the package `needs`, including
    requirements of extras. Returns None if there is no such requirement or package."""
    try:
        lines: Iterable[str] = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return None
    requirements = (Requirement(line) for line in lines)
    return next((entry for entry in requirements if canonicalize_name(entry.name) == needs and entry.specifier), None)
