"""The sdist, and the wheel that is built from it, work outside of the checkout: `check`, `train`, `report`, `submit`.

The wheel is installed into an environment of its own, which has the other packages of the environment of the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from limits import RUN_S
from slurm_cluster import Cluster

from megatron_rl import __version__

URL = "https://host.example/lab/megatron_rl"
pytestmark = [pytest.mark.multi, pytest.mark.slow]


def run(words: list[str | Path], directory: Path, **variables: str) -> str:
    """Runs a program in a directory, without PYTHONPATH. Returns what it prints."""
    kept = {name: value for name, value in {**os.environ, **variables}.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, words)],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Builds an sdist or a wheel of `source` as pip does, with setuptools' own backend. Returns its file."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print('built', build_meta.build_{kind}({str(target)!r}))"
    said = run([sys.executable, "-c", code], source, REPOSITORY_URL=URL)
    return target / re.findall(r"^built (\S+)$", said, re.MULTILINE)[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The unpacked sdist of the tracked files, and the wheel that is built from the sdist."""
    base = tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (base / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (base / "tree" / name).write_bytes((ROOT / name).read_bytes())
    with tarfile.open(build("sdist", base / "tree", base / "out")) as archive:
        archive.extractall(base, filter="data")
    source = base / f"megatron_rl-{__version__}"
    missing = {name for name in filter(None, files.split("\0")) if not (source / name).exists()}
    assert not missing, f"the sdist lacks {sorted(missing)[:5]}"
    return source, build("wheel", source, base / "out")


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The program of an environment with the wheel. Other packages are those of the environment of the tests."""
    base = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", base / "own"], base)
    python = base / "own/bin/python"
    own = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], base).strip())
    (own / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[1]], base)
    found = run([python, "-c", "import megatron_rl; print(megatron_rl.__file__)"], base)
    assert Path(found.strip()).is_relative_to(base), found
    return base / "own/bin/megatron-rl"


@pytest.fixture(scope="module")
def first(installed, tmp_path_factory) -> Path:
    """A directory outside of the checkout, with a config whose tiny model is trained for two updates."""
    home = tmp_path_factory.mktemp("home")
    run([installed, "init", "grpo", "first.yaml", "--tiny", "tiny"], home)
    run([installed, "init", "profile", "site.yaml"], home)
    return home


def test_metadata_of_the_wheel_has_the_address_of_the_release(built):
    with zipfile.ZipFile(built[1]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        said, files = wheel.read(name).decode(), wheel.namelist()
    assert f"Version: {__version__}\n" in said and "License-Expression: Apache-2.0\n" in said
    assert all(f"Python :: 3.{minor}\n" in said for minor in (11, 12, 13))
    assert f"Project-URL: Source, {URL}\n" in said
    assert f"]({URL}/raw/v{__version__}/docs/demo.png)" in said
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", said), "a package index does not have what a link leads to"
    assert {"megatron_rl/py.typed", "megatron_rl/slurm/job.sh"} <= {*files}
    assert not [name for name in files if not name.startswith("megatron_rl")]


def test_the_wheel_checks_trains_and_reports(installed, first):
    assert run([installed, "--version"], first).strip() == f"megatron-rl {__version__}"
    assert "valid" in run([installed, "check", "first.yaml"], first)
    run([installed, "train", "first.yaml", "run.name=first", "recipe.args.updates=2", "evaluation.every=0"], first)
    assert "runs/first/report.html" in run([installed, "report", "runs/first"], first)
    said = run([installed, "submit", "first.yaml", "run.name=job", "--profile=site.yaml", "--dry-run"], first)
    root = Path(
        run([installed.with_name("python"), "-c", "import megatron_rl as m; print(m.__path__[0])"], first).strip()
    )
    assert f"\nROOT={root}\nPYTHON={installed.with_name('python')}\n" in said
    assert (root / "slurm/job.sh").is_file() and str(ROOT) not in said


@pytest.mark.matrix  # a Slurm cluster: `make test-more ONLY=wheel`
def test_the_wheel_submits_a_run_that_slurm_trains(installed, first, slurm: Cluster):
    profile = "time: '00:10:00'\nwarning_s: 60\nranks_per_node: 1\ngpus_per_node: 0\ncpus_per_rank: 1\n"
    (first / "cpu.yaml").write_text(profile)
    said = run(
        [installed, "submit", "first.yaml", "run.name=slurm", "recipe.args.updates=2", "--profile=cpu.yaml"],
        first, **slurm.environment(),
    )  # fmt: skip
    [job] = re.findall(r"job (\d+)$", said, re.MULTILINE)
    states = slurm.wait(job)
    logs = "\n".join(path.read_text()[-2000:] for path in (first / "runs/slurm/logs").glob("*.out"))
    assert "COMPLETED" in states.values(), f"{states}\n{logs}"
    assert "finished" in run([installed, "status", "runs/slurm"], first, **slurm.environment()), logs
