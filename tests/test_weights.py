"""Model directories: what is read, and what is refused because it would silently become another model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from megatron_rl.weights import hf, mapping


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("llama", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
        ("qwen2", {"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    ],
)
def test_weights_of_an_unsupported_architecture_are_refused(tmp_path, family, change, says):
    make_model(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=says):
        hf.read_architecture(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_weights_that_no_parameter_takes_are_refused(tmp_path, family):
    make_model(tmp_path, family)
    arch = hf.read_architecture(tmp_path)
    mapping.check_complete(hf.tensor_files(tmp_path), arch)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"1 tensors have no place .* model.layers.0.self_attn.o_proj.bias"):
        mapping.check_complete(hf.tensor_files(tmp_path), arch)


def test_weights_are_read_by_name_and_a_missing_one_is_named(tmp_path):
    make_model(tmp_path, "qwen2")
    tensors = hf.Tensors(tmp_path)
    for name, wanted in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensors[name], wanted)
    with pytest.raises(KeyError, match="no tensor 'lm_head.bias' among"):
        tensors["lm_head.bias"]
