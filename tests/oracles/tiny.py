"""A tiny random Qwen2 with a tokenizer of its own, in a Hugging Face directory, for TRL's trainers."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, 61))]


def write(directory: Path, *, seed: int = 0) -> Path:
    """Writes config, weights and tokenizer of a model of about 20 thousand parameters, none of them at its initial
    constant, and returns the directory."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)
    return directory
