"""The kit for one GPU: what it names, and how it tells what could not be measured."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

import common
import gpu
import pytest
import torch
from gpu_kit import clock, engine, subjects, train
from gpu_kit import findings as gpu_findings
from gpu_kit.findings import DeviceLost, Findings, NotMeasured, first_that_fits

ROOT = Path(__file__).parents[3]
KIT = ROOT / "tools/gpu_kit"
sys.path[:0] = [str(KIT)]

import check  # noqa: E402


def named(file: str) -> dict[str, str]:
    """Returns {name: rest of the line} of a file in pip's form."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    pairs = (re.match(r"([\w.-]+)(.*)", line) for line in lines if line)
    return {found[1].lower().replace("_", "-"): found[2] for found in pairs if found}


def arguments(tmp_path, *, held: bool = True) -> argparse.Namespace:
    return argparse.Namespace(json=tmp_path / "found.json", check=held)


def test_every_package_that_the_project_needs_is_brought_or_expected():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {re.match(r"[\w-]+", need)[0].lower().replace("_", "-") for need in needs}
    assert len(wanted) > 10 and wanted <= named("tools/gpu_kit/wheels.txt").keys() | named("tools/gpu_kit/machine.txt")


def test_the_wheels_have_the_versions_that_the_tests_have_passed_with():
    tested = named("constraints.txt")
    assert all(tested[name] == version for name, version in named("tools/gpu_kit/wheels.txt").items())


def test_missing_and_other_versions_are_named(tmp_path):
    file = tmp_path / "wanted.txt"
    file.write_text("# a comment\npytest>=8\nno-such-package==1\ntorch>=99\nnumpy==0.1  # small\n")
    found = check.problems(file)
    assert found[0] == "no-such-package is missing (wanted.txt)"
    assert found[1] == f"torch is {torch.__version__}, wanted.txt wants >=99" and found[2].endswith("wants ==0.1")
    assert len(found) == 3 and not check.problems(KIT / "machine.txt")


def test_a_bar_without_a_metric_is_missed_and_says_why(tmp_path, capsys):
    findings = Findings({"a/x": 1.0, "a/y": 1.0, "b/x": 0.5, "c": 1.0}, file=tmp_path / "found.json")

    def refuses():
        raise NotMeasured("this machine has none")

    findings.take("a", refuses)
    assert json.loads((tmp_path / "found.json").read_text())["complete"] is False
    findings.take("b", lambda: {"x": 0.75, "z": 2})
    with pytest.raises(SystemExit) as end:
        findings.finish(arguments(tmp_path))
    told = json.loads((tmp_path / "found.json").read_text())
    assert (
        end.value.code == 1 and told["missed"] == ["a/x", "a/y", "c"] and told["metrics"] == {"b/x": 0.75, "b/z": 2.0}
    )
    assert told["not_measured"]["a/y"] == "this machine has none" and told["not_measured"]["c"] == "nothing measured it"
    assert "a/x: not measured (MISSED): this machine has none" in capsys.readouterr().out


def test_a_limit_is_missed_by_a_greater_figure_or_by_none(tmp_path):
    findings = Findings({}, limits={"refit/seconds": 0.2, "a/s": 1.0, "b/s": 1.0}, file=tmp_path / "found.json")
    findings.take("refit", lambda: {"seconds": 0.3})
    findings.take("a", lambda: {"s": 0.5})
    with pytest.raises(SystemExit):
        findings.finish(arguments(tmp_path))
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["missed"] == ["b/s", "refit/seconds"] and told["not_measured"] == {"b/s": "nothing measured it"}


def fails():
    raise AssertionError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasGemmEx")


def test_an_error_is_a_reason_and_what_comes_next_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_findings, "device_problem", lambda: None)
    findings = Findings({"a/x": 1.0, "b/x": 0.5}, file=tmp_path / "found.json")
    findings.take("a", fails)
    findings.take("b", lambda: {"x": 1})
    findings.finish(arguments(tmp_path, held=False))
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["not_measured"] == {"a/x": "AssertionError: CUBLAS_STATUS_NOT_SUPPORTED"} and told["complete"]
    assert told["metrics"] == {"b/x": 1.0} and told["missed"] == ["a/x"]
    assert "when calling cublasGemmEx" in capsys.readouterr().err  # the traceback


def test_a_device_that_is_lost_ends_the_measurements_and_leaves_those_made(tmp_path, monkeypatch):
    def run(findings: Findings, scale: object, folder: object) -> None:
        findings.take("a", lambda: {"x": 1})
        findings.take("b", fails)
        raise AssertionError("a lost device was measured")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(common, "machine", dict)
    monkeypatch.setattr(gpu_findings, "device_problem", lambda: "an illegal memory access was encountered")
    monkeypatch.setitem(gpu.PARTS, "train", (run, {"a/x": 1.0, "b/x": 1.0, "c/x": 1.0}, {}))
    with pytest.raises(SystemExit) as end:
        gpu.main(["train", "--json", str(tmp_path / "found.json")])
    told = json.loads((tmp_path / "found.json").read_text())
    lost = "the device could not be used any more after b: an illegal memory access was encountered"
    assert end.value.code == 1 and told["metrics"] == {"a/x": 1.0} and not told["complete"] and told["stopped"] == lost
    assert told["not_measured"] == {"b/x": "AssertionError: CUBLAS_STATUS_NOT_SUPPORTED", "c/x": lost}


def test_an_error_of_the_device_that_shows_late_is_noted_at_its_measurement(tmp_path, monkeypatch):
    """It showed outside of the measurement: of the figures that were missing then, `nothing measured` them."""

    def refuses() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuses)
    findings = Findings({"a/x": 1.0, "b/x": 0.5}, file=tmp_path / "found.json")
    with pytest.raises(DeviceLost, match="could not be used any more after a: CUDA error: an illegal"):
        findings.take("a", lambda: {"x": 1})
    findings.finish(arguments(tmp_path, held=False), complete=False)
    told = json.loads((tmp_path / "found.json").read_text())
    error = "CUDA error: an illegal memory access was encountered"
    lost = f"the device could not be used any more after a: {error}"
    assert told["not_measured"] == {"a/x": f"the device failed: {error}", "b/x": lost} and told["stopped"] == lost
    assert not told["metrics"]


def test_a_full_memory_after_a_measurement_does_not_end_the_others(tmp_path, monkeypatch):
    def full() -> None:
        raise torch.cuda.OutOfMemoryError("too much")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", full)
    findings = Findings({}, file=tmp_path / "found.json")
    findings.take("a", lambda: {"x": 1})
    assert findings.figures == {"a/x": 1.0} and not findings.unmeasured


def test_nothing_begins_after_the_time_is_over(tmp_path):
    findings = Findings({}, minutes=-1.0)
    findings.take("late", lambda: {"x": 1})
    assert not findings.figures and findings.unmeasured["late"].startswith("-1 minutes were over")


def test_what_does_not_fit_is_tried_with_less_memory():
    def grows():
        raise torch.cuda.OutOfMemoryError("too much")

    assert first_that_fits([("none", grows), ("full", lambda: 3)]) == ("full", 3)
    with pytest.raises(NotMeasured, match="out of memory with each of: none, mlp"):
        first_that_fits([("none", grows), ("mlp", grows)])


def test_the_peak_of_a_device_is_found_by_its_name(monkeypatch):
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert clock.peak_flops() == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    with pytest.raises(NotMeasured, match="RTX 4090"):
        clock.peak_flops()


@pytest.mark.parametrize("tokens", subjects.FULL.tokens)
@pytest.mark.parametrize("kind", train.KINDS)
def test_batches_are_full_and_their_lengths_as_asked(kind, tokens):
    for seed in range(20):
        lengths = subjects.lengths_of(kind, tokens, subjects.FULL, seed)
        assert sum(lengths) == tokens and min(lengths) > 1 and max(lengths) <= subjects.FULL.longest + 1
        assert (len({*lengths}) == 1) == (kind == "equal")


def test_every_bar_names_a_metric_that_is_measured():
    cases = {
        f"{n}/{subjects.count_name(t)}/{k}/mfu"
        for n in subjects.PUBLIC
        for t in subjects.FULL.tokens
        for k in train.KINDS
    }
    assert train.BARS.keys() <= cases and {*train.BARS.values()} == {0.45}
    assert {name.partition("/")[0] for name in (*engine.BARS, *engine.LIMITS)} == {
        "rows32", "rows256", "refit", "sleep",
    }  # fmt: skip
