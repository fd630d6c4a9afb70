"""Weights that are not finite, or that the engines' format cannot hold, are found before a refit sends them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_process import OneProcess
from refit_worker import Engine, shards, whole_model
from safetensors.torch import save_file

from megatron_rl.config.schema import RefitConfig
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.weight_limits import NonFiniteWeights, WeightLimits
from megatron_rl.session.adapter_refit import AdapterFiles
from megatron_rl.weights.quantisation import FORMATS
from megatron_rl.weights.quantised_values import block_scales, dequantise, quantise
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout

SIZES = Sizes(family="qwen2", num_layers=1, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=128, vocab=64, tied=False)
DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


def topology(quantization, dtype="bfloat16"):
    engines = EngineLayout(whole=True, quantization=quantization)
    return Topology(sizes=SIZES, trainer=TrainerLayout(), engines=engines, dtype=dtype)


def parameters(own, **values):
    """A rank's float32 parameters of small numbers, with some values (tensor name: value) at the first place."""
    model = {name: tensor / tensor.numel() / 1e3 for name, tensor in whole_model(SIZES, 0).items()}
    for name, value in values.items():
        model[name][0, 0] = value
    return shards(own, 0, model)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [DOWN, NORM])
def test_faults_weights_that_are_not_finite_stop_a_refit_by_the_name_of_the_tensor(group, value, name):
    """NVFP4 turned NaN into 6.0, and infinity into 10.5."""
    says = rf"version 1 of the weights .* {name} has 1 of \d+ values that are not finite \(trainer rank 0\)"
    own = topology(None)
    engine, values = Engine(own, 0), parameters(own)
    side = TrainerSide(own, RefitConfig(), values, group=group, endpoint=engine)
    assert side(0)["refit/saturated_weights"] == 0 and engine.version == 0
    for parameter, bad in zip(values.values(), parameters(own, **{name: value}).values(), strict=True):
        parameter.copy_(bad)
    with pytest.raises(NonFiniteWeights, match=says):
        side(1)
    assert engine.version == 0, "the engine keeps the weights that it had"
    side.close()
    for quantization in FORMATS:
        own = topology(quantization)
        side = TrainerSide(own, RefitConfig(), values, group=group, endpoint=engine)
        with pytest.raises(NonFiniteWeights, match=says):
            side(1)
        side.close()


def test_faults_float32_weights_beyond_bfloat16_stop_a_refit():
    own, big = topology(None), 3.4e38  # it is rounded to infinity
    assert math.isinf(torch.tensor(big).bfloat16())
    check = WeightLimits(own, 0, parameters(own, **{NORM: big})).check()
    assert check.non_finite == f"{NORM} has 1 of 128 values that overflow torch.bfloat16"
    assert WeightLimits(topology(None, "float32"), 0, parameters(own, **{NORM: big})).check() == (None, 0)


def test_faults_float32_weights_beyond_bfloat16_are_quantised_as_they_are():
    own, big = topology("fp8"), 3.4e38
    assert WeightLimits(own, 0, parameters(own, **{DOWN: big})).check() == (None, 0)
    assert "overflow torch.bfloat16" in WeightLimits(own, 0, parameters(own, **{NORM: big})).check().non_finite


@pytest.mark.parametrize("quantization", [*FORMATS])
def test_faults_weights_that_a_format_clips_are_counted(quantization):
    """NVFP4 turned 24 into 10.5 without a word."""
    own, form, values = topology(quantization), FORMATS[quantization], torch.zeros(128, 128)
    values[0, 0], values[5, 3:5] = 24.0, torch.tensor([10.5, -400.0])
    back = dequantise(quantise(values, form), block_scales(values, form), form, torch.float32)
    clipped = int(((back - values).abs() > 0.05 * values.abs()).sum())
    model = {name: tensor / tensor.numel() / 1e3 for name, tensor in whole_model(SIZES, 0).items()} | {DOWN: values}
    assert WeightLimits(own, 0, shards(own, 0, model)).check() == (None, clipped)
    assert clipped == (2 if quantization == "nvfp4" else 0)


def test_faults_the_sum_with_an_adapter_is_what_is_checked():
    own = topology("nvfp4")
    values = parameters(own)
    name = next(name for name in values if "linear_fc2" in name)

    def added(parameter, part):
        return torch.full((part.rows, part.columns), 100.0) if parameter == name else None

    assert WeightLimits(own, 0, values, added).check() == (None, values[name].numel())
    assert WeightLimits(own, 0, values).check() == (None, 0)


def test_faults_an_adapter_that_is_not_finite_is_not_given_to_the_servers(tmp_path):
    def write_adapter(place):
        place.mkdir()
        values = torch.tensor([[1.0, math.nan if place.name == "v1" else 2.0]])
        save_file({"base_model.model.q_proj.lora_A.weight": values}, place / "adapter_model.safetensors")

    policy: Any = SimpleNamespace(export=SimpleNamespace(write_adapter=write_adapter))
    files = AdapterFiles(OneProcess(), policy, tmp_path)
    files.write(0)
    with pytest.raises(NonFiniteWeights, match="version 1 .* base_model.model.q_proj.lora_A.weight of the adapter has"):
        files.write(1)


def test_faults_copies_of_a_weight_are_counted_once():
    trainer = TrainerLayout(dp=2)
    own = replace(topology("nvfp4"), trainer=trainer)
    values = parameters(topology("nvfp4"), **{DOWN: 24.0})
    assert [WeightLimits(own, rank, values).check().saturated for rank in (0, 1)] == [1, 0]
