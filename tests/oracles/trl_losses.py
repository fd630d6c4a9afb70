"""Writes TRL's losses, their gradients and TRL's advantages on fixed rollouts to a JSON file.

    .venv-oracles/bin/python tests/oracles/trl_losses.py OUT.json

Everything from rewards and log-probs to the loss is computed by TRL's own GRPOTrainer and RLOOTrainer, in float64.
What a model would compute, the log-prob and the entropy of every token, is a table here, so that ratios lie on both
sides of every bound. All inputs are multiples of 1/1024: float32 holds them exactly.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import split_tensor_dict

GROUP = 4
MAX_COMPLETION = 16
FIRST_NUMBER = 20  # the last token of prompt i is FIRST_NUMBER + i, by which a row of the tables is found
LENGTHS = (5, 1, 7, 3, 6, 4, 2, 5)  # tokens of the completions
TRUNCATED = (2, 7)  # rollouts that do not end with the end-of-sequence token
REWARDS = (1.0, 0.0, 0.5, 0.25, 0.125, 1.0, 0.0, 0.5)
TABLES = ("live", "old", "sampling", "reference", "entropy")


@dataclass(frozen=True)
class Row:
    """One setting of GRPOTrainer. With `engine`, the log-probs of a sampling engine differ from the trainer's."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1  # parts of the batch, whose losses are summed
    engine: bool = False
    steps: bool = False  # each part is an optimizer step of its own
    first: bool = False  # the first optimizer step after sampling, whose old log-probs are the live ones


HIGHER = {"epsilon": 0.2, "epsilon_high": 0.28}
SEQUENCE = {"importance_sampling_level": "sequence"}
PLAIN_KL = {"beta": 0.05, "use_bias_correction_kl": False}


def correction(mode: str, highest: float | None, lowest: float | None = None, **settings: Any) -> Row:
    """A row with one of TRL's corrections for an engine that differs from the trainer."""
    names = ("mode", "clip_max", "clip_min")
    own = {f"vllm_importance_sampling_{n}": v for n, v in zip(names, (mode, highest, lowest), strict=True)}
    return Row({"loss_type": "dapo"} | own | settings, engine=True)


ROWS: Mapping[str, Row] = {
    "grpo": Row({"loss_type": "grpo"}),
    "dapo_first_step": Row({"loss_type": "dapo"}, first=True),
    "grpo_clip_higher": Row({"loss_type": "grpo"} | HIGHER),
    "grpo_2_micro_batches": Row({"loss_type": "grpo"}, micro_batches=2),
    "grpo_masked_truncated": Row({"loss_type": "grpo", "mask_truncated_completions": True}),
    "grpo_delta": Row({"loss_type": "grpo", "delta": 1.5}),
    "bnpo": Row({"loss_type": "bnpo"}),
    "bnpo_micro_batch_per_prompt": Row({"loss_type": "bnpo"}, micro_batches=2),
    "dapo": Row({"loss_type": "dapo"} | HIGHER),
    "dapo_4_micro_batches": Row({"loss_type": "dapo"} | HIGHER, micro_batches=4),
    "dapo_2_steps": Row({"loss_type": "dapo"} | HIGHER, micro_batches=2, steps=True),
    "dapo_masked_truncated": Row({"loss_type": "dapo", "mask_truncated_completions": True}),
    "dr_grpo": Row({"loss_type": "dr_grpo"}),
    "dr_grpo_2_micro_batches": Row({"loss_type": "dr_grpo"}, micro_batches=2),
    "dr_grpo_masked_truncated": Row({"loss_type": "dr_grpo", "mask_truncated_completions": True}),
    "cispo": Row({"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo_tight": Row({"loss_type": "cispo", "epsilon_high": 1.125}),
    "gspo": Row({"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4} | SEQUENCE),
    "gspo_wide": Row({"loss_type": "grpo", "epsilon": 0.125, "epsilon_high": 0.25} | SEQUENCE),
    "gspo_dapo": Row({"loss_type": "dapo", "epsilon": 0.125, "epsilon_high": 0.25} | SEQUENCE),
    "luspo": Row({"loss_type": "luspo", "epsilon": 0.125, "epsilon_high": 0.25} | SEQUENCE),
    "sapo": Row({"loss_type": "sapo"}),
    "vespo": Row({"loss_type": "vespo"}),
    "vespo_token_truncate": correction("token_truncate", 2.0, loss_type="vespo"),
    "grpo_kl": Row({"loss_type": "grpo"} | PLAIN_KL),
    "dapo_kl": Row({"loss_type": "dapo"} | PLAIN_KL),
    "dr_grpo_kl": Row({"loss_type": "dr_grpo"} | PLAIN_KL),
    "cispo_kl": Row({"loss_type": "cispo", "epsilon_high": 5.0} | PLAIN_KL),
    "gspo_kl": Row({"loss_type": "grpo", "epsilon": 0.125, "epsilon_high": 0.25} | SEQUENCE | PLAIN_KL),
    "dapo_kl_first_step": Row({"loss_type": "dapo"} | PLAIN_KL, first=True),
    "dapo_kl_bias_corrected": Row({"loss_type": "dapo", "beta": 0.05, "use_bias_correction_kl": True}),
    "dapo_entropy": Row({"loss_type": "dapo", "entropy_coef": 0.125}),
    "grpo_entropy": Row({"loss_type": "grpo", "entropy_coef": 0.125}),
    "dapo_high_entropy_tokens": Row({"loss_type": "dapo", "top_entropy_quantile": 0.5}),
    "dapo_off_policy_mask": Row({"loss_type": "dapo", "off_policy_mask_threshold": 0.0625}),
    "dapo_token_truncate": correction("token_truncate", 1.25),
    "grpo_token_truncate": correction("token_truncate", 1.25, loss_type="grpo"),
    "cispo_token_truncate": correction("token_truncate", 1.25, loss_type="cispo", epsilon_high=5.0),
    "dapo_kl_token_truncate": correction("token_truncate", 1.25, **PLAIN_KL),
    "gspo_token_truncate": correction(
        "token_truncate", 1.25, loss_type="grpo", epsilon=0.125, epsilon_high=0.25, **SEQUENCE
    ),
    "dapo_token_truncate_both": correction("token_truncate", 1.25, 0.75),
    "dapo_token_mask": correction("token_mask", 1.25, 0.75),
    "dapo_token_mask_upper": correction("token_mask", 1.25),
    "dapo_sequence_truncate": correction("sequence_truncate", 1.25),
    "dapo_sequence_truncate_both": correction("sequence_truncate", 1.25, 0.75),
    "dapo_sequence_mask": correction("sequence_mask", 1.25, 0.75),
    "dapo_sequence_mask_default": correction("sequence_mask", 3.0),
    "grpo_sequence_mask": correction("sequence_mask", 1.25, 0.75, loss_type="grpo"),
}
UNEQUAL = (1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.1, None, 0.7, 0.4)  # a group of equals; one that nobody graded
ADVANTAGES: Mapping[str, Mapping[str, Any]] = {
    "scale_rewards_group": {"scale_rewards": "group"},
    "scale_rewards_batch": {"scale_rewards": "batch"},
    "scale_rewards_none": {"scale_rewards": "none"},
    "rloo": {"beta": 0.0},
}


@dataclass(frozen=True)
class Fixed:
    """Rollouts with their log-probs, as lists of one list per rollout; `written` is 0 at a tool's tokens."""

    prompts: list[list[int]]
    completions: list[list[int]]
    written: list[list[int]]
    live: list[list[float]]
    old: list[list[float]]
    sampling: list[list[float]]
    reference: list[list[float]]
    entropy: list[list[float]]


def make_fixed() -> Fixed:
    """Draws the rollouts of two prompts. Sampled tokens are unlikelier for the engine than for the trainer in some
    rollouts and likelier in others, so that the products of the ratios lie on both sides of 1."""
    draw = torch.Generator().manual_seed(5)
    prompts, completions, written = [], [], []
    columns: dict[str, list[list[float]]] = {name: [] for name in TABLES}
    for number, length in enumerate(LENGTHS):
        prompts.append([2 + number % 3] * (1 + number % 2) + [FIRST_NUMBER + number])
        tokens = torch.randint(2, 18, (length,), generator=draw).tolist()
        completions.append(tokens if number in TRUNCATED else [*tokens[:-1], tiny.EOS])
        written.append([0 if length > 4 and place in (1, 2) else 1 for place in range(length)])
        base = -0.5 - 2.5 * torch.rand(length, generator=draw)
        old = base + 0.1 * torch.randn(length, generator=draw)
        live = old + 0.3 * torch.randn(length, generator=draw)
        if number % 4 == 2:
            live[-1] = old[-1] + 1.875  # a ratio of 6.5
        made = {
            "live": live, "old": old,
            "sampling": old + (0.15 if number % 2 else -0.1) + 0.3 * torch.randn(length, generator=draw),
            "reference": base + 0.3 * torch.randn(length, generator=draw),
            "entropy": 0.25 + 2 * torch.rand(length, generator=draw),
        }  # fmt: skip
        for name, values in made.items():
            columns[name].append((torch.round(values * 1024) / 1024).tolist())
    return Fixed(prompts, completions, written, **columns)


class Tables:
    """Answers for the models of a trainer: log-probs and entropies from tables."""

    tables: dict[str, Tensor]  # by name, [B, longest completion]; live and entropy are leaves with gradient

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **asked: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        rows = input_ids[:, -logits_to_keep - 1] - FIRST_NUMBER
        if asked.get("compute_entropy"):
            return self.tables["live"][rows], self.tables["entropy"][rows], None
        name = "old" if model is self.model else "reference"  # type: ignore[attr-defined]
        return self.tables[name][rows], None, None


class TableGRPO(Tables, GRPOTrainer):
    """GRPOTrainer whose models are tables."""


class TableRLOO(Tables, RLOOTrainer):
    """RLOOTrainer whose models are tables and whose rollouts are given."""

    rollouts: tuple[list[list[int]], list[list[int]]]

    def _generate(self, prompts: list[Any]) -> tuple[list[list[int]], list[list[int]], list[str]]:
        return *self.rollouts, [""] * len(prompts)


def common(directory: Path, rewards: Sequence[float | None]) -> dict[str, Any]:
    """Arguments that every trainer gets."""
    return {
        "model": str(directory / "model"),
        "reward_funcs": lambda completions, **_: list(rewards),
        "train_dataset": Dataset.from_dict({"prompt": ["w2"] * (len(rewards) // GROUP)}),
        "processing_class": PreTrainedTokenizerFast.from_pretrained(directory / "model"),
    }


def settings(directory: Path, size: int, micro_batches: int = 1, *, accumulated: int = 1) -> dict[str, Any]:
    """Settings that every trainer gets, for `size` rollouts in so many micro-batches, of which so many are one
    optimizer step."""
    return {
        "output_dir": str(directory / "out"), "use_cpu": True, "report_to": "none", "bf16": False,
        "gradient_checkpointing": False, "num_generations": GROUP, "max_completion_length": MAX_COMPLETION,
        "per_device_train_batch_size": size // micro_batches, "gradient_accumulation_steps": accumulated,
        "steps_per_generation": micro_batches,
    }  # fmt: skip


def make_grpo(directory: Path, row: Row, fixed: Fixed, rewards: Sequence[float | None]) -> TableGRPO:
    """A trainer with a row's settings that plays the fixed rollouts."""
    accumulated = 1 if row.steps else row.micro_batches
    sizes = settings(directory, len(rewards), row.micro_batches, accumulated=accumulated)
    sizes |= {"num_iterations": 1 if row.first else 2}
    out = {
        "prompt_ids": fixed.prompts, "completion_ids": fixed.completions, "logprobs": fixed.sampling,
        "env_mask": fixed.written,
    }  # fmt: skip
    trainer = TableGRPO(
        args=GRPOConfig(**{"scale_rewards": "none"} | sizes | dict(row.settings)),
        rollout_func=lambda prompts, trainer: dict(out),
        **common(directory, rewards),
    )
    width = max(map(len, fixed.completions))
    trainer.tables = {
        name: torch.tensor([own + [-1.0] * (width - len(own)) for own in getattr(fixed, name)]) for name in TABLES
    }
    for name in ("live", "entropy"):
        trainer.tables[name].requires_grad_()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = accumulated
    trainer.use_vllm, trainer._last_loaded_step = row.engine, 0  # the rollouts come with an engine's log-probs
    return trainer


def run_row(directory: Path, row: Row, fixed: Fixed) -> dict[str, Any]:
    """The row's advantages, loss and gradients by log-probs and entropies, over the micro-batches of one step."""
    trainer = make_grpo(directory, row, fixed, REWARDS)
    batch = trainer._generate_and_score_completions([{"prompt": "w2"}] * len(REWARDS))
    parts = split_tensor_dict(batch, row.micro_batches)
    loss = sum(trainer.compute_loss(trainer.model, part) for part in parts)
    loss.backward()
    out = {**asdict(row), "advantages": batch["advantages"].tolist(), "loss": loss.item()}
    for name, key in (("live", "by_logprob"), ("entropy", "by_entropy")):
        found = trainer.tables[name].grad
        if found is not None:
            out[key] = [values[:length] for values, length in zip(found.tolist(), LENGTHS, strict=True)]
    return out


def run_advantages(directory: Path, name: str, own: Mapping[str, Any], fixed: Fixed) -> dict[str, Any]:
    """TRL's advantages of rewards, which it turns into float32."""
    prompts = [[2, FIRST_NUMBER]] * len(UNEQUAL)
    ones = [[tiny.EOS]] * len(UNEQUAL)
    numbers = [[-1.0]] * len(UNEQUAL)
    some = Fixed(prompts, ones, [[1]] * len(UNEQUAL), *[numbers] * len(TABLES))
    if name == "rloo":
        trainer = TableRLOO(args=RLOOConfig(**settings(directory, len(UNEQUAL)), **own), **common(directory, UNEQUAL))
        trainer.rollouts, trainer.tables = (prompts, ones), {"old": torch.tensor(numbers)}
        trainer.model.train()
    else:
        trainer = make_grpo(directory, Row(dict(own)), some, UNEQUAL)
    batch = trainer._generate_and_score_completions([{"prompt": "w2"}] * len(UNEQUAL))
    rewards = [None if r is None else torch.tensor(r, dtype=torch.float32).item() for r in UNEQUAL]
    return {"settings": dict(own), "rewards": rewards, "advantages": batch["advantages"].tolist()}


def written(answer: Mapping[str, Any]) -> str:
    """The answer as JSON, a line for each entry of its sections."""
    parts = []
    for section, entries in answer.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        parts.append(f" {json.dumps(section)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    fixed = make_fixed()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny.write(directory / "model")
        answer = {
            "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
            "inputs": asdict(fixed) | {"group": GROUP, "max_completion": MAX_COMPLETION, "truncated": TRUNCATED},
            "rows": {key: run_row(directory, row, fixed) for key, row in ROWS.items()},
            "advantages": {key: run_advantages(directory, key, own, fixed) for key, own in ADVANTAGES.items()},
        }
    Path(sys.argv[1]).write_text(written(answer))


if __name__ == "__main__":
    main()
