"""The Triton kernels, run by Triton's interpreter on a CPU, and compiled for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from limits import RUN_S

from megatron_rl.config.schema import ConfigError, Model
from megatron_rl.megatron import model as models

pytest.importorskip("triton", reason="Triton has no package for this machine")
MODULES = {"swiglu": 10, "geglu": 10, "tp": 6}  # of each model: those that take kernels, the model itself among them


def run(script: str, folder, **environment: str) -> str:
    """Runs a script in a process of its own: Triton reads its environment when it is imported."""
    paths = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("helpers", "multi"))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers" / script), str(folder / "out.json"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    return run("kernels_worker.py", tmp_path_factory.mktemp("kernels"), TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", ["swiglu", "geglu", "rope", "norm", "norm from one"])
def test_interpreter_gives_torchs_numbers_and_gradients(errors, name):
    assert errors["small"][name] < 2e-6
    assert errors["small"][f"{name} bf16"] < 2**-7


@pytest.mark.parametrize("name", ["all", "computed again", "logprobs"])
def test_interpreter_gives_the_statistics_of_the_whole_vocabulary(errors, name):
    """Also where a candidate is the label, or stands there twice, and for rows that are cut into chunks,
    whose logits are kept for the backward pass or computed again there."""
    assert errors["head"][name] < 2e-6


@pytest.mark.parametrize("name", MODULES)
def test_interpreter_trains_a_model_as_transformers_does(errors, name):
    """With tensor parallelism the vocabulary is divided, and the second rank has padding."""
    for rank in errors[name]:
        assert rank["logprobs"] < 1e-5 and rank["gradients"] < 1e-5
        assert rank["modules"] == MODULES[name]


def test_the_kernels_that_the_interpreter_runs_compile_for_gpus(tmp_path):
    """Triton's package has NVIDIA's assembler: nothing but the machine's code is left to run."""
    sizes = run("kernels_compiled.py", tmp_path, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert len(sizes) == 2 * 10 and min(sizes.values()) > 1000


def test_interpreter_shows_that_a_kernel_is_tried_before_a_model_takes_it(errors):
    told = errors["tried"]
    assert told["whole"] is None
    for name in ("wrong", "nan"):
        assert "the gate of SwiGLU in float32 is off by" in told[name] and "rotary" not in told[name]
    assert told["broken"] == "the gate of SwiGLU does not run: TritonError: no such instruction"


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("norm", "the norm"), ("peak", "the head's statistics"), ("others", "the head's gradient")],
)
def test_interpreter_shows_each_part_of_a_kernel_that_is_wrong_in_both_formats(errors, name, kernel):
    """Small numbers of the head were compared with its largest ones."""
    sentences = errors["tried"][name].split("; ")
    assert {one.split(" in ")[1].split()[0] for one in sentences} == {"float32", "bfloat16"}
    assert all(one.startswith(kernel) for one in sentences)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_triton_without_a_gpu_or_its_interpreter_is_refused(monkeypatch, alone):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not models.uses_triton(Model(path="x"), alone)
    with pytest.raises(ConfigError, match=r"there is no GPU \(rank 0\); set it to auto or torch"):
        models.uses_triton(Model(path="x", kernels="triton"), alone)


def test_kernels_that_are_wrong_on_a_gpu_are_not_taken_by_themselves(monkeypatch, alone, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(models.choice, "obstacle", lambda: "the norm in float32 is off by 1.0e+00")
    assert not models.uses_triton(Model(path="x"), alone) and "the norm in float32 is off" in caplog.text
    with pytest.raises(ConfigError, match="the norm in float32 is off"):
        models.uses_triton(Model(path="x", kernels="triton"), alone)


def test_no_rank_takes_kernels_that_another_cannot_have(monkeypatch, alone, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(models.choice, "obstacle", lambda: None)
    assert models.uses_triton(Model(path="x"), alone)
    monkeypatch.setattr(models, "all_gather", lambda own, group: [own, "Triton is not installed"])
    assert not models.uses_triton(Model(path="x"), alone) and "not installed (rank 1)" in caplog.text
