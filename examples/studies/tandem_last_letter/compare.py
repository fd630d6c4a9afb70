"""Compares Tandem RL with GRPO on the last-letter task, both from the same SFT model.

    python examples/studies/tandem_last_letter/compare.py --seeds 0 1 2 --out runs/tandem_last_letter/arms

Each arm is measured alone, in hand-offs with the SFT model, and by how well the SFT model predicts its texts. The
script runs what is missing, prints a table with 95 % confidence intervals over seeds, and writes comparison.json. The
two arms differ in one thing: GRPO has no junior. Each is trained by the same number of updates, prompts and samples,
without a KL term.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "miniatures/last_letter"))

import task  # noqa: E402  (beside the other example)
from measures import Metrics, measure  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from teachers import ProblemSizes  # noqa: E402

ARMS = {
    "grpo": ["recipe.target=megatron_rl.recipes.grpo:Grpo", "roles.generator.tandem=null"],
    "tandem": [],
}
SHOWN = {
    "solo_sampled": "solo accuracy, sampled",
    "solo_greedy": "solo accuracy, greedy",
    "handoff": "hand-off accuracy, sampled",
    "cross_entropy": "cross-entropy of the junior on its texts, nats per token",
    "length": "tokens of a text",
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
SFT_SEED = 1
console = Console(soft_wrap=True, width=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of reinforcement learning; at least two"
    )
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--samples", type=int, default=4, help="samples for each held-out problem and measure")
    parser.add_argument("--out", type=Path, default=Path("runs/tandem_last_letter/arms"))
    options = parser.parse_args()
    base = Path("runs/tandem_last_letter")
    prepare(base)
    start, test = base / "generator/model", base / "task/test.jsonl"
    before = measure(start, start, test, samples=options.samples)
    found: dict[str, list[Metrics]] = {}
    for arm in ARMS:
        for seed in options.seeds:
            run = train(options, arm, seed)
            found.setdefault(arm, []).append(measured(run, start, test, options.samples))
            console.print(
                f"{arm}, seed {seed}: { ({name: round(value, 3) for name, value in found[arm][-1].items()}) }"
            )
    show(before, found)
    report = {"before": before, "updates": options.updates, "seeds": options.seeds, "arms": found}
    (options.out / "comparison.json").write_text(json.dumps(report, indent=1) + "\n")


def prepare(base: Path) -> None:
    """Makes the task and the SFT model of regime a of miniatures/last_letter under `base`. Keeps files that exist."""
    regime, files = task.regimes()["a"], base / "task"
    if not (files / "generator_sft.jsonl").exists():
        task.write_model(files / "model", SFT_SEED)
        test = task.write_problems(files / "test.jsonl", ProblemSizes((3, 5), (2, 4)), 512, SFT_SEED + 1)
        task.write_problems(
            files / "train.jsonl", regime.train, 8000, SFT_SEED + 2, without=[row["question"] for row in test]
        )
        task.write_generator_pairs(files / "generator_sft.jsonl", regime, SFT_SEED + 5)
    if not (base / "generator/model/model.safetensors").exists():
        program(
            base / "sft.log",
            "sft",
            HERE.parents[1] / "miniatures/last_letter/sft.yaml",
            f"model.path={files}/model",
            "launch.nproc=1",
            f"data.train={files}/generator_sft.jsonl",
            "steps=400",
            "optimizer.decay_steps=400",
            "run.name=generator",
            f"run.dir={base}",
        )


def train(options: argparse.Namespace, arm: str, seed: int) -> Path:
    """Trains one arm with one seed and returns its run directory. An unfinished run is continued."""
    run = options.out / f"{arm}_seed{seed}"
    if not (run / "summary.json").exists():
        program(
            options.out / f"{run.name}.log", "train", HERE / "tandem.yaml", f"run.seed={seed}", f"run.name={run.name}",
            f"run.dir={options.out}", f"recipe.args.updates={options.updates}", *ARMS[arm],
        )  # fmt: skip
    return run


def program(log: Path, *arguments: Any) -> None:
    """Runs `megatron-rl *arguments`. Leaves with its status when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"{arguments[0]} -> {log}")
    with log.open("w") as file:
        command = [sys.executable, "-m", "megatron_rl.main", *map(str, arguments)]
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    if status:
        console.print(log.read_text()[-2000:])
        sys.exit(status)


def measured(run: Path, junior: Path, test: Path, samples: int) -> Metrics:
    """Returns the metrics of a trained model, which are measured once and kept beside it."""
    kept = run / "measured.json"
    if not kept.exists():
        kept.write_text(json.dumps(measure(run / "models/generator", junior, test, samples=samples)) + "\n")
    return json.loads(kept.read_text())


def show(before: Metrics, found: dict[str, list[Metrics]]) -> None:
    seeds = len(found["tandem"])
    table = Table(
        title=f"last letter, {seeds} seeds: mean ± 95 % confidence over seeds; the difference is paired by seed"
    )
    for column in ("held out", "start", *found, "tandem - grpo"):
        table.add_column(column, justify="left" if column == "held out" else "right")
    for name, label in SHOWN.items():
        values = {arm: [row[name] for row in rows] for arm, rows in found.items()}
        difference = [b - a for a, b in zip(values["grpo"], values["tandem"], strict=True)]
        table.add_row(label, f"{before[name]:.3f}", *(interval(v) for v in values.values()), interval(difference))
    console.print(table)


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T_95.get(len(values), 1.96) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
