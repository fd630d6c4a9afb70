"""Runs miniatures of agents: a tiny model learns to use a tool, and does the same with a tool that is of no use."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE / "evolve")]

from mini_runs import command, console, series, start_middle_end, windows  # noqa: E402  (beside this file)
from rich.table import Table  # noqa: E402

from megatron_rl.training.store import ROLLOUTS, iteration_files, read_rows  # noqa: E402

Row = Mapping[str, Any]  # a sample as `training.store.read_rows` gives it
ROLE = "agent"
CURVES = {"reward/outcome": "right answers", "reward/tool_calls": "calls of the tool", "length": "tokens written"}
TASK_SEED = 1
WIDTH = 3  # iterations that the start, the middle and the end of a curve are means of


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of a miniature with one tool."""

    name: str  # of the run
    label: str  # in the table
    tool: str  # its target, module:name
    args: Mapping[str, Any] = field(default_factory=dict)  # of the tool


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """A task that a tiny model learns with a tool, and the arms that are compared. The first arm's report is made."""

    config: Path  # of the runs; the config of the supervised start, sft.yaml, lies beside it
    title: str  # of the table
    tool: str  # what the tool is called there
    write_task: Callable[[Path, int], None]  # (directory, seed): makes `model`, train.jsonl, test.jsonl and sft.jsonl
    sft_steps: int
    arms: Sequence[Arm]
    # Further metrics by their labels: a number of a sample, or None for a sample that the metric is not about.
    samples: Mapping[str, Callable[[Row], float | None]] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        """The directory of its runs, as its configs have it."""
        return Path("runs") / self.config.parent.name


def main(miniature: Miniature, description: str | None) -> None:
    """Runs all arms of a miniature and prints the table of their metrics."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    options = parser.parse_args()
    prepare(miniature)
    table = Table(title=miniature.title)
    for column in (miniature.tool, "figure", "start", "middle", "end"):
        table.add_column(column, justify="left" if column in (miniature.tool, "figure") else "right")
    for arm in miniature.arms:
        tools = json.dumps([{"target": arm.tool} | ({"args": dict(arm.args)} if arm.args else {})])
        command(
            "train", str(miniature.config), f"run.name={arm.name}", f"run.seed={options.seed}",
            f"recipe.args.updates={options.updates}", f"recipe.args.environment.args.tools={tools}",
        )  # fmt: skip
        for label, values in metrics(miniature, miniature.base / arm.name).items():
            shown = ("" if math.isnan(value) else f"{value:.2f}" for value in values)
            table.add_row(arm.label, label, *shown)
    command("report", str(miniature.base / miniature.arms[0].name))
    console.print(table)


def prepare(miniature: Miniature) -> None:
    """Makes the task's files and the supervised start. What is there is kept."""
    base = miniature.base
    if not (base / "ready").exists():
        miniature.write_task(base / "task", TASK_SEED)
        (base / "ready").touch()
    if not (base / "start/model/model.safetensors").exists():
        sft = miniature.config.with_name("sft.yaml")
        command("sft", str(sft), f"steps={miniature.sft_steps}", f"run.dir={base}")


def metrics(miniature: Miniature, run: Path) -> dict[str, list[float]]:
    """Returns the metrics of a run by their labels, each at the start, at the middle and at the end; nan where there is
    none."""
    held_out = [value for _, value in series(run, "eval", f"{ROLE}/reward", counted=ROLE)]
    out = {"right answers, held out": [held_out[0], math.nan, held_out[-1]]}
    for name, label in CURVES.items():
        out[label] = start_middle_end([value for _, value in series(run, ROLE, name, counted=ROLE)], width=WIDTH)
    iterations = [read_rows(path, ROLE) for path in iteration_files(run / ROLLOUTS)] if miniature.samples else []
    for label, metric in miniature.samples.items():
        out[label] = [_mean(window, metric) for window in windows(iterations, width=WIDTH)]
    return out


def split_pairs(rng: random.Random, held_out: int = 256) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns all pairs of numbers of two digits in a random order: those that are held out, and those that are not."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    return pairs[:held_out], pairs[held_out:]


def conversation(prompt: str, *said: str) -> dict[str, Any]:
    """Returns a row of a supervised start: a prompt, then an answer of the model and a tool's in turn. Only what the
    model wrote is trained on (turns.jinja)."""
    roles = ("assistant", "tool")
    told = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    return {"messages": [{"role": "user", "content": prompt}, *told]}


def _mean(iterations: Sequence[Sequence[Row]], metric: Callable[[Row], float | None]) -> float:
    """Returns the mean of a metric over all samples of some iterations that it is about; nan where there are none."""
    values = [value for rows in iterations for row in rows if (value := metric(row)) is not None]
    return sum(values) / len(values) if values else math.nan
