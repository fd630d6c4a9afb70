"""Writes the losses of reward models on fixed scores, with gradients and metrics, to a JSON file.

    .venv-oracles/bin/python tests/oracles/trl_rewards.py OUT.json

The losses on pairs are computed by TRL's own RewardTrainer, in float64. What a model would compute, the score of every
text, is a table here. Process reward models are trained with the loss of transformers' token classifiers, which TRL's
PRMTrainer uses; their two logits are (0, score). All inputs are multiples of 1/1024.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny
import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForTokenClassification
from trl import RewardConfig, RewardTrainer
from trl_losses import written

PAIRS = 5
MARGINS = (0.5, 0.0, 1.25, 0.0, 2.0)
# labels of the steps of four solutions
STEPS = ((1, 1, 0), (0,), (1, 1, 1, 1), (1, 0))
ROWS: Mapping[str, tuple[Mapping[str, Any], bool]] = {  # settings of RewardConfig, and whether rows have a margin
    "bradley_terry": ({}, False),
    "bradley_terry_margin": ({}, True),
    "bradley_terry_centred": ({"center_rewards_coefficient": 0.125}, False),
    "bradley_terry_margin_centred": ({"center_rewards_coefficient": 0.01}, True),
}


def drawn(count: int, seed: int) -> list[float]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.round(1.5 * torch.randn(count, generator=draw) * 1024) / 1024).tolist()


class TableModel(nn.Module):
    """Answers with scores from a table instead of computing them."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.scores[:, None])


def pair_row(directory: Path, name: str, scores: list[float]) -> dict[str, Any]:
    """The loss of a row, its gradient by the scores (all chosen texts, then all rejected), and its metrics."""
    settings, margin = ROWS[name]
    trainer = RewardTrainer(
        model=str(directory / "model"),
        args=RewardConfig(
            output_dir=str(directory / "out"), use_cpu=True, report_to="none", bf16=False,
            per_device_train_batch_size=PAIRS, **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w2", "w3"], "chosen": ["w4", "w5"], "rejected": ["w6", "w7"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory / "model"),
    )  # fmt: skip
    trainer.model.train()
    table = torch.tensor(scores, requires_grad=True)
    inputs = {"attention_mask": torch.ones(2 * PAIRS, 1)} | ({"margin": torch.tensor(MARGINS)} if margin else {})
    loss = trainer.compute_loss(TableModel(table), inputs)
    loss.backward()
    metrics = {key: float(values[-1]) for key, values in trainer._metrics["train"].items() if key != "num_tokens"}
    return {
        "trainer": "RewardTrainer", "settings": dict(settings), "margin": margin, "loss": loss.item(),
        "by_score": table.grad.tolist(), "metrics": metrics,
    }  # fmt: skip


def prm_row(scores: list[float]) -> dict[str, Any]:
    """The loss of labelled steps, and its gradient by the score of each step."""
    table = torch.tensor(scores, requires_grad=True)
    width, place = 2 * max(map(len, STEPS)), 0
    logits, labels = [], torch.full((len(STEPS), width), -100)
    for row, marks in enumerate(STEPS):
        own = torch.zeros(width, 2)
        for step, mark in enumerate(marks):
            labels[row, 2 * step + 1] = mark
            own[2 * step + 1] = torch.stack([torch.zeros(()), table[place]])
            place += 1
        logits.append(own)
    loss = ForTokenClassification(torch.stack(logits), labels, SimpleNamespace(num_labels=2))
    loss.backward()
    right = sum((score > 0) == bool(mark) for score, mark in zip(scores, sum(STEPS, ()), strict=True))
    return {
        "trainer": "PRMTrainer", "settings": {}, "loss": loss.item(), "by_score": table.grad.tolist(),
        "metrics": {"accuracy": right / len(scores)},
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    disable_progress_bars()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    scores, steps = drawn(2 * PAIRS, 5), drawn(sum(map(len, STEPS)), 6)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny.write(directory / "model")
        rows = {key: pair_row(directory, key, scores) for key in ROWS}
    answer = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "inputs": {"scores": scores, "margins": MARGINS, "step_scores": steps, "step_labels": STEPS},
        "rows": rows | {"prm": prm_row(steps)},
    }
    Path(sys.argv[1]).write_text(written(answer))


if __name__ == "__main__":
    main()
