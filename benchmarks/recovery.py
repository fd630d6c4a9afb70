"""Measures how a long run recovers from faults, on a real Slurm cluster of four nodes on this machine.

The run is Tango on the last-letter models: two ranks on two nodes, embedded engines, a checkpoint after every step. It
meets --faults faults of these kinds, drawn by --seed, each after a few iterations without one:

    rank       SIGKILL to a rank                      hang      SIGSTOP to a rank: it neither works nor ends
    node       SIGKILL to all of a node, slurmd too   save      SIGKILL to a rank while a checkpoint is written
    requeue    scontrol requeue                       warning   SIGUSR1 to the batch script, as before the time limit

`KIND/seconds` is the mean time from the fault until an iteration is done that was not done before. It includes the time
in which Slurm notices a dead node (SlurmdTimeout, 10 s here, and its own rounds) and run.hang_after_s (10 s here).
`iterations_lost` is the mean number of iterations done again after a fault. `prompts_lost` counts the prompts of
iterations that are missing, doubled or without all their answers at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import common
import psutil
from rich.progress import track

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/miniatures/last_letter"
sys.path[:0] = [str(ROOT / "tests/helpers"), str(EXAMPLE)]
from slurm_cluster import Cluster, SlurmError, missing_commands  # noqa: E402

from megatron_rl.cluster import job_slices  # noqa: E402
from megatron_rl.run.metrics import read_metrics  # noqa: E402
from megatron_rl.training.store import ROLLOUTS, iteration_files, read_rows  # noqa: E402

KINDS = ("rank", "hang", "node", "save", "requeue", "warning")
PROMPTS, SAMPLES, HANG_S, GIVE_UP_S, LOOK_S = 8, 5, 10, 300.0, 0.1
SITE = f"""
time: "04:00:00"
warning_s: 120
ranks_per_node: 1
gpus_per_node: 0
cpus_per_rank: 1
exclusive: true
environment: {{OMP_NUM_THREADS: "1"}}
python: {sys.executable}
"""


class Watched:
    """A run that is observed through its directory and Slurm."""

    def __init__(self, cluster: Cluster, run: Path, job: str) -> None:
        self.cluster, self.run, self.job = cluster, run, job

    def last_iteration(self) -> int:
        return max((row.iteration for row in read_metrics(self.run) if row.scope != "eval"), default=-1)

    def element(self) -> str:
        """Returns the element of the chain that runs."""
        self.until("a running element", lambda: "RUNNING" in self.cluster.states(self.job).values())
        return next(element for element, state in self.cluster.states(self.job).items() if state == "RUNNING")

    def ranks(self) -> list[psutil.Process]:
        """Returns the rank processes that srun started, without the processes that these have started."""
        processes = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            with contextlib.suppress(psutil.Error):
                is_own = (
                    words[1:4] == ["-m", "megatron_rl.main", "train"] and str(self.run / "jobs/config.yaml") in words
                )
                if is_own and process.parent().name().startswith("slurmstepd"):
                    processes.append(process)
        return processes

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + GIVE_UP_S
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"{what}: not within {GIVE_UP_S:.0f} s; see {self.run}/logs")
            time.sleep(LOOK_S)


def strike(kind: str, watched: Watched, rng: random.Random) -> tuple[str | None, float]:
    """Makes a fault. Returns (a node to be brought back or None, the time of the fault)."""
    cluster = watched.cluster
    if kind == "save":
        watched.until("a checkpoint under way", lambda: any((watched.run / "checkpoints").glob(".iteration_*.tmp")))
    if kind in ("rank", "hang", "save"):
        watched.until("two ranks", lambda: len(watched.ranks()) == 2)
    struck = time.monotonic()
    if kind in ("rank", "hang", "save"):
        os.kill(rng.choice(watched.ranks()).pid, signal.SIGSTOP if kind == "hang" else signal.SIGKILL)
    elif kind == "node":
        nodes = cluster.run("scontrol", "show", "hostnames", cluster.field(watched.element(), "NodeList")).split()
        node = rng.choice(nodes)
        cluster.crash_node(node)
        return node, struck
    else:
        words = ["scontrol", "requeue"] if kind == "requeue" else ["scancel", "--batch", "--signal=USR1"]
        watched.until(kind, lambda: told(cluster, [*words, watched.element()]))
    return None, struck


def told(cluster: Cluster, words: list[str]) -> bool:
    """Runs a command of Slurm's. Returns False when the element has just ended.

    An element that ends by its signal leaves scancel waiting: a time-out means that it was told.
    """
    try:
        cluster.run(*words, timeout_s=10)
    except SlurmError:
        return False
    except subprocess.TimeoutExpired:
        return True
    return True


def prompts_lost(run: Path, iterations: int) -> float:
    """Returns the number of prompts in iterations that are not there exactly once, or without all their answers."""
    seen = Counter(row.iteration for row in read_metrics(run) if row.scope not in ("eval", "preflight"))
    lost = sum(PROMPTS for iteration in range(iterations) if seen[iteration] != 1)
    for path in iteration_files(run / ROLLOUTS):
        groups = Counter(row["group"] for row in read_rows(path))
        lost += PROMPTS - sum(count == SAMPLES for count in groups.values())
    return float(lost + PROMPTS * (iterations - len(iteration_files(run / ROLLOUTS))))


def submit(cluster: Cluster, folder: Path, models: Path, name: str) -> Watched:
    site = folder / "site.yaml"
    site.write_text(SITE)
    words = [
        str(EXAMPLE / "tango.yaml"), f"roles.generator.model.path={models}/generator/model",
        f"roles.verifier.model.path={models}/verifier/model", f"data.path={models}/task/train.jsonl",
        "evaluation.sets=[]", f"run.prompts_per_iteration={PROMPTS}", "run.save_every=1",
        f"run.hang_after_s={HANG_S}", f"run.dir={folder}", f"run.name={name}", "recipe.args.generator_updates=3000",
        "recipe.args.warmup_updates=1", "job.nodes=2", "job.slices=200", f"--profile={site}",
    ]  # fmt: skip
    printed = subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", "submit", *words], cwd=ROOT, env=cluster.environment(),
        check=True, text=True, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    return Watched(cluster, folder / name, printed.splitlines()[0].rpartition(" ")[2])


def recover(watched: Watched, kind: str, rng: random.Random) -> tuple[float, int]:
    """Makes a fault after a few iterations without one. Returns (seconds until there is progress, iterations done
    again)."""
    calm_until = watched.last_iteration() + rng.randint(3, 8)
    watched.until("iterations without a fault", lambda: watched.last_iteration() >= calm_until)
    starts = len(job_slices.read(watched.run))  # read before the fault: its command may come back after the next start
    node, struck = strike(kind, watched, rng)
    done = watched.last_iteration()
    watched.until(f"another start after {kind}", lambda: len(job_slices.read(watched.run)) > starts)
    again = max(0, done + 1 - job_slices.read(watched.run)[-1].iterations_before)
    watched.until(f"progress after {kind}", lambda: watched.last_iteration() > done)
    seconds = time.monotonic() - struck
    if node is not None:
        watched.cluster.start_node(node)
    return seconds, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="number of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", type=Path, default=ROOT / "runs/last_letter_2_heads/a", help="models; made when there are none"
    )
    common.add_arguments(parser)
    args = parser.parse_args()
    if missing := missing_commands():
        parser.error(f"no Slurm: {', '.join(missing)} not found; `make slurm` installs it, or says why it cannot")
    import run

    with contextlib.chdir(ROOT):
        run.prepare(args.models, args.models.name, run.Stages(), heads=2)
    rng = random.Random(args.seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(args.faults)]
    rng.shuffle(kinds)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    again: list[int] = []
    with tempfile.TemporaryDirectory() as name, Cluster(Path(name) / "slurm", gpus=0) as cluster:
        watched = submit(cluster, Path(name), args.models, "long")
        for kind in track(kinds, description="faults"):
            taken, repeated = recover(watched, kind, rng)
            seconds[kind].append(taken)
            again.append(repeated)
        (watched.run / "stop").touch()
        watched.until(
            "the end",
            lambda: set(cluster.states(watched.job).values()) <= {"COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL"},
        )
        iterations = watched.last_iteration() + 1
        metrics = {f"{kind}/seconds": fmean(values) for kind, values in seconds.items() if values}
        metrics |= {
            "faults": float(len(kinds)),
            "iterations": float(iterations),
            "iterations_lost": fmean(again),
            "prompts_lost": prompts_lost(watched.run, iterations),
        }
    common.finish(metrics, {}, args, limits={"prompts_lost": 0})


if __name__ == "__main__":
    main()
