"""Runs SSRL in miniature: a tiny model learns to search in its own memory rather than to guess.

    python examples/miniatures/ssrl/run.py

A question names a person; the answer is the river at the town where that person lives. The supervised start knows every
town and every river. It seldom writes the town down as the result of a search of its own, and guesses the river where
it does not. Reinforcement learning rewards correct answers and the form, and what stands in <information> is in no
loss.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

HERE, BASE = Path(__file__).parent, Path("runs/ssrl")
sys.path += [str(HERE.parent), str(HERE.parent / "evolve")]

import task  # noqa: E402  (beside the other example)
from mini_runs import command, console, series, start_middle_end  # noqa: E402  (beside the examples)
from rich.table import Table  # noqa: E402

COUNT = 16  # persons, towns and rivers
TAGS = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]
PLACES = [f"{kind}{i}" for kind in ("person", "town", "river") for i in range(COUNT)]
SEARCHES = 0.2  # of the answers of the supervised start
STEPS, BATCH = 300, 32  # of the supervised start
CURVES = {
    "reward/outcome": "reward: 0.9 correct + 0.1 form",
    "information_share": "share of tokens in <information>",
    "length": "tokens",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    options = parser.parse_args()
    prepare(seed=1)
    command(
        "train", str(HERE / "ssrl.yaml"), f"run.seed={options.seed}", f"recipe.args.updates={options.updates}",
    )  # fmt: skip
    table = Table(title="SSRL: searches in the model's own memory")
    for column in ("figure", "start", "middle", "end"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, label in CURVES.items():
        values = [value for _, value in series(BASE / "ssrl", "generator", name, counted="generator")]
        table.add_row(label, *(f"{value:.2f}" for value in start_middle_end(values, width=3)))
    console.print(table)


def prepare(seed: int) -> None:
    """Makes the task's files and the supervised start. What is there is kept."""
    files = BASE / "task"
    if not (BASE / "ready").exists():
        task.write_model(files / "model", seed, [*TAGS, "<ask>", *PLACES])
        rng = random.Random(seed + 1)
        towns, rivers = (rng.sample(range(COUNT), COUNT) for _ in range(2))
        facts = [(f"person{i}", f"town{towns[i]}", f"river{rivers[towns[i]]}") for i in range(COUNT)]
        task.write_jsonl(files / "train.jsonl", [{"question": person, "answer": river} for person, _, river in facts])
        task.write_jsonl(files / "sft.jsonl", [_pair(rng, *rng.choice(facts)) for _ in range(STEPS * BATCH)])
        (BASE / "ready").touch()
    if not (BASE / "start/model/model.safetensors").exists():
        command("sft", str(HERE / "sft.yaml"), f"steps={STEPS}", f"run.dir={BASE}")


def _pair(rng: random.Random, person: str, town: str, river: str) -> dict[str, str]:
    """Draws an answer with a search, which is correct, or one without, which guesses."""
    search = f"<search> {person} </search> <information> {town} </information> <think> {town} </think>"
    middle, answer = (search, river) if rng.random() < SEARCHES else ("", f"river{rng.randrange(COUNT)}")
    response = f"<think> {person} </think> {middle} <answer> {answer} </answer>"
    return {"prompt": f"<bos> {person} <ask>", "response": " ".join(response.split())}


if __name__ == "__main__":
    main()
