"""Runs Multi-Agent Evolve in miniature: tiny model, one SFT for all roles, training of the three, table and curves.

    python examples/miniatures/evolve/run.py --models three --out runs/evolve/three

The proposer writes rows of letters, the solver writes the letters after them, and the judge marks both (rule.py). The
longer a row, the more often the solver fails. The proposer is rewarded for failures, so its rows grow with the solver's
skill. The judge learns its form alone: with `--updates 40` the solver finds what the judge overlooks, and its accuracy
on held-out rows falls while the judge's score stays. A run that was interrupted goes on where it stood when the same
command is given again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import task
from rich.table import Table

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from mini_runs import Metrics, command, console, series, start_middle_end  # noqa: E402  (beside the examples)

BASE = Path("runs/evolve")  # as the configs have it
SFT = {"batch": 32, "clean_steps": 400, "late_steps": 100}
FRAME = 3  # tokens of a proposal besides its letters and their numbers: two tags and the end
CURVES = {  # panel: (scope of the metrics, metric, label)
    "proposer": [("proposer", "letters", "letters per proposal"), ("proposer", "questions", "share accepted")],
    "solver": [("solver", "reward/score", "judge's score"), ("eval", "solver/accuracy", "held-out accuracy")],
    "judge": [("judge", "reward/form", "form of the judgements")],
}


def prepare(seed: int) -> None:
    """Makes the task's files and the model that all roles begin with. What is there is kept."""
    files = BASE / "task"
    if not (BASE / "ready").exists():
        task.write_model(files / "model", seed)
        task.write_problems(files / "train.jsonl", (1, 2), 1000, seed + 1)  # the pool begins with short questions
        task.write_problems(files / "test.jsonl", (1, task.MOST), 256, seed + 2)
        task.write_pairs(files / "sft.jsonl", seed + 3, **SFT)
        (BASE / "ready").touch()
    if not (BASE / "start/model/model.safetensors").exists():
        steps = SFT["clean_steps"] + SFT["late_steps"]
        command("sft", str(HERE / "sft.yaml"), f"steps={steps}", f"run.dir={BASE}")


def proposals(metrics: Metrics) -> Metrics:
    """Makes the length and the share of proposals of the proposer's metrics."""
    whole = max(1.0, metrics["samples"] + metrics["unjudged"])
    return {"letters": (metrics["length"] - FRAME) / 2, "questions": metrics["accepted"] / whole}


def show(run: Path) -> None:
    """Prints every curve at the start, at the middle and at the end, and draws them."""
    table = Table(title=f"three roles that learn from the same episodes ({run})")
    for column in ("role", "figure", "start", "middle", "end"):
        table.add_column(column, justify="left" if column in ("role", "figure") else "right")
    metric, axes = plt.subplots(1, len(CURVES), figsize=(4.2 * len(CURVES), 3.4))
    for axis, (role, curves) in zip(axes, CURVES.items(), strict=True):
        for number, (scope, name, label) in enumerate(curves):
            points = series(run, scope, name, counted="proposer", more=proposals)
            own = axis if number == 0 or role != "proposer" else axis.twinx()
            own.plot(*zip(*points, strict=True), color=f"C{number}", label=label, marker="." if scope == "eval" else "")
            own.set_ylabel(label, color=f"C{number}") if role == "proposer" else own.legend()
            values = [value for _, value in points]
            shown = start_middle_end(values, width=1 if scope == "eval" else 4)
            table.add_row(role, label, *(f"{value:.3f}" for value in shown))
        axis.set(title=role, xlabel="updates")
        axis.grid(alpha=0.3)
    metric.tight_layout()
    metric.savefig(run / "curves.png", dpi=150)
    plt.close(metric)
    console.print(table)
    console.print(f"curves: {run / 'curves.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=("three", "shared"), default="three", help="a model for each role, or one")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    parser.add_argument("--out", type=Path, help="run directory (default: runs/evolve/MODELS)")
    options = parser.parse_args()
    out = options.out or BASE / options.models
    prepare(seed=1)
    command(
        "train", str(HERE / f"{options.models}.yaml"), f"run.seed={options.seed}", f"run.dir={out.parent}",
        f"run.name={out.name}", f"recipe.args.updates={options.updates}",
    )  # fmt: skip
    show(out)


if __name__ == "__main__":
    main()
