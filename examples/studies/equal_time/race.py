"""Compares arms on the last-letter task at equal time: GRPO, Tango as the paper has it, and Tango's cheaper settings.

    python examples/studies/equal_time/race.py --regime b --arms grpo tango --seeds 0 1 2 3 4

The time of a run is that of generation and training: what evaluations, checkpoints and the start take is left out. It
is counted in seconds by the clock and in CPU-seconds of all processes of the run. Both are in the tables that are
printed; arms are compared by the second, because other work on the machine disturbs it less. A run ends at the first
evaluation after `--cpu-seconds` of it. Metrics between two evaluations are read off the line between them. Besides the
arms of the table there are those of means that were tried one by one; name them with `--arms`.
Runs that are complete are kept, so that the command can be given again after an interruption. `--quick` makes short
runs of every arm, to see that all parts work; its metrics say nothing. `--verifier-steps 40` begins with a verifier
that judges badly, `--drift` with a generator whose errors the verifier has not seen: is it then worth its time to train
it?
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples/miniatures/last_letter")]

import run as last_letter  # noqa: E402  (examples/miniatures/last_letter/run.py)
import task  # noqa: E402
from compare import T_95  # noqa: E402

from examples.studies.equal_time.arms import ARMS, MANY, TRIED, Arm  # noqa: E402
from examples.studies.equal_time.clock import cpu_seconds  # noqa: E402
from examples.studies.equal_time.verifiers import FULL, VERIFIERS, drifted, plain  # noqa: E402

EXAMPLE = ROOT / "examples/miniatures/last_letter"
CPU_SECONDS = {"a": 10.0, "b": 20.0}  # enough for the quickest arm to come near its end
# Of the generator, in all arms. b is GRPO at its best of 1.5e-4, 3e-4 and 4e-4, 8 problems (see last_letter.md).
RATES = {"a": 1.5e-4, "b": 3e-4}
LOOK_S = 0.02
ROLES = ("generator", "verifier")
FIGURES = ("generator/accuracy", "generator/accuracy_greedy", "verifier/step_f1", "verifier/outcome_f1")
console = Console(soft_wrap=True, width=120)
Point = dict[str, float]  # of an evaluation: cpu_s, seconds, tokens, updates before it, and its metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=task.regimes(), default="b")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *TRIED], default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--cpu-seconds", type=float, help="of a run (default: the regime's)")
    parser.add_argument(
        "--verifier-steps", type=int, default=FULL, help=f"supervised steps of the verifier's start (default: {FULL})"
    )
    parser.add_argument("--drift", action="store_true", help="the generator takes the letter before the last for it")
    parser.add_argument("--out", type=Path, default=Path("runs/equal_time"))
    parser.add_argument("--quick", action="store_true", help="one seed and 5 CPU-seconds of each arm")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.out = options.seeds[:1], options.out / "quick"
    budget = 5.0 if options.quick else options.cpu_seconds or CPU_SECONDS[options.regime]
    base = Path("runs/last_letter") / options.regime
    stages, steps = last_letter.Stages(), options.verifier_steps
    last_letter.prepare(base, options.regime, stages, heads=4)
    arms = {name: (ARMS | TRIED)[name] for name in options.arms}
    names = {arm.verifier for arm in arms.values()} - {""}
    if names and steps != FULL:
        parser.error(f"--verifier-steps is for the regimes' verifier, and {sorted(names)} are others: leave them out")
    options.verifiers = {name: VERIFIERS[name](base.parent / "a", stages) for name in names}
    options.verifiers[""] = plain(base.parent / "a", stages, steps=steps)
    regime = task.regimes()[options.regime]
    options.generator = drifted(base, regime, stages) if options.drift else base / "generator/model"
    words = [options.regime, *([f"verifier{steps}"] if steps != FULL else []), *(["drift"] if options.drift else [])]
    out = options.out / "_".join(words)
    found: dict[str, list[list[Point]]] = {}
    for seed in options.seeds:
        for arm in arms:
            points = race(arms[arm], base, options, seed, budget, out / f"{arm}_seed{seed}")
            found.setdefault(arm, []).append(points)
    show(found, budget)


def race(arm: Arm, base: Path, options: argparse.Namespace, seed: int, budget: float, out: Path) -> list[Point]:
    """Runs an arm until its time is over. -> its evaluations. What is complete is read."""
    kept = out.with_suffix(".json")
    if kept.exists():
        return json.loads(kept.read_text())
    shutil.rmtree(out, ignore_errors=True)  # of a run that was cut off: its time is not known
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"{out.name} -> {out.with_suffix('.log')}")
    with out.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", "megatron_rl.main", "train", *settings(arm, base, options, seed, out)]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            points = watch(child, out / "metrics.jsonl", budget=budget)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait()
    if len(points) < 2:
        sys.exit(f"{out.name} ended with status {child.returncode}:\n{out.with_suffix('.log').read_text()[-3000:]}")
    kept.write_text(json.dumps(points) + "\n")
    return points


def settings(arm: Arm, base: Path, options: argparse.Namespace, seed: int, out: Path) -> list[str]:
    """Returns the arguments of `megatron-rl train`."""
    regime = task.regimes()[options.regime]
    own = [
        str(EXAMPLE / f"{arm.config}.yaml"), f"run.seed={seed}", f"run.name={out.name}", f"run.dir={out.parent}",
        "run.save_every=0", "launch.nproc=1", f"data.path={base}/task/train.jsonl",
        f"evaluation.sets=[{{path: {base}/task/test.jsonl, settings: last_letter}}]",
        f"roles.generator.model.path={options.generator}", f"roles.generator.optimizer.lr={RATES[options.regime]}",
        f"evaluation.every={arm.evaluate}",
    ]  # fmt: skip
    if arm.config == "grpo":
        return [*own, f"recipe.args.updates={MANY}", *arm.settings]
    updates, start, floor = MANY, 1.0, 1.0
    if arm.paper:
        updates, start, floor = arm.paper * regime.generator_updates, regime.alpha_start, regime.alpha_min
    own += [
        f"roles.verifier.model.path={options.verifiers[arm.verifier]}",
        f"roles.verifier.optimizer.lr={regime.verifier_lr}", f"recipe.args.generator_updates={updates}",
        f"recipe.args.warmup_updates={regime.warmup_updates}", f"recipe.args.alpha_start={start}",
        f"recipe.args.alpha_min={floor}", "recipe.args.balanced_per_class=64",
    ]  # fmt: skip
    if regime.judged != regime.train:
        own += [f"roles.verifier.data={{path: {base}/task/judged.jsonl, settings: last_letter}}"]
    return [*own, *arm.settings]


def watch(child: subprocess.Popen[bytes], path: Path, *, budget: float) -> list[Point]:
    """Reads the run's lines as they are written, until an evaluation after `budget` CPU-seconds, or its end."""
    points: list[Point] = []
    spent = {"cpu_s": 0.0, "seconds": 0.0, "tokens": 0.0, "updates": 0.0}
    read, size, before = 0, 0, 0.0
    while True:
        over = child.poll() is not None
        grown = path.exists() and path.stat().st_size > size
        written = path.read_text() if grown else ""
        lines = written[: written.rfind("\n") + 1].splitlines()[read:]  # without one that is being written
        read, size = read + len(lines), len(written.encode()) if grown else size
        cpu = cpu_seconds(child.pid) if lines else before
        for row in map(json.loads, lines):
            if row["scope"] == "eval":
                metrics = {name: row["metrics"][name] for name in FIGURES if name in row["metrics"]}
                points.append({**spent, **metrics})
            elif row["scope"] in ROLES:
                spent["cpu_s"] += max(0.0, cpu - before) if before else 0.0
                spent["seconds"] += sum(row["time"].values())
                spent["tokens"] += row["metrics"].get("tokens_drawn", row["metrics"]["tokens"])
                spent["updates"] += 1
            before = cpu
        if over or (points and points[-1]["cpu_s"] >= budget):
            return points
        time.sleep(LOOK_S)


def at(points: Sequence[Point], metric: str, cpu_s: float) -> float:
    """Returns a metric after `cpu_s` CPU-seconds, on the line between the evaluations before and after; the last one's
    where there is none after."""
    later = next((i for i, point in enumerate(points) if point["cpu_s"] > cpu_s), len(points))
    before, after = points[later - 1], points[min(later, len(points) - 1)]
    span = after["cpu_s"] - before["cpu_s"]
    share = (cpu_s - before["cpu_s"]) / span if span > 0 else 0.0
    return before[metric] + share * (after[metric] - before[metric])


def reached(points: Sequence[Point], accuracy: float, axis: str = "cpu_s") -> float | None:
    """Returns the CPU-seconds, or `seconds` by the clock, after which a run has this sampled accuracy, on the line
    between two evaluations; None where it has not."""
    metric = "generator/accuracy"
    for before, after in pairwise(points):
        if before[metric] >= accuracy:
            return before[axis]
        if after[metric] >= accuracy:
            share = (accuracy - before[metric]) / (after[metric] - before[metric])
            return before[axis] + share * (after[axis] - before[axis])
    return None


def interval(values: Sequence[float], digits: int = 3) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"


def show(found: dict[str, list[list[Point]]], budget: float) -> None:
    """Prints accuracy at several times, then what each arm made of its time."""
    title = f"{len(next(iter(found.values())))} seeds, mean ± 95 %"
    accuracy = Table(title=f"held-out accuracy of the generator, {title}")
    shares = (0.25, 0.5, 0.75, 1.0)
    for column in ("arm", *(f"{share * budget:g} CPU-s" for share in shares), "greedy"):
        accuracy.add_column(column, justify="left" if column == "arm" else "right")
    work = Table(title=f"what {budget:g} CPU-seconds were, and what 0.5 took, {title}")
    for column in ("arm", "seconds", "updates", "1,000 tokens", "CPU-s to 0.5", "seconds to 0.5"):
        work.add_column(column, justify="left" if column == "arm" else "right")
    for arm, runs in found.items():
        sampled = [interval([at(p, "generator/accuracy", s * budget) for p in runs]) for s in shares]
        accuracy.add_row(arm, *sampled, interval([at(p, "generator/accuracy_greedy", budget) for p in runs]))
        counts = [
            interval([at(p, name, budget) / unit for p in runs], digits)
            for name, unit, digits in (("seconds", 1.0, 1), ("updates", 1.0, 0), ("tokens", 1000.0, 0))
        ]
        work.add_row(arm, *counts, *(half(runs, axis) for axis in ("cpu_s", "seconds")))
    console.print(accuracy)
    console.print(work)


def half(runs: Sequence[Sequence[Point]], axis: str) -> str:
    """Returns how long an arm took to the accuracy 0.5, or how many of its runs came there."""
    times = [reached(points, 0.5, axis) for points in runs]
    came = [time for time in times if time is not None]
    return interval(came, 1) if len(came) == len(times) else f"{len(came)} of {len(times)} came there"


if __name__ == "__main__":
    main()
