"""Model directories with MXFP4 experts, as gpt-oss is published: read as transformers dequantises them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion import convert, weight_source
from megatron_rl.models import registry
from megatron_rl.weights import hf_model, tensor_copies
from megatron_rl.weights.parameter_mapping import Rect

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Returns (directory with MXFP4 experts, {name in transformers: tensor that it means})."""
    path = make_model(tmp_path_factory.mktemp("mxfp4") / "model", "gpt_oss", hidden_size=96, intermediate_size=64)
    meant = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    stored, draw = dict(meant), torch.Generator().manual_seed(0)
    for name in [name for name in meant if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=draw)
        # every power of two that bfloat16 holds beside the usual ones
        scales = torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8, generator=draw)
        scales[0, :4, 0] = torch.tensor([0, 1, 127, 252], dtype=torch.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return path, meant


def test_published_mxfp4_experts_are_read_as_transformers_dequantises_them(published):
    path, meant = published
    sizes = registry.read(json.loads((path / "config.json").read_text()))
    hf_model.check(path, sizes)
    wanted, found = tensor_copies.by_expert(meant, sizes), dict(weight_source.find(path).tensors())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].view(torch.int16), tensor.contiguous().view(torch.int16)), name
    name = DOWN.replace("down_proj", "2.down_proj")  # [96, 64]
    part = hf_model.DirectoryTensors(path).read(Rect(name, 30, 20, 50, 41, 0, 0))
    assert torch.equal(part, wanted[name][30:80, 20:61])


def test_mxfp4_files_become_bfloat16_files_that_transformers_loads(published, tmp_path):
    path, meant = published
    convert.to_hf(weight_source.find(path), tmp_path / "out", shard_bytes=40_000, verify=True)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    found = model.state_dict()
    assert found.keys() == meant.keys() and all(torch.equal(found[name], tensor) for name, tensor in meant.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t.update({DOWN + "_scales": t[DOWN + "_scales"][:2]}),
            r"_scales is \[2, 96, 2\] of U8, but config.json requires",
        ),
        (
            lambda t: t.pop(DOWN + "_scales"),
            r"down_proj_scales is missing, but config.json requires \[4, 96, 2\] of U8",
        ),
        (
            lambda t: t.update({DOWN + "_blocks": t[DOWN + "_blocks"].char()}),
            r"_blocks is \[4, 96, 2, 16\] of I8, but config",
        ),
    ],
)
def test_mxfp4_experts_with_other_scales_are_refused(published, tmp_path, change, says):
    tensors = load_file(published[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((published[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match=says):
        hf_model.check(tmp_path, registry.read(json.loads((tmp_path / "config.json").read_text())))
