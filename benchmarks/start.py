"""Measures how soon a command speaks: `--help`, `check`, and `train` to its first line, first iteration and longest
silence.

    python benchmarks/start.py --against /path/of/another/checkout --check

The run is the demo's (Tango on two ranks) on the models that `make demo` leaves in runs/last_letter/a; `--models` names
another folder with task/, generator/model and verifier/model. `--against` measures another checkout too, in turn with
this one: ratios are of the medians of both. Files are read once before, so that the disk plays no part.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import psutil

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"first_line_s": 1.5, "first_iteration_s": 8.0, "check_cpu_s": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "runs/last_letter/a", help="the demo's task and models")
    parser.add_argument("--against", type=Path, help="another checkout, measured too")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured (default: 3)")
    common.add_arguments(parser)
    args = parser.parse_args()
    places = {"": ROOT} | ({"before/": args.against.resolve()} if args.against else {})
    samples: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):
        for label, place in places.items():
            for name, value in measure(place, args.models.resolve()).items():
                if number:  # the first round reads the files
                    samples.setdefault(label + name, []).append(value)
    metrics = {name: statistics.median(values) for name, values in sorted(samples.items())}
    for name in [name for name in metrics if f"before/{name}" in metrics and metrics[name]]:
        metrics[f"ratio/{name}"] = metrics[f"before/{name}"] / metrics[name]
    common.finish(metrics, {}, args, limits=LIMITS)


def measure(place: Path, models: Path) -> dict[str, float]:
    """Returns the seconds of one checkout's commands."""
    settings = [
        str(place / "examples/miniatures/last_letter/tango.yaml"),
        f"data.path={models}/task/train.jsonl",
        f"evaluation.sets=[{{path: {models}/task/test.jsonl, settings: last_letter}}]",
        *(f"roles.{role}.model.path={models}/{role}/model" for role in ("generator", "verifier")),
    ]
    metrics = {}
    for name, words in {"help": ["--help"], "train_help": ["train", "--help"], "check": ["check", *settings]}.items():
        metrics |= {f"{name}_{kind}": value for kind, value in _whole(place, words).items()}
    return metrics | _run(place, settings)


def _command(place: Path, words: list[str]) -> dict[str, object]:
    """Returns how the program is started from a checkout."""
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles the package anew
    return {"args": [sys.executable, "-m", "megatron_rl.main", *words], "cwd": place, "env": environment}


def _whole(place: Path, words: list[str]) -> dict[str, float]:
    """Runs a command to its end. -> seconds by the clock and of CPU"""
    start, cpu_before = time.monotonic(), _cpu_s()
    subprocess.run(**_command(place, words), check=True, stdout=subprocess.DEVNULL)  # type: ignore[call-overload]
    return {"s": time.monotonic() - start, "cpu_s": _cpu_s() - cpu_before}


def _run(place: Path, settings: list[str]) -> dict[str, float]:
    """Starts the demo's run and ends it after its first iteration. -> seconds to its first line and iteration, the
    longest time without a line before that iteration, and CPU seconds of all processes"""
    directory = Path(tempfile.mkdtemp(prefix="start_"))
    words = ["train", *settings, f"run.dir={directory}", "run.name=a", "evaluation.at_start=false"]
    start = time.monotonic()
    process = subprocess.Popen(
        **_command(place, words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # type: ignore[call-overload]
    moments: list[float] = []
    try:
        for text in process.stdout:
            moments.append(time.monotonic() - start)
            if text.startswith("iteration 1/"):
                break
        else:
            raise RuntimeError(f"the run in {place} ended before its first iteration, with status {process.wait()}")
        cpu_s = _tree_cpu_s(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)
    silences = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
    return {
        "first_line_s": moments[0],
        "first_iteration_s": moments[-1],
        "longest_silence_s": max(silences),
        "train_cpu_s": cpu_s,
    }


def _tree_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process and of all below it, so far."""
    process = psutil.Process(pid)
    times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def _cpu_s() -> float:
    """Returns the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
