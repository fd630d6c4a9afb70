"""Writes TRL's losses on preferences, their gradients and metrics on fixed responses to a JSON file.

    .venv-oracles/bin/python tests/oracles/trl_preferences.py OUT.json

Everything from log-probs to the loss is computed by TRL's own DPOTrainer, CPOTrainer and KTOTrainer, in float64. What a
model would compute, the log-prob of every token, is a table here. All inputs are multiples of 1/1024.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
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
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl_losses import written

LENGTHS = (5, 1, 7, 3, 6, 4, 2, 5)  # tokens of the responses; in a pair, the chosen one and then the rejected one
PROMPTS = (2, 1, 3, 2)  # tokens of the prompts of the pairs
LABELS = (True, False, True, True, False, True, False, True)  # for KTO
TABLES = ("live", "reference", "kl_live", "kl_reference")
ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dpo": ("DPO", {"loss_type": ["sigmoid"]}),
    "dpo_beta": ("DPO", {"loss_type": ["sigmoid"], "beta": 0.5}),
    "dpo_norm": ("DPO", {"loss_type": ["sigmoid_norm"], "beta": 5.0}),
    "ipo": ("DPO", {"loss_type": ["ipo"]}),
    "dpo_robust": ("DPO", {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "cpo_smoothed": ("CPO", {"loss_type": "sigmoid", "cpo_alpha": 0.0, "label_smoothing": 0.1}),
    "simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5}),
    "simpo_smoothed": (
        "CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 1.375, "label_smoothing": 0.125}
    ),
    "kto": ("KTO", {}),
    "kto_weights": ("KTO", {"beta": 0.25, "desirable_weight": 1.5, "undesirable_weight": 0.75}),
    "kto_kl_below_0": ("KTO", {"beta": 0.25}),
}  # fmt: skip


def make_tables() -> dict[str, list[list[float]]]:
    """Draws the log-probs of all tokens. The mean log-ratio of the mismatched responses is positive."""
    draw = torch.Generator().manual_seed(11)
    columns: dict[str, list[list[float]]] = {name: [] for name in TABLES}
    for length in LENGTHS:
        reference, kl_reference = (-0.5 - 2.5 * torch.rand(length, generator=draw) for _ in range(2))
        made = {
            "reference": reference, "live": reference + 0.6 * torch.randn(length, generator=draw),
            "kl_reference": kl_reference, "kl_live": kl_reference + 0.3 + 0.3 * torch.randn(length, generator=draw),
        }  # fmt: skip
        for name, values in made.items():
            columns[name].append((torch.round(values * 1024) / 1024).tolist())
    return columns


class TableModel(nn.Module):
    """Answers with log-probs from a table instead of computing them: rows by name, in the order of the inputs."""

    def __init__(self, live: Sequence[Tensor], kl_live: Sequence[Tensor]) -> None:
        super().__init__()
        self.rows = [*live], [*kl_live]

    def forward(self, labels: Tensor, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """Token 3 begins a mismatched text, token 2 any other."""
        rows = self.rows[int(input_ids[0, 0] == 3)]
        shifted = labels[:, 1:]
        flat = torch.zeros(shifted.shape).masked_scatter(shifted != -100, torch.cat(rows))
        return SimpleNamespace(
            log_probs=flat, entropy=torch.zeros_like(flat), mean_logits=torch.zeros_like(flat), is_top1=flat > 0
        )


class TableCPO(CPOTrainer):
    """CPOTrainer whose log-probs are those of a table."""

    def concatenated_forward(self, model: TableModel, batch: Any) -> tuple[Any, ...]:
        sums = torch.stack([row.sum() for row in model.rows[0]])
        if self.loss_type in ("ipo", "simpo"):
            sums = sums / torch.tensor([len(row) for row in model.rows[0]])
        half, nothing = len(sums) // 2, torch.zeros(1)
        return sums[:half], sums[half:], nothing, nothing, torch.zeros(())


def make_trainer(directory: Path, kind: str, settings: Mapping[str, Any]) -> Any:
    """A trainer of TRL on a tiny model that is never called."""
    common = {
        "output_dir": str(directory / "out"), "use_cpu": True, "report_to": "none", "bf16": False,
        "per_device_train_batch_size": len(LENGTHS),
    }  # fmt: skip
    classes = {"DPO": (DPOTrainer, DPOConfig), "CPO": (TableCPO, CPOConfig), "KTO": (KTOTrainer, KTOConfig)}
    trainer, config = classes[kind]
    pair = {"prompt": ["w2", "w3"], "chosen": ["w4", "w5"], "rejected": ["w6", "w7"]}
    unpaired = {"prompt": ["w2", "w3"], "completion": ["w4", "w5"], "label": [True, False]}
    return trainer(
        model=str(directory / "model"),
        args=config(**common, **settings),
        train_dataset=Dataset.from_dict(unpaired if kind == "KTO" else pair),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory / "model"),
    )


def padded(order: Sequence[int], first: int) -> dict[str, Tensor]:
    """The inputs of responses in this order: only the masks and the first tokens are read."""
    width = max(PROMPTS) + max(LENGTHS)
    ids, mask = torch.full((len(order), width), 5), torch.zeros(len(order), width, dtype=torch.int64)
    ids[:, 0] = first
    for row, number in enumerate(order):
        mask[row, PROMPTS[number // 2] : PROMPTS[number // 2] + LENGTHS[number]] = 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}


def run_row(directory: Path, name: str, tables: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """The row's loss, gradient by log-prob and metrics."""
    kind, settings = ROWS[name]
    trainer = make_trainer(directory, kind, settings)
    numbers = range(len(LENGTHS))
    order = [*numbers] if kind == "KTO" else [*numbers[0::2], *numbers[1::2]]  # DPO: all chosen, then all rejected
    live = [torch.tensor(row).requires_grad_() for row in tables["live"]]
    reference = torch.tensor([sum(row) for row in tables["reference"]])
    kl_live, kl_reference = tables["kl_live"], tables["kl_reference"]
    if name == "kto_kl_below_0":
        kl_live, kl_reference = kl_reference, kl_live
    model = TableModel([live[i] for i in order], [torch.tensor(row) for row in kl_live])
    trainer.precompute_ref_logps = True
    trainer.model.train()
    inputs: dict[str, Any] = padded(order, 2)
    if kind == "KTO":
        inputs |= {f"KL_{key}": value for key, value in padded(order, 3).items()}
        inputs |= {"label": torch.tensor(LABELS), "ref_logps": reference}
        inputs |= {"ref_KL_logps": torch.tensor([sum(row) for row in kl_reference])}
    else:
        half = len(order) // 2
        inputs |= {"ref_chosen_logps": reference[order[:half]], "ref_rejected_logps": reference[order[half:]]}
    if kind == "CPO":
        loss, metrics = trainer.get_batch_loss_metrics(model, inputs)
    else:
        loss = trainer._compute_loss(model, inputs, False)
        metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    loss.backward()
    kept = {key: float(value) for key, value in metrics.items() if key.startswith(("rewards/", "logps/", "kl"))}
    return {
        "trainer": f"{kind}Trainer", "settings": dict(settings), "loss": loss.item(),
        "by_logprob": [row.grad.tolist() for row in live], "metrics": kept,
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
    tables = make_tables()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny.write(directory / "model")
        answer = {
            "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
            "inputs": {**tables, "prompts": PROMPTS, "labels": LABELS},
            "rows": {key: run_row(directory, key, tables) for key in ROWS},
        }
    Path(sys.argv[1]).write_text(written(answer))


if __name__ == "__main__":
    main()
