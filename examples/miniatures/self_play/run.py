"""Runs self-play with checkable answers in miniature, twice: with a solver that learns, and with one that does not.

    python examples/miniatures/self_play/run.py

The proposer writes rows of letters with the letters after them, and a rule refuses what is wrong. The solver writes
the letters after each row. The longer a row, the more often the solver fails; the proposer earns most where it fails
half of the time. So its rows grow with the skill of a solver that learns. A solver that stays as it is fails at a
single letter four times of ten: its proposer's rows shrink to that.

Settings of the config may follow the options. A run that was interrupted goes on where it stood when the same command
is given again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pairs
import task  # beside the other example; `pairs` finds it
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from mini_runs import Metrics, command, console, series, start_middle_end  # noqa: E402  (beside the examples)

HERE, BASE = Path(__file__).parent, Path("runs/self_play")  # as the configs have it
SFT = {"batch": 32, "clean_steps": 300, "late_steps": 100}
FRAME = 5  # tokens of a proposal besides its letters and their numbers, in question and answer: four tags and the end
RUNS = {"learning": [], "fixed": ["roles.solver.optimizer.lr=0.0"]}  # by the solver's kind
CURVES = [  # scope of the metrics, metric, label
    ("proposer", "letters", "letters per proposal"),
    ("proposer", "accepted", "share that the rule accepts"),
    ("proposer", "reward/total", "reward: 4 a (1 - a)"),
    ("solver", "reward/outcome", "accuracy a on proposals"),
    ("eval", "solver/accuracy", "held-out accuracy"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solvers", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    options, overrides = parser.parse_known_args()
    prepare(seed=1)
    for name in options.solvers:
        command(
            "train", str(HERE / "self_play.yaml"), f"run.seed={options.seed}", f"run.name={name}",
            f"recipe.args.updates={options.updates}", *overrides, *RUNS[name],
        )  # fmt: skip
    show(options.solvers)


def prepare(seed: int) -> None:
    """Makes the task's files and the model that both roles begin with. What is there is kept."""
    files = BASE / "task"
    if not (BASE / "ready").exists():
        task.write_model(files / "model", seed)
        pairs.write_tasks(files / "train.jsonl")
        task.write_problems(files / "test.jsonl", (1, task.MOST), 256, seed + 2)
        pairs.write_pairs(files / "sft.jsonl", seed + 3, **SFT)
        (BASE / "ready").touch()
    if not (BASE / "start/model/model.safetensors").exists():
        command("sft", str(HERE / "sft.yaml"), f"steps={SFT['clean_steps'] + SFT['late_steps']}", f"run.dir={BASE}")


def proposals(metrics: Metrics) -> Metrics:
    """Makes the length of the proposals, and the share that the rule accepts, of the proposer's metrics."""
    return {"letters": (metrics["length"] - FRAME) / 4, "accepted": metrics["correct"] / metrics["samples"]}


def show(names: list[str]) -> None:
    """Prints every curve at the start, at the middle and at the end of each run, and draws them."""
    table = Table(title="a proposer, with a solver that learns and with a fixed one")
    for column in ("solver", "role", "figure", "start", "middle", "end"):
        table.add_column(column, justify="left" if column in ("solver", "role", "figure") else "right")
    metric, axes = plt.subplots(1, len(CURVES), figsize=(3.6 * len(CURVES), 3.2))
    for name in names:
        for axis, (scope, metric_name, label) in zip(axes, CURVES, strict=True):
            points = series(BASE / name, scope, metric_name, counted="proposer", more=proposals)
            values = [value for _, value in points]
            shown = start_middle_end(values, width=1 if scope == "eval" else 4)
            table.add_row(name, "solver" if scope == "eval" else scope, label, *(f"{value:.2f}" for value in shown))
            axis.plot(*zip(*points, strict=True), label=name, marker="." if scope == "eval" else "")
            axis.set(title=label, xlabel="updates")
            axis.grid(alpha=0.3)
        table.add_section()
    axes[0].legend(title="solver")
    metric.tight_layout()
    metric.savefig(BASE / "curves.png", dpi=150)
    plt.close(metric)
    console.print(table)
    console.print(f"curves: {BASE / 'curves.png'}")


if __name__ == "__main__":
    main()
