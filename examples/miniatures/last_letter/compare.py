"""Compares arms of the last-letter experiment over seeds: a table with 95 % confidence intervals, and curves.

    python examples/miniatures/last_letter/compare.py --regime a --arms tango grpo --seeds 0 1 2 --out runs/arms

It runs what is missing first. `--check` compares the results with the bars of the shipped configurations and leaves
with status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table
from run import ARMS

HERE = Path(__file__).parent
FIGURES = {
    "generator_accuracy": "generator accuracy (sampled)",
    "generator_accuracy_greedy": "generator accuracy (greedy)",
    "verifier_outcome_f1": "verifier outcome-F1",
    "verifier_step_f1": "verifier step-F1",
}
T_95 = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}  # two-sided Student t, n - 1 degrees
DEFAULT = ["tango", "grpo", "frozen_verifier", "frozen_generator"]
ACCURACY = "generator_accuracy"
# Bars of regime a for the gain in a figure, by arm: the mean over seeds, and the smallest gain of a seed.
GAINS = {
    "tango": {("gain", ACCURACY): 0.50, ("gain", "verifier_outcome_f1"): 0.10},
    "ppo": {("smallest gain", ACCURACY): 0.45},
    "online_dpo": {("smallest gain", ACCURACY): 0.45},
    "votes": {("smallest gain", ACCURACY): 0.45},
}
console = Console(soft_wrap=True, width=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=["a", "b"], default="a")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/arms"))
    parser.add_argument(
        "--evaluate-every", type=int, default=4, help="iterations between evaluations (the curves' points)"
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    summaries = {arm: [run(options, arm, seed) for seed in options.seeds] for arm in options.arms}
    table = Table(title=f"last letter, regime {options.regime}, {len(options.seeds)} seeds: mean ± 95 % confidence")
    for column in ("arm", "figure", "before", "after", "gain"):
        table.add_column(column, justify="left" if column in ("arm", "figure") else "right")
    metrics: dict[str, dict[str, float]] = {}
    for arm, rows in summaries.items():
        for name, label in FIGURES.items():
            if all(f"{name}_end" in row for row in rows):
                start, end = ([row[f"{name}_{when}"] for row in rows] for when in ("start", "end"))
                gain = [b - a for a, b in zip(start, end, strict=True)]
                table.add_row(arm, label, interval(start), interval(end), interval(gain))
                metrics[f"{arm}/{name}"] = {
                    "start": mean(start), "end": mean(end), "gain": mean(gain), "smallest gain": min(gain),
                }  # fmt: skip
    console.print(table)
    draw(options, summaries)
    (options.out / "comparison.json").write_text(json.dumps({"metrics": metrics, "runs": summaries}, indent=1) + "\n")
    if options.check:
        sys.exit(check(options.regime, metrics))


def run(options: argparse.Namespace, arm: str, seed: int) -> dict:
    """Returns the summary of one arm and seed. The run is made, or continued, when it is not complete."""
    out = options.out / f"{arm}_seed{seed}"
    summary = out / "summary.json"
    if not summary.exists() or "arm" not in json.loads(summary.read_text()):
        out.parent.mkdir(parents=True, exist_ok=True)
        log = out.parent / f"{arm}_seed{seed}.log"
        console.print(f"{arm}, seed {seed} -> {log}")
        command = [
            sys.executable,
            str(HERE / "run.py"),
            "--regime",
            options.regime,
            "--arm",
            arm,
            "--seed",
            str(seed),
            "--out",
            str(out),
            "--evaluate-every",
            str(options.evaluate_every),
        ]
        with log.open("w") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        if status:
            console.print(log.read_text()[-2000:])
            sys.exit(status)
    return json.loads(summary.read_text())


def check(regime: str, metrics: dict[str, dict[str, float]]) -> int:
    """Compares the metrics with their bars and returns the exit status.

    Bars of regime a: GAINS of the arms that were compared. Of regime b: Tango is at least 0.15 above GRPO.
    """
    if regime == "a":
        wanted = [
            (f"{arm}'s {kind} in {FIGURES[name]}", metrics[f"{arm}/{name}"][kind], bar)
            for arm, bars in GAINS.items()
            if arm in {key.partition("/")[0] for key in metrics}
            for (kind, name), bar in bars.items()
        ]
    else:
        lead = metrics[f"tango/{ACCURACY}"]["end"] - metrics[f"grpo/{ACCURACY}"]["end"]
        wanted = [("Tango's lead over GRPO in sampled accuracy", lead, 0.15)]
    for name, value, bar in wanted:
        console.print(f"{'met   ' if value >= bar else 'MISSED'} {name}: {value:+.3f} (bar {bar:+.2f})")
    return int(any(value < bar for _, value, bar in wanted))


def draw(options: argparse.Namespace, summaries: dict[str, list[dict]]) -> None:
    """Draws sampled accuracy and outcome-F1 over the updates of the role that they measure.

    Each seed is a thin line, the mean a thick one.
    """
    metric, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    for number, arm in enumerate(summaries):
        for axis, role, metric_name in (
            (axes[0], "generator", "accuracy"),
            (axes[1], "verifier", "outcome_f1"),
        ):
            lines = [curve(options.out / f"{arm}_seed{seed}", role, metric_name) for seed in options.seeds]
            if not all(len(line) > 1 for line in lines):
                continue
            for line in lines:
                axis.plot(*zip(*line, strict=True), color=f"C{number}", alpha=0.3, linewidth=1)
            shared = sorted(set.intersection(*(set(dict(line)) for line in lines)))
            axis.plot(
                shared,
                [mean([dict(line)[x] for line in lines]) for x in shared],
                color=f"C{number}",
                linewidth=2,
                label=arm,
            )
            axis.set(xlabel=f"{role} updates", ylabel=f"{role} {metric_name}")
            axis.grid(alpha=0.3)
    for axis in axes:
        if axis.lines:
            axis.legend()
        else:
            axis.set_visible(False)
    metric.tight_layout()
    path = options.out / "comparison.png"
    metric.savefig(path, dpi=150)
    plt.close(metric)
    console.print(f"curves: {path}")


def curve(run_dir: Path, role: str, name: str) -> list[tuple[int, float]]:
    """Returns (iterations of `role` so far, metric) for the last evaluation at each number of iterations.

    A role that never learns gives one point.
    """
    iterations, points = 0, {}
    for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        iterations += row["scope"] == role
        if row["scope"] == "eval" and f"{role}/{name}" in row["metrics"]:
            points[iterations] = row["metrics"][f"{role}/{name}"]
    return sorted(points.items())


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T_95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
