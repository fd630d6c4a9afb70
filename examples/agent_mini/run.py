"""Runs agents in miniature: a tiny model learns to ask a calculator rather than to guess.

    python examples/agent_mini/run.py

The model multiplies numbers of two digits, which it cannot do by itself. Its supervised start calls the calculator in
some answers, which are right, and guesses in the others. Reinforcement learning rewards right answers alone. The same
is done with a calculator that never knows the result: what the model reaches then, it reaches without help. The
conversations are in the report's page.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

HERE, BASE = Path(__file__).parent, Path("runs/agent_mini")
sys.path += [str(HERE.parent), str(HERE.parent / "evolve_mini")]

import task  # noqa: E402  (beside the other example)
from mini_runs import command, console, series, start_middle_end  # noqa: E402  (beside the examples)
from rich.table import Table  # noqa: E402

TAGS = [f"<{slash}{tag}>" for tag in ("calculator", "result", "answer") for slash in ("", "/")]
KNOWN = [*TAGS, "<ask>", "*", "?", *map(str, range(10))]
# Steps of the supervised start, and the share of answers with a call in them: first the model learns how the calculator
# is asked and its result read, then to ask seldom.
STAGES = [(700, 1.0), (200, 0.15)]
BATCH = 32  # as in sft.yaml
ARMS = {"agent": "SpacedCalculator", "without": "BrokenCalculator"}
CURVES = {"reward/outcome": "right answers", "reward/tool_calls": "calls of the tool", "length": "tokens written"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    options = parser.parse_args()
    prepare(seed=1)
    table = Table(title="products of two numbers of two digits")
    for column in ("calculator", "figure", "start", "middle", "end"):
        table.add_column(column, justify="left" if column in ("calculator", "figure") else "right")
    for name, tool in ARMS.items():
        tools = json.dumps([{"target": f"examples.agent_mini.tool:{tool}"}])
        command(
            "train", str(HERE / "agent.yaml"), f"run.name={name}", f"run.seed={options.seed}",
            f"recipe.args.updates={options.updates}", f"recipe.args.environment.args.tools={tools}",
        )  # fmt: skip
        held_out = [value for _, value in series(BASE / name, "eval", "agent/outcome_sampled", counted="agent")]
        rows = {"right answers, held out": [held_out[0], float("nan"), held_out[-1]]}
        for figure, label in CURVES.items():
            values = [value for _, value in series(BASE / name, "agent", figure, counted="agent")]
            rows[label] = start_middle_end(values, width=3)
        for label, values in rows.items():
            shown = ("" if value != value else f"{value:.2f}" for value in values)
            table.add_row("works" if name == "agent" else "broken", label, *shown)
    command("report", str(BASE / "agent"))
    console.print(table)


def prepare(seed: int) -> None:
    """Makes the task's files and the supervised start. What is there is kept."""
    files = BASE / "task"
    if not (BASE / "ready").exists():
        task.write_model(files / "model", seed, KNOWN)
        rng = random.Random(seed + 1)
        every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        rng.shuffle(every)
        held_out, taught = every[:256], every[256:]
        for name, pairs in (("train", taught), ("test", held_out)):
            rows = [{"question": question(*pair), "answer": digits(pair[0] * pair[1])} for pair in pairs]
            task.write_jsonl(files / f"{name}.jsonl", rows)
        pairs = [_pair(rng, *rng.choice(taught), share) for steps, share in STAGES for _ in range(steps * BATCH)]
        task.write_jsonl(files / "sft.jsonl", pairs)
        (BASE / "ready").touch()
    if not (BASE / "start/model/model.safetensors").exists():
        command("sft", str(HERE / "sft.yaml"), f"steps={sum(steps for steps, _ in STAGES)}", f"run.dir={BASE}")


def question(a: int, b: int) -> str:
    return f"{digits(a)} * {digits(b)}"


def digits(number: int) -> str:
    return " ".join(str(number))


def _pair(rng: random.Random, a: int, b: int, share: float) -> dict[str, str]:
    """Draws an answer with a call, which is right, or one without, which guesses."""
    called = rng.random() < share
    product = a * b if called else rng.randint(100, 9801)
    call = f"<calculator> {question(a, b)} </calculator> <result> {digits(product)} </result> " if called else ""
    response = f"{call}<answer> {digits(product)} </answer>"
    return {"prompt": f"<bos> {question(a, b)} <ask>", "response": response}


if __name__ == "__main__":
    main()
