"""Records three optimizer steps of TRL's DPOTrainer on a tiny Qwen2 on one CPU, for repeating them elsewhere.

    .venv-oracles/bin/python tests/oracles/trl_dpo_run.py OUT_DIRECTORY

Writes after.safetensors (the weights after the steps; the start is trl_run/model) and record.json: settings, rows, and
loss, metrics and gradient norm of each step. Each step trains on all rows.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import tiny
import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

ROWS = [
    {"prompt": "w5 w6 w7", "chosen": " w8 w9 w10", "rejected": " w11"},
    {"prompt": "w12", "chosen": " w13", "rejected": " w14 w15 w16 w17"},
    {"prompt": "w18 w19", "chosen": " w20 w21", "rejected": " w20 w22 w23"},
    {"prompt": "w24 w25 w26 w27", "chosen": " w28 w29 w30 w31 w32", "rejected": " w33 w34"},
    {"prompt": "w5 w6 w7", "chosen": " w8 w35", "rejected": " w36 w37 w9"},
]
SETTINGS = {
    "loss_type": ["sigmoid"], "beta": 0.5, "max_length": None, "per_device_train_batch_size": 5, "max_steps": 3,
    "learning_rate": 3e-3, "lr_scheduler_type": "constant", "optim": "adamw_torch", "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.125, "seed": 3,
}  # fmt: skip


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = str(tiny.write(Path(scratch) / "model"))
        trainer = DPOTrainer(
            model=model,
            args=DPOConfig(
                output_dir=scratch, use_cpu=True, bf16=False, report_to="none", logging_steps=1, save_strategy="no",
                disable_tqdm=True, log_level="error", gradient_checkpointing=False,
                model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"}, **SETTINGS,
            ),
            train_dataset=Dataset.from_list(ROWS),
            processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        )  # fmt: skip
        trainer.train()
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in trainer.model.state_dict().items()}
    save_file(weights, out / "after.safetensors")
    kept = ("loss", "grad_norm", "rewards/", "logps/")
    record = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "settings": SETTINGS,
        "rows": ROWS,
        "steps": [
            {key: value for key, value in entry.items() if key.startswith(kept)}
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
    }
    (out / "record.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
