"""Writes the files of the last-letter experiment: a tiny model and tokenizer, problems, and SFT pairs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from teachers import (
    LETTERS,
    MAX_STEPS,
    ProblemSizes,
    make_problem,
    teacher_solution,
    verification_text,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.texts.tags import step_texts
from megatron_rl.texts.text import fill

PROMPTS = Path(__file__).parent / "prompts"
SPECIAL = ["<pad>", "<bos>", "<eos>"]
TAGS = [
    *("<q>", "<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>", "\\boxed{", "}", "<sol>", "<ver>"),
    *("<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>"),
    *("\\boxed{CORRECT}", "\\boxed{INCORRECT}"),
]
BATCH = 32  # pairs per SFT step
MISREAD = 0.25  # probability that the verifier's teacher looks at the first letter


@dataclass(frozen=True)
class Regime:
    """One setting of the experiment (docs/experiments/last_letter.md)."""

    misconception: float  # probability that the generator's SFT teacher gets a reasoning step wrong
    sft: ProblemSizes
    train: ProblemSizes
    test: ProblemSizes
    judged: ProblemSizes  # problems whose solutions the verifier learns to judge
    alpha_start: float
    alpha_min: float
    warmup_updates: int
    generator_updates: int
    verifier_lr: float
    generator_lr: float = 1.5e-4


def regimes() -> dict[str, Regime]:
    """Returns the settings by name.

    a: correct answers are frequent enough for GRPO alone. b: at first 97 of 100 groups have none.
    """
    short, long = ProblemSizes((2, 5), (2, 4)), ProblemSizes((5, 5), (2, 4))
    return {
        "a": Regime(0.35, short, short, ProblemSizes((3, 5), (2, 4)), short, 0.3, 1e-3, 8, 30, 1.5e-4),
        "b": Regime(0.65, short, long, long, ProblemSizes((2, 4), (2, 4)), 0.7, 0.1, 3, 40, 1e-4),
    }


def write_model(directory: Path, seed: int, *, heads: int = 4, layers: int = 3) -> None:
    """Writes a Qwen2 with random weights, of 0.16 M parameters in 3 `layers`, and its 59-word tokenizer.

    A head's width is 64 / `heads`.
    """
    words = [*SPECIAL, *TAGS, *(f"#{i}" for i in range(1, MAX_STEPS + 1)), *LETTERS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        use_sliding_window=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen2ForCausalLM(config)
    _initialise(model, seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_problems(
    path: Path, sizes: ProblemSizes, count: int, seed: int, *, without: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Writes and returns distinct problems, none with a question in `without`."""
    rng, seen, rows = random.Random(seed), set(without), []
    while len(rows) < count:
        row = make_problem(rng, sizes)
        if row["question"] not in seen:
            seen.add(row["question"])
            rows.append(row)
    _write_jsonl(path, rows)
    return rows


def write_generator_pairs(
    path: Path, regime: Regime, seed: int, *, clean_steps: int = 300, noisy_steps: int = 100, place: int = 0
) -> None:
    """Writes pairs in training order: first by a teacher without fault, then by one with the misconception, who takes
    the letter at `place` of a word."""
    rng, template, rows = random.Random(seed), _template("generator"), []
    for i in range((clean_steps + noisy_steps) * BATCH):
        problem = make_problem(rng, regime.sft)
        wrong = regime.misconception if i >= clean_steps * BATCH else 0.0
        rows.append(
            {
                "prompt": fill(template, question=problem["question"]),
                "response": teacher_solution(rng, problem["words"], wrong, place=place),
            }
        )
    _write_jsonl(path, rows)


def write_verifier_pairs(
    path: Path, regime: Regime, pool: list[dict[str, Any]], seed: int, *, steps: int = 400
) -> None:
    """Writes pairs that judge solutions: half of them by the generator, half by a noisy teacher.

    `pool`: the generator's solutions, rows with words, question and response.
    """
    rng, template, rows = random.Random(seed), _template("verifier"), []
    for _ in range(steps * BATCH):
        if rng.random() < 0.5:
            chosen = rng.choice(pool)
            question, words, solution = chosen["question"], chosen["words"], chosen["response"]
        else:
            problem = make_problem(rng, regime.sft)
            question, words = problem["question"], problem["words"]
            solution = teacher_solution(rng, words, 0.35 if rng.random() < 0.6 else 0.0)
        count = min(len(step_texts(solution)), MAX_STEPS)
        prompt = fill(template, question=question, solution=solution, num_steps=str(max(count, 1)))
        rows.append({"prompt": prompt, "response": verification_text(rng, words, solution, MISREAD)})
    _write_jsonl(path, rows)


def _template(name: str) -> str:
    return (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").strip()


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _initialise(model: Qwen2ForCausalLM, seed: int) -> None:
    """Draws weights of standard deviation fan_in^-1/2, smaller where a block writes into the residual stream.

    The usual 0.02 learns too slowly here.
    """
    torch.manual_seed(seed)
    depth = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, 0.5 * model.config.hidden_size**-0.5)
            elif "lm_head" in name or name.endswith("bias"):
                parameter.uniform_(-(model.config.hidden_size**-0.5), model.config.hidden_size**-0.5)
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
                if "o_proj" in name or "down_proj" in name:
                    parameter.mul_(depth)
