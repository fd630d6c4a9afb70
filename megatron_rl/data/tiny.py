"""Makes a tiny model with random weights, and problems that it can learn in seconds on a CPU, for first experiments."""

from __future__ import annotations

import json
import random
import re
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHARACTERS = string.ascii_lowercase + string.digits + " \n.,:?!'()<>/=+-*{}\\"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_model(directory: str | Path, *, seed: int = 0) -> Path:
    """Writes a model with 0.1 million random weights, and a tokenizer with a chat template, into a directory, and
    returns the directory.

    The tokens are lower-case letters, digits and punctuation; capitals become lower-case letters, and other characters
    are dropped. The same seed gives the same weights.
    """
    path = Path(directory)
    words = {word: i for i, word in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[-1]))
    others = Regex(f"[^{re.escape(CHARACTERS)}]")
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(others, "")])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    tokenizer.chat_template = CHAT
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = Qwen2ForCausalLM(config).state_dict()
    path.mkdir(parents=True, exist_ok=True)
    config.architectures = [Qwen2ForCausalLM.__name__]
    config.save_pretrained(path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    return path


def tiny_problems(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Returns `count` problems {question, answer}. The question is a letter repeated three times, and the answer is the
    letter. `rewards.tiny_task` grades the answers."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        letter = rng.choice("abc")
        rows.append({"question": letter * 3, "answer": letter})
    return rows


def write_tiny_problems(path: str | Path, count: int, *, seed: int = 0) -> Path:
    """Writes `tiny_problems(count)` to a JSONL file and returns its path."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(json.dumps(row) + "\n" for row in tiny_problems(count, seed=seed)), encoding="utf-8")
    return place
