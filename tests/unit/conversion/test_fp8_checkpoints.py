"""Model directories with 8-bit weights, as DeepSeek-V3 is published: read as transformers dequantises them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_fp8_weights import public
from tiny_models import make_model
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion import weight_source
from megatron_rl.models import registry
from megatron_rl.session.output_directory import copy_side_files
from megatron_rl.weights import hf_model
from megatron_rl.weights.parameter_mapping import Rect
from megatron_rl.weights.quantisation import quantised_shapes

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def eight_bit(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (values, scales, dequantised bfloat16) of transformers. The last blocks may be incomplete."""
    rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, -columns % 128, 0, -rows % 128))
    found = Fp8Quantize(public((128, 128), "float")).convert({"x.weight": padded})
    values, scales = found["x.weight"], found["x.weight_scale_inv"]
    back = Fp8Dequantize(public((128, 128), "float"))._dequantize_one(values, scales, output_dtype=torch.bfloat16)
    return values[:rows, :columns].contiguous(), scales, back[:rows, :columns]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Returns (directory with 8-bit weights, {name: tensor that they mean})."""
    path = make_model(
        tmp_path_factory.mktemp("fp8"), "deepseek_v3", hidden_size=192, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=2,
    )  # fmt: skip
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    config = json.loads((path / "config.json").read_text())
    meant, stored = dict(tensors), dict(tensors)
    for name in quantised_shapes(registry.read(config)):
        stored[name], stored[name + "_scale_inv"], meant[name] = eight_bit(tensors[name])
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    meant[bias] = stored[bias] = tensors[bias].float()
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return path, meant


def test_published_8_bit_weights_are_read_as_transformers_dequantises_them(published):
    path, meant = published
    sizes = registry.read(json.loads((path / "config.json").read_text()))
    hf_model.check(path, sizes, cast=True)
    source = weight_source.find(path)
    found = dict(source.tensors())
    assert found.keys() == meant.keys()
    assert all(found[name].dtype == meant[name].dtype and torch.equal(found[name], meant[name]) for name in meant)
    assert {shape for shape, dtype in source.shapes().values() if dtype == "BF16"} > {(192, 256), (256, 192)}
    name = "model.layers.0.mlp.down_proj.weight"  # [192, 256]
    part = hf_model.DirectoryTensors(path).read(Rect(name, 100, 130, 90, 120, 0, 0))
    assert torch.equal(part, meant[name][100:190, 130:250])


def test_written_models_do_not_say_that_they_are_fp8(published, tmp_path):
    copy_side_files(published[0], tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, n: t.update({n + "_scale_inv": t[n + "_scale_inv"][:1]}), r"scale_inv is F32 \[1, 2\], and"),
        (lambda t, n: t.update({n: t[n].bfloat16()}), r"is \('BF16', \[192, 256\]\). Only 8-bit values"),
        (lambda t, n: t.pop(n + "_scale_inv"), "is F8_E4M3, not one of"),
    ],
)
def test_8_bit_weights_with_other_scales_are_refused_fp8(published, tmp_path, change, says):
    copy_side_files(published[0], tmp_path)
    tensors = load_file(published[0] / "model.safetensors")
    change(tensors, "model.layers.0.mlp.down_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = registry.read(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ConfigError, match=says):
        hf_model.check(tmp_path, sizes, cast=True)
