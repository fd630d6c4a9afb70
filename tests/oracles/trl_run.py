"""Records two optimizer steps of TRL's GRPOTrainer on a tiny Qwen2 on one CPU, for replaying them elsewhere.

    .venv-oracles/bin/python tests/oracles/trl_run.py OUT_DIRECTORY

Writes model/ (the start), after_1.safetensors and after_2.safetensors (the weights after each step) and record.json:
settings, rollouts with TRL's rewards, advantages and log-probs, and which of them each step trained on. TRL samples
once and takes two steps on halves of the samples, so that the second step's ratios are not 1.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ("w5 w6 w7", "w8 w9", "w10 w11 w12 w13", "w14")
SETTINGS = {
    "loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.05, "use_bias_correction_kl": False,
    "scale_rewards": "group", "temperature": 1.0, "num_generations": 4, "max_completion_length": 12,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2,
    "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "adamw_torch", "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.125, "seed": 3,
    # Transformers gives the embedding of the padding token no gradient: a sampled one would not be trained as others.
    "generation_kwargs": {"suppress_tokens": [tiny.PAD]},
}  # fmt: skip


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Eighths of a point for every different even token."""
    return [len({token for token in ids if token % 2 == 0}) / 8 for ids in completion_ids]


class Recorder(GRPOTrainer):
    """GRPOTrainer that keeps what it samples and which of it each step trains on."""

    rollouts: list[dict[str, Any]]
    steps: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.rollouts, self.steps = [], []
        for i in range(len(inputs)):
            kept = batch["completion_mask"][i].bool()
            tokens = batch["completion_ids"][i][kept].tolist()
            self.rollouts.append(
                {
                    "prompt": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
                    "completion": tokens,
                    "reward": reward([tokens])[0],
                    "advantage": batch["advantages"][i].item(),
                    "old": batch["old_per_token_logps"][i][kept].tolist(),
                }
            )
        return batch | {"number": torch.arange(len(inputs))}  # shuffled and split as the rest of the batch is

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        loss = super().compute_loss(model, inputs)
        self.steps.append({"rollouts": inputs["number"].tolist(), "loss": loss.item()})
        return loss


class KeepWeights(transformers.TrainerCallback):
    """Writes the weights after every optimizer step."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, self.out / f"after_{state.global_step}.safetensors")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    tiny.write(out / "model")
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Recorder(
            model=str(out / "model"),
            args=GRPOConfig(
                output_dir=scratch, use_cpu=True, bf16=False, report_to="none", logging_steps=1, save_strategy="no",
                disable_tqdm=True, log_level="error", gradient_checkpointing=False, max_steps=2,
                model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"}, **SETTINGS,
            ),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
            processing_class=PreTrainedTokenizerFast.from_pretrained(out / "model"),
            callbacks=[KeepWeights(out)],
        )  # fmt: skip
        trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    record = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "settings": SETTINGS,
        "steps": trainer.steps,
        "grad_norms": norms,
        "rollouts": trainer.rollouts,
    }
    (out / "record.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
