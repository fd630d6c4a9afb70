"""Writes slurm/gpu/wheels.json: what the packages of slurm/gpu/versions.txt ask for, from their own metadata.

pip finds the packages, with its own configuration. Needs a network; nothing is installed. Run it after a change of a
version:
  python tools/engines/wheels.py
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

GPU = Path(__file__).parents[2] / "slurm/gpu"
TIMEOUT_S = 120.0
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 29)]  # Python 3.12 on Linux, x86-64


def main() -> None:
    pins = [line.split("==") for line in (GPU / "versions.txt").read_text().splitlines() if line and line[0] != "#"]
    packages = {name: _metadata(name, version) for name, version in pins}
    (GPU / "wheels.json").write_text(json.dumps(packages, indent=1) + "\n")
    print(f"{len(packages)} packages", file=sys.stderr)


def _metadata(name: str, version: str) -> dict[str, Any]:
    """Returns what pip says of the wheel, or of a package without wheels what its source archive says."""
    return _of_wheel(name, version) or _of_source(name, version)


def _of_wheel(name: str, version: str) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        words += ["--only-binary=:all:", "--python-version=3.12", f"--target={directory}", f"--report={report}"]
        words += [f"--platform={platform}" for platform in PLATFORMS]
        done = subprocess.run([*words, f"{name}=={version}"], stderr=subprocess.DEVNULL)
        if done.returncode:
            return None
        [installed] = json.loads(report.read_text())["install"]
    stated = installed["metadata"]
    return {
        "file": installed["download_info"]["url"].rpartition("/")[2],
        "version": stated["version"],
        "requires_python": stated.get("requires_python"),
        "requires": stated.get("requires_dist", []),
    }


def _of_source(name: str, version: str) -> dict[str, Any]:
    """Returns what a package's source archive says. pip finds the archive; its build is not wanted and may fail."""
    stem = f"{name.replace('-', '_')}-{version}"
    words = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--no-build-isolation", "--no-binary=:all:"]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run([*words, f"--dest={directory}", f"{name}=={version}"], capture_output=True, text=True)
    address = re.search(rf"https?://\S+/{re.escape(stem)}\.tar\.gz", done.stdout)
    if address is None:
        sys.exit(f"pip finds no {stem}.tar.gz:\n{done.stdout}{done.stderr}")
    with urllib.request.urlopen(address[0], timeout=TIMEOUT_S) as answer:
        content = answer.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        member = archive.extractfile(f"{stem}/PKG-INFO")
        assert member is not None
        head = HeaderParser().parsestr(member.read().decode())
    return {
        "file": f"{stem}.tar.gz",
        "version": head["Version"],
        "requires_python": head["Requires-Python"],
        "requires": head.get_all("Requires-Dist", []),
    }


if __name__ == "__main__":
    main()
