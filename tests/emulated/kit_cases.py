"""Runs the benchmarks and the tests that are made for one GPU on the pretended device, with tiny models."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def kit_benchmark(own: Path, part: str, sleep_fails: bool = False) -> dict[str, Any]:
    """Runs `python benchmarks/gpu.py PART --tiny --json FILE`. Returns what the file holds.

    `sleep_fails`: whether the measurement of sleep ends with an error, as a kernel's that does not compile would.
    """
    import gpu

    def fail(*unused: Any) -> dict[str, float]:
        raise RuntimeError("Triton Error [CUDA]: out of resource: shared memory\nReducing block sizes may help.")

    _prepare()
    if sleep_fails:
        gpu.engine._sleep = fail
    file = own / f"{part}.json"
    gpu.main([part, "--tiny", "--json", str(file)])
    return json.loads(file.read_text())


def kit_tests(own: Path, last_letter: str) -> dict[str, list[str]]:
    """Runs tests/gpu as `lease.sh tests` does. Returns the names of the tests by what became of them.

    `last_letter`: the folder of the fixture of this name, which is not made again.
    """
    _prepare()
    (own / "last_letter").symlink_to(last_letter)
    os.environ.update(MEGATRON_RL_GPU_TESTS="tiny", MEGATRON_RL_TEST_SHARED=str(own))
    os.chdir(ROOT)
    seen: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    class Notes:
        """Notes the outcome of every test."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                seen[report.outcome].append(report.nodeid)

    words = ["tests/gpu", "-q", "-p", "no:cacheprovider", f"--basetemp={own / 'tests'}"]
    pytest.main(words, plugins=[Notes()])
    return seen


def kit_smoke(own: Path) -> dict[str, Any]:
    """Runs the checks of `megatron-rl doctor --gpu` with tiny tensors. Returns what their file holds, and the rows of
    the table.
    """
    from megatron_rl.jobs import doctor

    _prepare()
    rows = doctor.smoke(own / "smoke.json", tiny=True)
    return {"file": json.loads((own / "smoke.json").read_text()), "rows": [asdict(row) for row in rows]}


def kit_quick(own: Path) -> dict[str, Any]:
    """Runs `python tools/gpu_kit/quick.py FILE --tiny`. Returns what the file holds."""
    import quick

    _prepare()
    quick.main([str(own / "quick.json"), "--tiny", "--minutes", "10"])
    return json.loads((own / "quick.json").read_text())


def _prepare() -> None:
    """Lets the engine's process be a fork: one that is started anew would not have the pretended device."""
    from gpu_kit import two_processes

    two_processes.START[0] = "fork"
    gc.collect()
    gc.freeze()  # what the server has imported is not looked through by each collection of the kit's
    sys.argv[:] = ["gpu.py"]
