"""Trains a real pretrained model on two CPU cores: supervised warm-up, then GRPO and Tango from the same start.

    make real-model
    python examples/studies/real_model/run.py --seeds 0

The model is SmolLM2-135M-Instruct, from 4-bit weights (tools/real_model/convert.py). The problems are chains of sums
and differences (rows/, which make_rows.py made by reasoning-gym's chain_sum). Warm-up teaches the form of a solution
and of a verification, with wrong steps in it on purpose; what is learned after that is learned from rewards. The arms
have as many updates as take about the same time. A run that was interrupted goes on where it stood when the same
command is given again. Models train in bfloat16, or in float32 where this CPU is slow in bfloat16 (`--dtype`), then at
a lower rate (docs/experiments/real_model.md).
`--short` makes shorter runs, with smaller batches and evaluations. `--quick` takes a few updates of each, to see that
every part works; its metrics say nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

HERE, BASE = Path(__file__).parent, Path("runs/real_model")
sys.path.append(str(HERE.parents[2]))

from rich.table import Table  # noqa: E402

from examples.miniatures.mini_runs import command, console  # noqa: E402
from examples.studies.equal_time.clock import cpu_seconds  # noqa: E402  (beside this one)
from examples.studies.real_model import chains  # noqa: E402
from megatron_rl.megatron import platform  # noqa: E402
from megatron_rl.report.run_comparison import interval  # noqa: E402
from megatron_rl.run.metrics import MetricsRow, read_metrics  # noqa: E402
from megatron_rl.training.store import iteration_files, read_rows  # noqa: E402

MODEL = BASE / "model"
ROLES = ("generator", "verifier")
PAIRS = 320  # of supervised warm-up, of each role
PHASES = ("rollout", "review", "reward", "train", "refit")  # phases of an iteration; evaluations and saves do not count
CPU = "cpu_seconds.jsonl"  # in a run's directory: the CPU-seconds that each line of its metrics took
LOOK_S = 0.1
DAPO, MAJORITY = "megatron_rl.recipes.dapo:Dapo", "examples.studies.equal_time.majority:MajorityGrpo"
PAPER = (  # the paper's settings of Tango, in place of those in tango.yaml
    *("generator_iterations=3", "reviewed=all", "review_below=null", "verifier_rests=false"),
    *("step_credit={span: rest, baseline: group}", "alpha_start=0.3", "alpha_min=1e-3"),
)


@dataclass(frozen=True)
class Arm:
    """A method with its settings. The numbers of updates were chosen to take about the same time in all arms."""

    config: str  # the file beside this one
    updates: int  # of the generator
    short: int  # the same with --short
    settings: Sequence[str] = ()


ARMS: Mapping[str, Arm] = {
    "grpo": Arm("grpo", 18, 12),
    "grpo_dynamic": Arm("grpo", 16, 11, [f"recipe.target={DAPO}", "recipe.args.dynamic_sampling={rounds: 10}"]),
    "grpo_majority": Arm("grpo", 18, 12, [f"recipe.target={MAJORITY}"]),
    "tango": Arm("tango", 14, 10),
    "frozen": Arm("tango", 16, 11, ["recipe.args.train_verifier=false"]),
    "tango_paper": Arm("tango", 9, 6, [f"recipe.args.{setting}" for setting in PAPER]),
}
FLOAT32_RATE = 1e-5  # of reinforcement learning; with 3e-5 one run of two was lost (docs/experiments/real_model.md)
UPDATES = {"grpo": "updates", "tango": "generator_updates"}  # how the recipe of a config names them
FIGURES = {
    "generator/accuracy": "right answers, sampled",
    "generator/accuracy_greedy": "right answers, by the likeliest tokens",
    "verifier/outcome_f1": "verifier: F1 of final verdicts",
    "verifier/step_f1": "verifier: F1 of verdicts on steps",
}
AXES = {"seconds": "seconds of generation and training", "cpu_s": "CPU-seconds of generation and training"}
SHORT = {  # settings of an arm by its config
    "grpo": ["run.prompts_per_iteration=4", "evaluation.limit=64", "evaluation.every=0"],
    "tango": ["run.prompts_per_iteration=4", "evaluation.limit=64", "recipe.args.balanced_per_class=16"],
}
QUICK = {
    "sft": ["steps=3", "optimizer.decay_steps=3"],
    "grpo": ["evaluation.limit=16", "run.prompts_per_iteration=4"],
    "tango": ["evaluation.limit=16", "run.prompts_per_iteration=12", "recipe.args.balanced_per_class=8"],
}
QUICK_UPDATES = 2
Curve = Sequence[tuple[float, float]]  # (time of generation and training before an evaluation, its metric)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["grpo", "tango"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of reinforcement learning")
    parser.add_argument("--ranks", type=int, default=2, help="of every command; results differ by rounding alone")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of training, instead of what suits this CPU")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--short", action="store_true", help="fewer and smaller updates, 64 held-out problems")
    length.add_argument("--quick", action="store_true", help="two updates of each arm, 16 held-out problems")
    options = parser.parse_args()
    if not (MODEL / "config.json").exists():
        sys.exit(f"{MODEL} is not there: `make real-model` makes it")
    base = BASE / "quick" if options.quick else BASE
    sizes = QUICK if options.quick else SHORT if options.short else {}
    ranks = f"launch.nproc={options.ranks}"
    dtype = options.dtype or ("float32" if platform.multiplies_slowly("bfloat16") else "bfloat16")
    console.print(f"models train in {dtype}")
    roles = {role for arm in options.arms for role in roles_of(arm)}
    prepare(base, [ranks, f"model.dtype={dtype}"], roles, quick=options.quick)
    runs: dict[str, list[Path]] = {arm: [] for arm in options.arms}
    for seed in options.seeds:
        for arm in options.arms:
            way = ARMS[arm]
            updates = QUICK_UPDATES if options.quick else way.short if options.short else way.updates
            own = [f"roles.{role}.model.dtype={dtype}" for role in roles_of(arm)]
            if dtype == "float32":
                own += [f"roles.{role}.optimizer.lr={FLOAT32_RATE}" for role in roles_of(arm)]
            own += [ranks, *way.settings, *sizes.get(way.config, []), f"recipe.args.{UPDATES[way.config]}={updates}"]
            runs[arm].append(train(arm, seed, base, own, short=options.short))
    page = BASE / "comparison.html"
    command("report", *(str(run) for found in runs.values() for run in found), "--out", str(page))
    show(runs)


def prepare(base: Path, own: Sequence[str], roles: Container[str], *, quick: bool) -> None:
    """Makes the pairs, and the start of these roles with further settings. What is there is kept."""
    if not (base / "sft/verifier_sft.jsonl").exists():
        rows = HERE / "rows/train.jsonl"
        chains.write_pairs(rows, base / "sft", count=PAIRS, wrong=0.25, judged_wrong=0.3, misread=0.25)
    for role in ROLES:
        if role in roles and not is_finished(base / role):
            settings = [f"data.train={base}/sft/{role}_sft.jsonl", f"run.name={role}", f"run.dir={base}", *own]
            command("sft", str(HERE / "sft.yaml"), *settings, *(QUICK["sft"] if quick else []))


def roles_of(arm: str) -> Sequence[str]:
    return ROLES if ARMS[arm].config == "tango" else ROLES[:1]


def train(arm: str, seed: int, base: Path, own: Sequence[str], *, short: bool) -> Path:
    """Runs one arm with further settings. -> its run directory."""
    folder, config = base / "short" if short else base, ARMS[arm].config
    run = folder / f"{arm}_{seed}"
    if is_finished(run):
        return run
    settings = [f"run.seed={seed}", f"run.name={run.name}", f"run.dir={folder}", *own]
    settings += [f"roles.{role}.model.path={base}/{role}/model" for role in roles_of(arm)]
    console.rule(f"train {run.name}")
    child = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.main", "train", str(HERE / f"{config}.yaml"), *settings]
    )
    numbers = (signal.SIGINT, signal.SIGTERM)  # these go to the child, which saves while this process waits
    before = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in numbers}
    watch(child, run)
    for number, handler in before.items():
        signal.signal(number, handler)
    if child.returncode:
        sys.exit(child.returncode)
    return run


def watch(child: subprocess.Popen[bytes], run: Path) -> None:
    """Waits for a run, and notes in its directory the CPU-seconds of each line of its metrics: of all of its processes,
    since the line before, or since the start. A line that an interruption had repeated keeps those of its first time.
    """
    known, last, before = set(costs(run)), None, 0.0
    while True:
        used = max(cpu_seconds(child.pid), before)  # nothing is known of one that has ended
        over = child.poll() is not None
        rows = list(read_metrics(run)) if (run / "metrics.jsonl").exists() else []
        names = [(row.iteration, row.scope) for row in rows]
        if names and names[-1] != last:
            new = [name for name in names if name not in known]
            for k, (iteration, scope) in enumerate(new):
                line = {"iteration": iteration, "scope": scope, "cpu_s": round(used - before, 2) if k == 0 else 0.0}
                with (run / CPU).open("a") as file:
                    file.write(json.dumps(line) + "\n")
            known, last, before = known | set(new), names[-1], used
        if over:
            return
        time.sleep(LOOK_S)


def costs(run: Path) -> dict[tuple[int, str], float]:
    """Returns the CPU-seconds of the lines of a run's metrics, by iteration and scope."""
    rows = map(json.loads, (run / CPU).read_text().splitlines()) if (run / CPU).exists() else ()
    return {(row["iteration"], row["scope"]): row["cpu_s"] for row in rows}


def is_finished(run: Path) -> bool:
    summary = run / "summary.json"
    return summary.exists() and bool(json.loads(summary.read_text()).get("finished"))


def show(runs: Mapping[str, Sequence[Path]]) -> None:
    """Prints the metrics before and after of every arm, its time, the arms at equal time, and one sample of each."""
    count = max(map(len, runs.values()))
    title = "SmolLM2-135M-Instruct (4-bit weights): chains of sums and differences, held out"
    table = Table(title=title + (f"; {count} seeds, mean ± 95 % confidence" if count > 1 else ""))
    for column in ("arm", "figure", "before", "after"):
        table.add_column(column, justify="left" if column in ("arm", "figure") else "right")
    curves = {arm: {name: [curve(run, name) for run in found] for name in FIGURES} for arm, found in runs.items()}
    for arm, found in runs.items():
        for name, label in FIGURES.items():
            if all(own := curves[arm][name]):
                table.add_row(arm, label, mean([one[0][1] for one in own]), mean([one[-1][1] for one in own]))
        for axis, label in AXES.items():
            table.add_row(arm, label, "", mean([spent(run, axis) for run in found], digits=0))
    console.print(table)
    name = "generator/accuracy"
    for axis, label in AXES.items():
        ways = {arm: [curve(run, name, axis) for run in found] for arm, found in runs.items()}
        common = min(way[-1][0] for own in ways.values() for way in own)
        metrics = ", ".join(f"{arm} {mean([at(way, common) for way in own])}" for arm, own in ways.items())
        console.print(f"{FIGURES[name]}, after {common:.0f} {label}: {metrics}")
    for arm, found in runs.items():
        points = "; ".join(f"{cpu_s:.0f} CPU-s {value:.3f}" for cpu_s, value in curves[arm][name][0])
        console.print(f"{found[0].name}, {FIGURES[name]}: {points}")
        show_sample(found[0])


def show_sample(run: Path) -> None:
    """Prints the first solution of the run's last iteration that has one, and what the verifier wrote on it."""
    for path in reversed(iteration_files(run / "rollouts")):
        for row in read_rows(path, "generator")[:1]:
            verdict = "right" if row["correct"] else "wrong"
            console.print(
                f"{run.name}, iteration {row['iteration']}: {row['question']}\n{row['text']}  ({verdict})", markup=False
            )
            if row["review"]:
                console.print(f"verifier: {row['review']}", markup=False)
            return


def curve(run: Path, name: str, axis: str = "cpu_s") -> list[tuple[float, float]]:
    """Returns a metric of every evaluation of a run, with the time of generation and training before it: `cpu_s` or
    `seconds` by the clock."""
    used, time_before, points = costs(run), 0.0, []
    for row in read_metrics(run):
        if row.scope in ROLES:
            time_before += lasted(row, used, axis)
        elif row.scope == "eval" and name in row.metrics:
            points.append((time_before, row.metrics[name]))
    return points


def spent(run: Path, axis: str) -> float:
    """Returns a run's time of generation and training."""
    used = costs(run)
    return sum(lasted(row, used, axis) for row in read_metrics(run) if row.scope in ROLES)


def lasted(row: MetricsRow, used: Mapping[tuple[int, str], float], axis: str) -> float:
    if axis == "cpu_s":
        return used.get((row.iteration, row.scope), 0.0)
    return sum(row.time.get(phase, 0.0) for phase in PHASES)


def at(points: Curve, time_before: float) -> float:
    """Returns a metric at a time, on the straight line between the evaluations next to it; the last one after all."""
    for (start, first), (end, second) in zip(points, points[1:], strict=False):
        if start <= time_before < end:
            return first + (second - first) * (time_before - start) / (end - start)
    return points[-1][1]


def mean(values: Sequence[float], *, digits: int = 3) -> str:
    half = interval(values)
    return f"{fmean(values):.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


if __name__ == "__main__":
    main()
