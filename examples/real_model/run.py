"""Trains a real pretrained model on two CPU cores: supervised warm-up, then GRPO and Tango from the same start.

    make real-model
    python examples/real_model/run.py --seed 0

The model is SmolLM2-135M-Instruct, from 4-bit weights (tools/real_model/convert.py). The problems are chains of sums
and differences (rows/, made by reasoning-gym's chain_sum with the seeds in rows/README.md). Warm-up teaches the form of
a solution and of a verification, with wrong steps in it; what is learned after that is reinforcement learning's. Both
arms get about the same time. A run that was interrupted goes on where it stood when the same command is given again.
`--quick` takes a few updates of each, to see that every part works; its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE, BASE = Path(__file__).parent, Path("runs/real_model")
sys.path.append(str(HERE.parents[1]))

from rich.table import Table  # noqa: E402

from examples.mini_runs import command, console, series  # noqa: E402  (beside this one)
from examples.real_model import chains  # noqa: E402

SFT_STEPS, BATCH = 30, 16
FIGURES = {
    "generator/accuracy_sampled": "right answers, sampled",
    "generator/accuracy_greedy": "right answers, by the likeliest tokens",
    "verifier/outcome_f1": "verifier: F1 of final verdicts",
    "verifier/step_f1": "verifier: F1 of verdicts on steps",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=("grpo", "tango"), default=["grpo", "tango"])
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    parser.add_argument("--quick", action="store_true", help="two updates of each arm, 16 held-out problems")
    options = parser.parse_args()
    if not (BASE / "model/config.json").exists():
        sys.exit(f"{BASE}/model is not there: `make real-model` makes it")
    prepare(quick=options.quick)
    runs = {arm: train(arm, options) for arm in options.arms}
    command("report", *map(str, runs.values()))
    show(runs)


def prepare(*, quick: bool) -> None:
    """Makes the pairs, and the start of both roles. What is there is kept."""
    if not (BASE / "sft/verifier_sft.jsonl").exists():
        rows = HERE / "rows/train.jsonl"
        chains.write_pairs(rows, BASE / "sft", count=SFT_STEPS * BATCH, wrong=0.25, judged_wrong=0.3, misread=0.25)
    for role in ("generator", "verifier"):
        if not (BASE / role / "model/model.safetensors").exists():
            settings = [f"data.train={BASE}/sft/{role}_sft.jsonl", f"run.name={role}", f"run.dir={BASE}"]
            settings += ["steps=6"] if quick else []
            command("sft", str(HERE / "sft.yaml"), *settings)


def train(arm: str, options: argparse.Namespace) -> Path:
    """Runs one arm. -> its run directory."""
    name = f"{arm}_{'quick' if options.quick else options.seed}"
    settings = [f"run.seed={options.seed}", f"run.name={name}", f"run.dir={BASE}"]
    if options.quick:
        updates = "recipe.args.updates=2" if arm == "grpo" else "recipe.args.generator_updates=2"
        settings += [updates, "evaluation.num_prompts=16", "run.prompts_per_step=4"]
        settings += ["recipe.args.warmup_updates=1", "recipe.args.balanced_per_class=8"] if arm == "tango" else []
    command("train", str(HERE / f"{arm}.yaml"), *settings)
    return BASE / name


def show(runs: dict[str, Path]) -> None:
    """Prints the figures before and after of every arm, with its seconds of generation and training."""
    table = Table(title="SmolLM2-135M-Instruct (4-bit weights): chains of sums and differences, held out")
    for column in ("arm", "figure", "before", "after"):
        table.add_column(column, justify="left" if column in ("arm", "figure") else "right")
    for arm, run in runs.items():
        for name, label in FIGURES.items():
            values = [value for _, value in series(run, "eval", name, counted="generator")]
            if values:
                table.add_row(arm, label, f"{values[0]:.3f}", f"{values[-1]:.3f}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        spent = sum(sum(row["time"].values()) for row in rows if row["scope"] != "eval")
        table.add_row(arm, "seconds of generation and training", "", f"{spent:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
