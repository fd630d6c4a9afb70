"""Runs the last-letter experiment from nothing: tiny model, SFT of both roles, one arm of RL, table and report.

    python examples/miniatures/last_letter/run.py --regime a --arm tango --seed 0 --out runs/demo

The task and the SFT models of a regime are made once, under runs/last_letter/REGIME, and used by all arms and seeds;
`--seed` is the seed of reinforcement learning. A run that was interrupted goes on where it stood when the same command
is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import task
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ALONE = {
    "grpo": "GRPO",
    "ppo": "PPO",
    "online_dpo": "online DPO",
    "votes": "GRPO by votes",
}  # arms without a verifier: NAME.yaml
ARMS = ("tango", "frozen_verifier", "frozen_generator", *ALONE)
SFT_SEED = 1
POOL = 512  # sampled solutions that the verifier's SFT judges
ENGINES = {"embedded": [], "vllm": ["engine.kind=vllm"], "sglang": ["engine.kind=sglang", "engine.kv_cache_gib=0.25"]}
MADE_BY = {"vllm": "make engines", "sglang": "make engines-sglang"}
HEADS = {"embedded": 4, "vllm": 2, "sglang": 2}  # vLLM's attention on a CPU wants heads of 32 at least
STUBBED = (
    "engine: SGLang's real server on STUBBED kernels (torch operations instead); this says nothing about its speed"
)
console = Console(soft_wrap=True)


class Stages:
    """The stages of the experiment: runs the program's commands one by one and remembers how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        console.rule(name)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)

    def command(self, name: str, *arguments: str) -> None:
        """Runs `megatron-rl *arguments` as a stage. Leaves with its status when it fails."""
        with self.stage(name):
            child = subprocess.Popen([sys.executable, "-m", "megatron_rl.main", *arguments])
            numbers = (signal.SIGINT, signal.SIGTERM)  # these go to the child, which saves while this process waits
            before = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in numbers}
            status = child.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
            if status:
                sys.exit(status)


def prepare(base: Path, name: str, stages: Stages, *, heads: int, verifier: bool = True) -> None:
    """Makes the task's files, then the SFT models of generator and verifier, under `base`. What is there is kept.

    Regime b takes regime a's verifier: b's own generator is correct too seldom for a verifier to learn from its
    solutions. With `verifier` False, the generator alone is made.
    """
    if name == "b" and verifier:
        prepare(base.parent / "a", "a", stages, heads=heads)
    regime, files = task.regimes()[name], base / "task"
    if not (base / "ready").exists():
        with stages.stage("task"):
            task.write_model(files / "model", SFT_SEED, heads=heads)
            test = task.write_problems(files / "test.jsonl", regime.test, 512, SFT_SEED + 1)
            held = [row["question"] for row in test]
            task.write_problems(files / "train.jsonl", regime.train, 8000, SFT_SEED + 2, without=held)
            task.write_problems(files / "judged.jsonl", regime.judged, 4000, SFT_SEED + 3, without=held)
            task.write_problems(files / "pool.jsonl", regime.sft, POOL, SFT_SEED + 4, without=held)
            task.write_generator_pairs(files / "generator_sft.jsonl", regime, SFT_SEED + 5)
            (base / "ready").touch()
    if not (base / "generator/model/model.safetensors").exists():
        console.print("The last 100 of 400 steps teach a misconception on purpose: the loss rises there.")
        stages.command("SFT of the generator", "sft", *sft(base, "generator", files / "model", 400))
    if verifier and name != "b" and not (base / "verifier/model/model.safetensors").exists():
        pool = base / "pool"
        stages.command(
            "solutions for the verifier to judge",
            "generate",
            f"model.path={base}/generator/model",
            f"data.path={files}/pool.jsonl",
            "data.settings=last_letter",
            f"template={HERE}/prompts/generator.txt",
            "sampling.max_tokens=48",
            "validation_share=0.0",
            f"output={pool}",
            "launch.nproc=2",
        )
        rows = pq.read_table(pool / "train.parquet").to_pylist()
        task.write_verifier_pairs(files / "verifier_sft.jsonl", regime, rows, SFT_SEED + 6)
        stages.command("SFT of the verifier", "sft", *sft(base, "verifier", base / "generator/model", 400))


def reinforce(base: Path, options: argparse.Namespace, stages: Stages) -> None:
    """Trains one arm, into options.out."""
    regime = task.regimes()[options.regime]
    updates = options.updates or regime.generator_updates
    warmup = regime.warmup_updates if options.warmup is None else options.warmup
    settings = [
        f"run.seed={options.seed}",
        f"run.name={options.out.name}",
        f"run.dir={options.out.parent}",
        f"data.path={base}/task/train.jsonl",
        f"evaluation.sets=[{{path: {base}/task/test.jsonl, settings: last_letter}}]",
        f"roles.generator.model.path={base}/generator/model",
        f"roles.generator.optimizer.lr={regime.generator_lr}",
        f"evaluation.every={options.evaluate_every}",
        *ENGINES[options.engine],
    ]
    if options.engine != "embedded":
        settings += [f"engine.python={options.python}"]
    if name := ALONE.get(options.arm):
        settings += [f"roles.critic.model.path={base}/generator/model"] if options.arm == "ppo" else []
        config = str(HERE / f"{options.arm}.yaml")
        stages.command(name, "train", config, *settings, f"recipe.args.updates={updates}")
        return
    settings += [
        f"roles.verifier.model.path={base.parent}/a/verifier/model",
        f"roles.verifier.optimizer.lr={regime.verifier_lr}",
        f"recipe.args.generator_updates={updates}",
        f"recipe.args.warmup_updates={warmup}",
        f"recipe.args.alpha_start={regime.alpha_start}",
        f"recipe.args.alpha_min={regime.alpha_min}",
        f"recipe.args.train_generator={str(options.arm != 'frozen_generator').lower()}",
        f"recipe.args.train_verifier={str(options.arm != 'frozen_verifier').lower()}",
    ]
    if regime.judged != regime.train:
        settings += [f"roles.verifier.data={{path: {base}/task/judged.jsonl, settings: last_letter}}"]
    stages.command(f"reinforcement learning: {options.arm}", "train", str(HERE / "tango.yaml"), *settings)


def finish(options: argparse.Namespace, stages: Stages) -> None:
    """Completes summary.json, prints the metrics before and after, and writes the report."""
    path = options.out / "summary.json"
    summary = json.loads(path.read_text())
    for metric, source in (
        ("generator_accuracy", "generator_accuracy"),
        ("verifier_outcome_f1", None),
        ("verifier_step_f1", None),
    ):
        for end in ("start", "end"):
            if source and f"{source}_{end}" in summary:
                summary[f"{metric}_{end}"] = summary[f"{source}_{end}"]
    summary |= {"regime": options.regime, "arm": options.arm, "seed": options.seed}
    seconds = summary.get("seconds", {})
    summary["seconds"] = {**seconds, **phases(options.out), "stages": {**stages.seconds, **seconds.get("stages", {})}}
    path.write_text(json.dumps(summary, indent=1) + "\n")
    table = Table(title=f"last letter, regime {options.regime}, {options.arm}, held-out problems")
    for column in ("figure", "before", "after"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    names = ("generator_accuracy", "generator_accuracy_greedy", "verifier_outcome_f1", "verifier_step_f1")
    for name in names:
        if f"{name}_end" in summary:
            table.add_row(
                name.replace("_", " "),
                f"{summary.get(f'{name}_start', float('nan')):.3f}",
                f"{summary[f'{name}_end']:.3f}",
            )
    console.print(table)
    console.print("updates: " + ", ".join(f"{role} {count}" for role, count in summary["updates"].items()))
    subprocess.run([sys.executable, "-m", "megatron_rl.main", "report", str(options.out)], check=True)


def phases(run: Path) -> dict[str, dict[str, float]]:
    """Returns seconds by role and phase, summed over the run's metrics."""
    totals: dict[str, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for phase, seconds in row["time"].items():
            scope = totals.setdefault(row["scope"], {})
            scope[phase] = round(scope.get(phase, 0.0) + seconds, 2)
    return totals


def sft(base: Path, name: str, model: Path, steps: int) -> Sequence[str]:
    return [
        str(HERE / "sft.yaml"), f"model.path={model}", f"data.train={base}/task/{name}_sft.jsonl", f"steps={steps}",
        f"optimizer.decay_steps={steps}", f"run.name={name}", f"run.dir={base}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=task.regimes(), default="a")
    parser.add_argument("--arm", choices=ARMS, default="tango")
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="run directory")
    parser.add_argument("--updates", type=int, help="generator updates (default: the regime's)")
    parser.add_argument(
        "--warmup", type=int, help="updates of the verifier before the first of the generator (default: the regime's)"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="embedded",
        help="vllm: two real servers (make engines); sglang: two on stubbed kernels",
    )
    parser.add_argument(
        "--evaluate-every", type=int, default=0, help="iterations between evaluations (default: start and end alone)"
    )
    parser.add_argument(
        "--python",
        help="Python of the servers' environment (default: .venv-vllm/bin/python or .venv-sglang/bin/python)",
    )
    options = parser.parse_args()
    options.python = options.python or f".venv-{options.engine}/bin/python"
    if options.engine != "embedded" and shutil.which(options.python) is None:
        parser.error(f"--python {options.python}: there is no such program; `{MADE_BY[options.engine]}` makes it")
    heads = HEADS[options.engine]
    if options.engine == "sglang":
        console.print(STUBBED)
    stages, base = (
        Stages(),
        Path("runs/last_letter" if heads == 4 else f"runs/last_letter_{heads}_heads") / options.regime,
    )
    prepare(base, options.regime, stages, heads=heads, verifier=options.arm not in ALONE)
    reinforce(base, options, stages)
    finish(options, stages)
    if options.engine == "sglang":
        console.print(STUBBED)


if __name__ == "__main__":
    main()
