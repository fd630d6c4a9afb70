"""Measures the report: how long a page of a long run takes, how much memory, how large it is, how fast a browser is.

The run is made here: many iterations of metrics as a Tango run logs them, evaluations, refits, and rollouts in 400
iterations. `--against DIR` measures the package in another checkout on the same run too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests/helpers")]

import numpy as np  # noqa: E402
from browser import Browser, chromium  # noqa: E402
from common import add_arguments, cpu_seconds, finish  # noqa: E402

from megatron_rl.config.schema import Run  # noqa: E402
from megatron_rl.run.run_directory import RunDirectory, open_run  # noqa: E402
from megatron_rl.texts.text import Decoded  # noqa: E402
from megatron_rl.training.iteration import Collected, Iteration  # noqa: E402
from megatron_rl.training.store import IterationStore  # noqa: E402
from megatron_rl.types import Author, Rollout, Stop, spans_of  # noqa: E402

FILES = 400  # iterations whose rollouts are kept
FIGURES = (
    *("alpha", "clip_frac", "engine_gap", "engine_kl", "entropy", "finished", "grad_norm", "groups_without_signal"),
    *("kl_ref", "length", "loss", "lr", "micro_batches", "packed_tokens", "predicted_positive", "ratio", "samples"),
    *("reward/outcome", "reward/format", "reward/trained", "skipped", "staleness", "steps_per_solution", "tokens"),
    *("step_agreement", "trained_tokens", "verdicts_match", "version_lag"),
    *("confusion/tp", "confusion/fp", "confusion/tn", "confusion/fn"),
)
PHASES = ("refit", "review", "reward", "rollout", "save", "train")
WORDS = [
    "so the next number must be", " therefore", " 12", " 7", " <step>", "</step>", "\n", " we add", " and carry one",
    " wait, let me check that again", " the answer is", " \\boxed{", "}", " because", " which gives", " x = ",
]  # fmt: skip
MEASURED = """
import json, sys, time
from pathlib import Path
from megatron_rl.report.pages import write_report
start = time.process_time()
options = {"rollouts": int(sys.argv[2])} if len(sys.argv) > 2 else {}
path = write_report(Path(sys.argv[1]), **options)
status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory before the program began
peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps([time.process_time() - start, peak, path.stat().st_size / 2**20]))
"""


def main() -> None:
    """Prints the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100_000, help="iterations of metrics (default: 100000)")
    parser.add_argument("--rollouts", type=int, default=100_000, help="rollouts that are kept (default: 100000)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout to measure")
    parser.add_argument("--run", type=Path, metavar="DIR", help="keep the run here, or measure the one that is here")
    add_arguments(parser)
    args = parser.parse_args()
    # a browser that was closed may still write into its profile
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        run = args.run or Path(place) / "run"
        if not run.exists():
            make_run(run, args.iterations, args.rollouts)
        repository = Path(__file__).resolve().parents[1]
        metrics = named("page", measure(repository, run))
        if args.against is not None:
            metrics |= named("page, other checkout", measure(args.against.resolve(), run))
            for what in ("CPU s", "peak MB"):
                metrics[f"{what}, other / this"] = metrics[f"page, other checkout: {what}"] / metrics[f"page: {what}"]
        metrics |= named("page of all rollouts", measure(repository, run, str(args.rollouts)))
        if chromium() is not None:
            metrics |= look(run / "report.html", Path(place) / "profile")
    limits = {"page: CPU s": 15, "page: peak MB": 250, "page: MB": 12, "page of all rollouts: peak MB": 350}
    if chromium() is not None:
        limits |= {"page of all rollouts: opened, s": 3, "page of all rollouts: filtered, s": 1}
    finish(metrics, {}, args, limits=limits)


def make_run(directory: Path, iterations: int, rollouts: int) -> None:
    """Writes the run: a line of metrics for each iteration, an evaluation and a refit for each hundredth and tenth."""
    draw = random.Random(0)
    run = open_run(Run(dir=str(directory.parent), name=directory.name), "run: {name: long, seed: 1}\n")
    with run.metrics.open("w") as lines, run.refits.open("w") as refits:
        for iteration in range(iterations):
            role = "verifier" if iteration % 4 == 3 else "generator"
            metrics = {name: draw.random() for name in FIGURES}
            line = {
                "iteration": iteration,
                "cycle": iteration // 4,
                "scope": role,
                "time": {name: draw.random() for name in PHASES},
            }
            lines.write(json.dumps(line | {"metrics": metrics}) + "\n")
            if iteration % 100 == 0:
                held_out = {f"{role}/accuracy": iteration / iterations, f"{role}/num_problems": 512.0}
                lines.write(json.dumps(line | {"scope": "eval", "metrics": held_out}) + "\n")
            if iteration % 10 == 0:
                refits.write(json.dumps({"role": role, "version": iteration, "refit/seconds": draw.random()}) + "\n")
    keep_rollouts(run, iterations, rollouts, draw)


def keep_rollouts(run: RunDirectory, iterations: int, rollouts: int, draw: random.Random) -> None:
    """Writes the rollouts into files of iterations, evenly over the run: texts of about 150 tokens, groups of ten."""
    store = IterationStore(run.rollouts, decode=decode)
    per_file = rollouts // min(FILES, iterations)
    for file in range(min(FILES, iterations)):
        number = file * (iterations // min(FILES, iterations))
        iteration = Iteration(cycle=number // 4, index=0, roles=("generator",), number=number)
        store.put(
            iteration,
            Collected(rollouts={"generator": [rollout(draw, i // 10) for i in range(per_file)]}, metrics={}),
            {},
        )


def rollout(draw: random.Random, group: int) -> Rollout:
    length = draw.randrange(100, 200)
    right = draw.random() < 0.5
    verdict = "CORRECT" if draw.random() < 0.7 else "INCORRECT"
    review = f"<final_verification>\\boxed{{{verdict}}}</final_verification>"
    tokens = np.array([draw.randrange(len(WORDS)) for _ in range(length)], np.int32)
    return Rollout(
        role="generator", group=f"problem {group}", tokens=tokens, logprobs=np.full(length, -0.5, np.float32),
        spans=spans_of((20, Author.ENVIRONMENT, -1), (length - 20, Author.POLICY, 3)), stop=Stop.EOS,
        rewards={"outcome": float(right)}, advantages=draw.gauss(0, 1),
        payload={"question": f"What comes after {group}?", "answer": "12", "correct": right, "verdicts": [1, -1],
                 "review": review},
    )  # fmt: skip


def decode(role: str, tokens) -> Decoded:
    words = [WORDS[token].encode() for token in tokens]
    ends, total = [], 0
    for word in words:
        total += len(word)
        ends.append(total)
    joined = b"".join(words)
    return Decoded(joined.decode(), joined, np.array(ends, np.int64))


def measure(package: Path, run: Path, *options: str) -> tuple[float, float, float]:
    """Writes the page in a process of its own. -> (CPU seconds, peak memory in MB, size of the page in MB)."""
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MEASURED, str(run), *options]
    done = subprocess.run(words, env=environment, cwd=package, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    seconds, peak, size = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak, size


def named(what: str, figures: tuple[float, float, float]) -> dict[str, float]:
    return {f"{what}: {name}": value for name, value in zip(("CPU s", "peak MB", "MB"), figures, strict=True)}


def look(page: Path, profile: Path) -> dict[str, float]:
    """Opens the page of all rollouts. -> seconds until its first rollouts and curves are there, and of a filter."""
    with Browser(profile) as browser:
        cpu_before = cpu_seconds([browser.process])
        opened = browser.open(page)
        shown = browser.run('return document.querySelectorAll("#rollout-page > .sample").length;')
        spent = cpu_seconds([browser.process]) - cpu_before
        filtered = browser.run(
            """
          const start = performance.now();
          const list = document.getElementById("rollout-verdict");
          list.value = "disagrees";
          list.dispatchEvent(new Event("change"));
          const count = document.getElementById("rollout-count"), told = count.textContent;
          while (count.textContent === told) await new Promise((done) => setTimeout(done, 5));
          return (performance.now() - start) / 1000;
        """
        )
        heap = browser.call("Runtime.getHeapUsage")["usedSize"] / 2**20
        if browser.errors or not shown:
            sys.exit(f"the page is not sound: {shown} rollouts shown, {browser.errors}")
    names = ("opened, s", "opened, CPU s", "filtered, s", "heap of scripts, MB")
    values = zip(names, (opened, spent, filtered, heap), strict=True)
    return {f"page of all rollouts: {name}": value for name, value in values}


if __name__ == "__main__":
    main()
