"""Tests that a fact which several parts of the package state is the same fact in all of them."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from plan_cases import case_of, spec_of

from megatron_rl.cluster import profile
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.devices import hardware
from megatron_rl.jobs import doctor
from megatron_rl.lib.user_code import one_line
from megatron_rl.planning import plan, totals
from megatron_rl.planning.hardware import DEVICES, GIB, device_name
from megatron_rl.planning.other_commands import Rows

TANGO = ROOT / "examples/published/tango_qwen2.5_7b.yaml"
PACKAGE = ROOT / "megatron_rl"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", ["null", "{rank: 16}"])
@pytest.mark.parametrize(
    "more", [[], ["evaluation.best={metric: generator/accuracy, keep: 2}"], ["recipe.args.train_verifier=false"]]
)
def test_twins_doctor_and_plan_give_a_run_the_same_disk(dtype, lora, more, tmp_path, monkeypatch):
    """doctor counted neither the best checkpoints nor that nothing of a frozen role is saved."""
    settings = [f"run.dir={tmp_path}", "engine={kind: embedded}"]
    settings += [
        f"roles.{role}.{name}"
        for role in ("generator", "verifier")
        for name in (f"model={{path: Qwen/Qwen2.5-7B, dtype: {dtype}}}", f"lora={lora}", "sleep=false")
    ]
    config = config_files.load(TrainConfig, [TANGO], [*settings, "job.nodes=1", "run.save_rollouts_every=0", *more])
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 10 * GIB}))
    found = doctor.examine(spec_of(config), profile.read("a100"), quick=False, environment={})
    [finding] = [check.finding for check in found if check.what == "space there"]
    case = case_of(config, "1x8xA100-80")
    disk = totals.of_training(case, plan.make(case), Rows(user_counts={}, notes=[]), {}).disk / GIB
    assert float(re.search(r"([\d.e+]+) GiB$", finding)[1]) == pytest.approx(disk, rel=0.006)


def test_twins_the_size_of_a_dtype_has_one_table():
    tables = [path for path in PACKAGE.rglob("*.py") if re.search(r'"float32": 4\b', path.read_text())]
    assert tables == [PACKAGE / "config/model.py"]


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 NVL", "NVIDIA L4"]
)
def test_twins_training_and_plan_give_a_gpu_the_same_peak(name):
    planned = DEVICES.get(device_name(name, 79.2))
    assert hardware.peak_flops(name) == (planned and planned.flops)


def test_twins_the_message_of_an_error_becomes_one_line_in_one_place():
    """An error without a message was named by its type in the store, and by nothing, `()`, at a checkpoint."""
    assert one_line(TimeoutError()) == "TimeoutError" and one_line(OSError("no\n space")) == "no space"
    assert len(one_line(OSError("x" * 999))) == 300
    cut = re.compile(r"""["'] ["']\.join\(str\(.*\)\.split\(\)\)""")
    assert [p.name for p in PACKAGE.rglob("*.py") if cut.search(p.read_text())] == ["user_code.py"]
