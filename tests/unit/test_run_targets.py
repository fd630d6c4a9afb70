"""`make test-more` runs every target that `make test` leaves out, and says which have failed."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IN_TEST = {
    "test",
    "test-alone",
    "test-slurm",
    "test-ranks",
    "test-servers",
    "test-unit",
}  # `make test`, and parts of it
GPU = {"test-gpu", "test-gpu-here"}  # need a GPU
PARTS = {"test-emulated-runs", "test-emulated-parts", "test-numbers"}  # of test-emulated and test-processors


def test_a_failed_target_does_not_stop_the_others_and_is_named(tmp_path):
    (tmp_path / "Makefile").write_text(
        "good:\n\t@echo '==== 3 passed, 1 skipped in 1.20s ===='\nbad:\n\t@echo broken; exit 1\nlast:\n\ttouch last\n"
    )
    words = [sys.executable, str(ROOT / "tools/run_targets.py"), "good", "bad", "last"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines()[-3:]]
    assert rows == [
        ["good", "passed", "0.0", "3 passed, 1 skipped"],
        ["bad", "failed", "0.0"],
        ["last", "passed", "0.0"],
    ]
    assert done.returncode == 1 and (tmp_path / "last").exists()
    assert "broken" in (tmp_path / "runs/test_more/bad.log").read_text()


def test_no_target_of_tests_is_left_out():
    makefile = (ROOT / "Makefile").read_text()
    made, listed = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)), set(targets())
    assert listed <= made
    tests = {name for name in made if name.startswith("test")} - IN_TEST - GPU - PARTS - {"test-more"}
    tests |= {name for name in made if name.endswith("-mini")}
    assert tests <= listed


def targets() -> list[str]:
    return runpy.run_path(str(ROOT / "tools/run_targets.py"))["TARGETS"]
