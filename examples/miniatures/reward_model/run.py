"""Trains a reward model on synthetic preferences, then a policy against its score, and shows the true score beside it.

    python examples/miniatures/reward_model/run.py --seeds 0 1 2

The question is a letter, and the true score of an answer is the share of this letter among its characters. The
preferences compare answers of eight letters, whose larger share is preferred. The policy writes any of 57 characters:
it finds answers whose score is above that of the best answers, while their true score is low. A run with the true
score as the reward shows what the policy can reach. A run that was interrupted goes on where it stood when the same
command is given again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.table import Table
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from mini_runs import command, console, series, start_middle_end  # noqa: E402  (beside the examples)

BASE = Path("runs/reward_model")  # as the configs have it
PAIRS, HELD_OUT = 512, 128
LETTERS, OTHERS, LENGTH = "abc", "defgh", 8
WIDTH = 20  # updates that a figure of the table is the mean of
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's t by number of seeds
ARMS = {"scored": "reward model", "graded": "true score"}  # name of the run and its config: what it is trained on
SCORE, TRUE = "reward/reward_model", "reward/outcome"


def preference(rng: random.Random) -> dict[str, str]:
    """Two answers to one question, with different shares of its letter."""
    letter, answers = rng.choice(LETTERS), []
    for share in sorted(rng.sample(range(LENGTH + 1), 2)):
        own = [letter] * share + rng.choices(OTHERS, k=LENGTH - share)
        rng.shuffle(own)
        answers.append("".join(own))
    return {"prompt": letter * 3, "rejected": answers[0], "chosen": answers[1]}


def prepare(base: Path, seed: int) -> None:
    """Makes the task's files, the model that both begin with, and the reward model. What is there is kept."""
    if not (base / "problems.jsonl").exists():
        write_tiny_model(base / "model", seed=seed)
        for name, count in (("pairs", PAIRS), ("held_out", HELD_OUT)):
            rng = random.Random(f"{seed}/{name}")
            (base / f"{name}.jsonl").write_text("\n".join(json.dumps(preference(rng)) for _ in range(count)))
        write_tiny_problems(base / "problems.jsonl", 64, seed=seed)
    if not (base / "reward/model/model.safetensors").exists():
        data = [f"data.{key}={base}/{name}.jsonl" for key, name in (("train", "pairs"), ("validation", "held_out"))]
        own = [f"model.path={base}/model", f"run.dir={base}", f"run.seed={seed}"]
        command("sft", str(HERE / "reward.yaml"), *data, *own)


def train(base: Path, seed: int, arm: str, updates: int) -> None:
    """Trains the policy against the score of the reward model, or against the true score."""
    own = [f"roles.generator.model.path={base}/model", f"data.path={base}/problems.jsonl", f"run.dir={base}"]
    own += [f"roles.reward.model.path={base}/reward/model"] if arm == "scored" else []
    command("train", str(HERE / f"{arm}.yaml"), *own, f"run.seed={seed}", f"recipe.args.updates={updates}")


def curve(run: Path, name: str) -> list[float]:
    """A metric of the policy's updates."""
    return [value for _, value in series(run, "generator", name, counted="generator")]


def best_score(base: Path) -> float:
    """The reward model's mean score of the best answers: the letter, eight times."""
    model = AutoModelForSequenceClassification.from_pretrained(base / "reward/model", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "reward/model")
    texts = [letter * (3 + LENGTH) for letter in LETTERS]
    ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts])
    model.config.pad_token_id = None  # the score is read at the EOS token, with which the tokenizer pads
    with torch.no_grad():
        return statistics.fmean(model(row[None]).logits.item() for row in ids)


def interval(values: Sequence[float]) -> str:
    """The mean over seeds with its 95 % confidence interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    half = T_95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.2f} ± {half:.2f}"


def show(seeds: Sequence[int]) -> None:
    """Prints both scores at the start, at the middle and at the end, and draws the curves."""
    runs = [BASE / str(seed) for seed in seeds]
    accuracies = [series(run / "reward", "sft", "validation_rewards/accuracies", counted="sft")[-1][1] for run in runs]
    console.print(f"held-out pairs that the reward model orders as the data do: {interval(accuracies)}")
    console.print(f"the reward model's score of the best answers: {interval([best_score(run) for run in runs])}")
    table = Table(title=f"a policy against a reward model, {len(runs)} seeds, means of {WIDTH} updates")
    for column in ("trained on", "figure", "start", "middle", "end"):
        table.add_column(column)
    figure, axes = plt.subplots(1, len(ARMS), figsize=(9, 3.4))
    for axis, arm in zip(axes, ARMS, strict=True):
        for number, (name, label) in enumerate(((SCORE, "reward model's score"), (TRUE, "true score"))):
            if name == SCORE and arm == "graded":
                continue
            curves = [curve(run / arm, name) for run in runs]
            shown = zip(*(start_middle_end(own, width=WIDTH) for own in curves), strict=True)
            table.add_row(ARMS[arm], label, *map(interval, shown))
            own = axis if name == TRUE else axis.twinx()
            for values in curves:
                own.plot(values, color=f"C{number}", alpha=0.6)
            own.set_ylabel(label, color=f"C{number}")
        axis.set(title=f"trained on the {ARMS[arm]}", xlabel="updates")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(BASE / "curves.png", dpi=150)
    plt.close(figure)
    console.print(table)
    console.print(f"curves: {BASE / 'curves.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=120)
    options = parser.parse_args()
    for seed in options.seeds:
        prepare(BASE / str(seed), seed)
        for arm in ARMS:
            train(BASE / str(seed), seed, arm, options.updates)
    show(options.seeds)


if __name__ == "__main__":
    main()
