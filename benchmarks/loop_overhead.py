"""Measures what a cycle of `megatron-rl train` costs beside generating, grading, training and refitting; what Tango
costs beside GRPO.

Starts short real runs on the last-letter models (made once, as by examples/miniatures/last_letter/run.py) and watches
their metrics.jsonl: an iteration's wall time is that between its line and the one before, its phases are those in its
line; the first iteration does not count. With --engines vllm the trainer is one rank, and the servers are started by
`megatron-rl serve`, as in a job of their own, pinned to cores. One iteration after the other: an iteration of GRPO and
one of Tango alternate, so that neighbours on the machine meet both, and the trainer that waits is stopped. Within a run
no two servers share a core; with two cores Tango's generator has the trainer's, which waits while it works: the
verifier's server has more to do. With iterations collected beside training: the trainer has a core of its own, and the
servers share the others.

    overhead         share of the iterations' wall time in no phase but these: rollout, review, reward, train, refit
    tango_over_grpo  mean wall time of an update in a Tango run (of either role) over that of an update in a GRPO run,
                     same generator; the median of iterations next to each other
    tango_generator_over_grpo_cpu
                     CPU-seconds of the generator's updates alone in the Tango run, their verifications included, over
                     those of an update in the GRPO run
    overlap          with rollouts.max_staleness 1: wall time of an iteration over max(its generation and grading, its
                     training and refit)

Metrics with `_cpu` are of CPU-seconds of the trainer and its servers, which neighbours on the machine disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import common
import psutil

from megatron_rl.run.metrics import MetricsRow, read_metrics

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/miniatures/last_letter"
ROLLOUT, LEARNING = ("rollout", "review", "reward"), ("train", "refit")
ARMS = ("grpo", "tango")
GENERATOR_ITERATIONS = 3  # in Tango between the verifier's
HEADS = 2  # vLLM's attention on a CPU wants heads of 32 at least
LOOK_S = 0.005
SERVE_END_S = 60.0
LONG_S = 5.0  # a cycle that the bar on the overhead is for
BARS = {"overhead": 0.03, "overlap": 1.15}
GOAL = {"tango_over_grpo": 1.5}  # with engines on a core of their own
CHEAP = {"tango_generator_over_grpo_cpu": 1.3}  # with this project's settings, which are there to cost less
LEAN = (  # settings that cost less than the paper's (docs/reference/methods.md, "Tango's two settings")
    *("generator_iterations=9", "reviewed=failed", "review_below=0.25", "verifier_rests=true", "greedy_verdicts=true"),
    *("step_credit={span: own, baseline: step}", "alpha_start=1.0", "alpha_min=1.0"),
)
TANGO = {"default": LEAN, "paper": ()}


@dataclass(frozen=True)
class Seen:
    """An iteration of a run."""

    wall_s: float
    cpu_s: float  # of all processes of the run
    row: MetricsRow

    def of(self, phases: Sequence[str]) -> float:
        return sum(self.row.time.get(phase, 0.0) for phase in phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", default=None, help="embedded, vllm or both, with a comma (default: vllm where --python exists)"
    )
    parser.add_argument(
        "--python", default=str(ROOT / ".venv-vllm/bin/python"), help="interpreter that has vLLM (make engines)"
    )
    parser.add_argument(
        "--models", type=Path, default=ROOT / f"runs/last_letter_{HEADS}_heads/a", help="made when there are none"
    )
    parser.add_argument("--tango", choices=TANGO, default="default", help="settings: this project's, or the paper's")
    parser.add_argument("--prompts", type=int, default=256, help="of an iteration")
    parser.add_argument(
        "--iterations",
        type=int,
        default=9,
        help="of Tango's generator; every fourth is the verifier's beside them. GRPO has as many in all",
    )
    parser.add_argument(
        "--staleness", default="0,1", help="values of rollouts.max_staleness, with vLLM (default: %(default)s)"
    )
    common.add_arguments(parser)
    args = parser.parse_args()
    available = ["embedded", "vllm"] if Path(args.python).exists() else ["embedded"]
    engines = args.engines.split(",") if args.engines else available
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    _prepare(args.models)
    metrics: dict[str, float] = {}
    for engine in engines:
        for staleness in map(int, args.staleness.split(",")) if engine == "vllm" else (0,):
            with tempfile.TemporaryDirectory() as folder:
                if staleness == 0:
                    alone = serial(in_turn(engine, Path(folder), args))
                    figures = {f"{engine}/{name}": value for name, value in alone.items()}
                else:
                    seen = {arm: watch(arm, engine, staleness, Path(folder), args) for arm in ARMS}
                    figures = {
                        f"{engine}, staleness {staleness}/{name}": value for name, value in overlapped(seen).items()
                    }
            metrics |= figures
    limits = {
        name: limit
        for name in metrics
        for end, limit in BARS.items()
        if name.endswith(f"_{end}") or name.endswith(f"/{end}")
    }
    goal = GOAL | (CHEAP if args.tango == "default" else {})
    limits |= {f"vllm/{name}": limit for name, limit in goal.items() if f"vllm/{name}" in metrics}
    common.finish(metrics, {}, args, limits={name: limit for name, limit in limits.items() if _counts(name, metrics)})


def serial(seen: Mapping[str, Sequence[Seen]]) -> dict[str, float]:
    """Returns the metrics of runs whose iterations are one after the other."""
    figures: dict[str, float] = {}
    for arm, iterations in seen.items():
        figures[f"{arm}_iteration_s"] = fmean(iteration.wall_s for iteration in iterations)
        with_shares = [
            iteration for iteration in iterations if iteration.of(ROLLOUT + LEARNING) <= iteration.wall_s
        ]  # no phase was stopped in the middle
        figures[f"{arm}_iterations_with_shares"] = len(with_shares)
        wall = sum(iteration.wall_s for iteration in with_shares) or math.nan
        for phase in (*ROLLOUT, *LEARNING):
            figures[f"{arm}_{phase}_share"] = sum(iteration.of([phase]) for iteration in with_shares) / wall
        figures[f"{arm}_overhead"] = 1 - sum(iteration.of(ROLLOUT + LEARNING) for iteration in with_shares) / wall
    grpo, tango = seen["grpo"], seen["tango"]
    figures["tango_over_grpo"] = figures["tango_iteration_s"] / figures["grpo_iteration_s"]
    figures["tango_over_grpo_median"] = median(b.wall_s / a.wall_s for a, b in zip(grpo, tango, strict=False))
    figures["tango_over_grpo_cpu"] = fmean(t.cpu_s for t in tango) / fmean(t.cpu_s for t in grpo)
    generator_s = [iteration.cpu_s for iteration in tango if iteration.row.scope == "generator"]
    figures["tango_generator_over_grpo_cpu"] = fmean(generator_s) / fmean(t.cpu_s for t in grpo)
    return figures


def overlapped(seen: Mapping[str, Sequence[Seen]]) -> dict[str, float]:
    """Returns the metrics of runs that collect an iteration while another is trained on."""
    figures: dict[str, float] = {}
    for arm, iterations in seen.items():
        iterations = iterations[1:]  # before the second there was nothing to collect beside
        figures[f"{arm}_iteration_s"] = fmean(iteration.wall_s for iteration in iterations)
        figures[f"{arm}_rollout_s"] = fmean(iteration.of(ROLLOUT) for iteration in iterations)
        figures[f"{arm}_learning_s"] = fmean(iteration.of(LEARNING) for iteration in iterations)
        figures[f"{arm}_overlap"] = figures[f"{arm}_iteration_s"] / max(
            figures[f"{arm}_rollout_s"], figures[f"{arm}_learning_s"]
        )
    return figures


def in_turn(engine: str, folder: Path, args: argparse.Namespace) -> dict[str, list[Seen]]:
    """Every arm's iterations but the first, one of each at a time: while one works, the other's trainer is stopped, and
    its servers have nothing to do. What else happens on the machine then meets both.
    """
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(_opened(arm, engine, 0, folder, args)) for arm in ARMS]
        while not all(run.stopped for run in runs):
            for run in runs:
                if not run.stopped and (run.lines() or run.ended()):
                    run.stop()
            time.sleep(LOOK_S)
        while all([run.iteration() for run in runs]):
            pass
        return {run.arm: run.seen() for run in runs}


def watch(arm: str, engine: str, staleness: int, folder: Path, args: argparse.Namespace) -> list[Seen]:
    """Runs `arm` by itself and returns its iterations but the first."""
    with _opened(arm, engine, staleness, folder, args) as run:
        while not run.lines() and not run.ended():
            time.sleep(LOOK_S)
        while run.iteration(stop=False):
            pass
        return run.seen()


class _Run:
    """A run under way, in `directory`."""

    def __init__(
        self, arm: str, trainer: subprocess.Popen[bytes], servers: Sequence[subprocess.Popen[bytes]], directory: Path
    ) -> None:
        self.arm = arm
        self.stopped: list[psutil.Process] = []
        self._trainer, self._directory = trainer, directory
        self._processes = [child.pid for child in (trainer, *servers)]
        self._known, self._spent = 1, 0.0  # lines; CPU-seconds when the last of them came
        self._stamps: list[tuple[float, float]] = []

    def lines(self) -> int:
        path = self._directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def ended(self) -> bool:
        """Raises RuntimeError when it failed."""
        if self._trainer.poll():
            log = self._directory.with_name(f"{self.arm}.log")
            raise RuntimeError(
                f"megatron-rl train ended with status {self._trainer.returncode}:\n{log.read_text()[-3000:]}"
            )
        return self._trainer.returncode == 0

    def iteration(self, *, stop: bool = True) -> bool:
        """Lets it go on until its next line; False when it ends before."""
        self._spent = self._spent or common.cpu_seconds(self._processes)
        start = time.perf_counter()
        self.resume()
        while self.lines() <= self._known:
            if self.ended():
                return False
            time.sleep(LOOK_S)
        if stop:
            self.stop()
        wall_s, spent = time.perf_counter() - start, common.cpu_seconds(self._processes)
        self._stamps.append((wall_s, spent - self._spent))
        self._known, self._spent = self._known + 1, spent
        return True

    def stop(self) -> None:
        trainer = psutil.Process(self._trainer.pid)
        self.stopped = [trainer, *trainer.children(recursive=True)]
        for process in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        for process in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.stopped = []

    def seen(self) -> list[Seen]:
        rows = read_metrics(self._directory)[1:]
        return [Seen(*stamp, row) for stamp, row in zip(self._stamps, rows, strict=False)]


@contextlib.contextmanager
def _opened(arm: str, engine: str, staleness: int, folder: Path, args: argparse.Namespace) -> Iterator[_Run]:
    cores = sorted(os.sched_getaffinity(0))
    apart = engine == "vllm" and len(cores) > 1
    settings = [*_settings(arm, args), f"run.dir={folder}", f"run.name={arm}", f"rollouts.max_staleness={staleness}"]
    if engine == "vllm":
        settings += ["launch.nproc=1", "engine.kind=vllm", f"engine.python={args.python}", "engine.start=false"]
    roles = ("generator",) if arm == "grpo" else ("generator", "verifier")
    with contextlib.ExitStack() as stack:
        servers = []
        if engine == "vllm":
            for number, role in enumerate(roles, 1):
                command = ["serve", *settings, f"--role={role}"]
                core = [cores[(len(roles) - number + 1) % len(cores)]] if staleness == 0 else cores[1:]
                servers.append(
                    stack.enter_context(_started(command, folder / f"serve_{arm}_{role}.log", core if apart else cores))
                )
        trainer = stack.enter_context(
            _started(["train", *settings], folder / f"{arm}.log", cores[:1] if apart else cores)
        )
        run = _Run(arm, trainer, servers, folder / arm)
        stack.callback(run.resume)  # who is stopped cannot end
        yield run


@contextlib.contextmanager
def _started(words: Sequence[str], log: Path, cores: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.main", *words], stdout=output, stderr=output, cwd=ROOT
        )
    psutil.Process(child.pid).cpu_affinity(list(cores))
    try:
        yield child
    finally:
        child.terminate()
        child.wait(SERVE_END_S)


def _settings(arm: str, args: argparse.Namespace) -> list[str]:
    updates = {
        "grpo": f"recipe.args.updates={args.iterations + args.iterations // GENERATOR_ITERATIONS}",
        "tango": f"recipe.args.generator_updates={args.iterations}",
    }
    settings = [
        str(EXAMPLE / f"{arm}.yaml"), f"roles.generator.model.path={args.models}/generator/model",
        "evaluation.sets=[]",
        f"data.path={args.models}/task/train.jsonl", f"run.prompts_per_iteration={args.prompts}", "run.save_every=0",
        "preflight.enabled=false", updates[arm],
    ]  # fmt: skip
    if arm == "tango":
        settings += [f"roles.verifier.model.path={args.models}/verifier/model", "recipe.args.warmup_updates=0"]
        settings += [f"recipe.args.{setting}" for setting in TANGO[args.tango]]
    return settings


def _prepare(models: Path) -> None:
    sys.path[:0] = [str(EXAMPLE)]
    import run

    with contextlib.chdir(ROOT):
        run.prepare(models, models.name, run.Stages(), heads=HEADS)


def _counts(name: str, metrics: Mapping[str, float]) -> bool:
    """Returns whether a bar is for it: that on the overhead is for long cycles."""
    return not name.endswith("_overhead") or metrics[name.replace("_overhead", "_iteration_s")] >= LONG_S


if __name__ == "__main__":
    main()
