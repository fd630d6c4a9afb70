"""Quantised weights of engines: bytes and scales against transformers' quantizer, and plans that send each once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from megatron_rl.models.registry import known_sizes
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.transport import ParameterPart
from megatron_rl.refit.transport_choice import RankLocation, RankLocations
from megatron_rl.weights import parameter_mapping, rank_layouts, tensor_copies
from megatron_rl.weights.parameter_mapping import Rect, hf_shapes
from megatron_rl.weights.quantisation import FORMATS, SCALES, left_out, quantised_shapes
from megatron_rl.weights.quantised_values import FLOAT4, block_scales, dequantise, quantise
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout, block_problems

DENSE = Sizes(family="qwen2", num_layers=2, hidden=256, heads=8, kv_heads=4, head_dim=64, ffn=512, vocab=77, tied=True)
MOE = replace(DENSE, family="qwen3_moe", tied=False, experts=4, expert_ffn=256)
LATENT = replace(
    MOE, family="deepseek_v3", kv_heads=8, head_dim=96, rope_dim=32, value_dim=64, kv_rank=96, q_rank=128,
    shared_ffn=256, dense_layers=1,
)  # fmt: skip


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Returns random bfloat16 weights with rows of very different sizes, a zero block, and values of both signs."""
    torch.manual_seed(seed)
    found = torch.randn(rows, columns) * torch.logspace(-4, 0.6, rows)[:, None]
    found[:128, :128] = 0
    return found.bfloat16()


def public(block: tuple[int, int], scale_fmt: str) -> SimpleNamespace:
    """Returns what transformers' quantising operations read of its quantizer."""
    config = FineGrainedFP8Config(weight_block_size=block)
    config.scale_fmt = scale_fmt
    return SimpleNamespace(quantization_config=config)


@pytest.mark.parametrize(("name", "scale_fmt"), [("fp8", "float"), ("mxfp8", "ue8m0")])
def test_bytes_and_scales_are_those_of_transformers(name, scale_fmt):
    form, given = FORMATS[name], weights(384, 256)
    wanted = Fp8Quantize(public(form.block, scale_fmt)).convert({"a.weight": given})
    assert torch.equal(quantise(given, form), wanted["a.weight"].view(torch.uint8))
    scales = block_scales(given, form)
    assert scales.dtype == wanted["a.weight_scale_inv"].dtype
    assert torch.equal(scales.view(torch.uint8), wanted["a.weight_scale_inv"].view(torch.uint8))
    back = Fp8Dequantize(public(form.block, scale_fmt))._dequantize_one(
        wanted["a.weight"], wanted["a.weight_scale_inv"], output_dtype=torch.bfloat16
    )
    assert torch.equal(dequantise(quantise(given, form), scales, form, torch.bfloat16), back)


@pytest.mark.parametrize("name", [*FORMATS])
def test_blocks_of_tiny_weights_become_numbers_fp8(name):
    """The factor of a block with 1e-37 as its largest weight overflowed, so that its zeros became NaN."""
    form, given = FORMATS[name], torch.zeros(128, 128)
    given[3, 5] = 1e-37
    found = dequantise(quantise(given, form), block_scales(given, form), form, torch.float32)
    assert bool(found.isfinite().all()) and found.abs().max() < 1e-30


def test_last_blocks_of_fp8_may_be_incomplete():
    """kv_a_proj_with_mqa of DeepSeek-V3 has 576 rows: 4.5 blocks."""
    form, given = FORMATS["fp8"], weights(192, 200)
    padded = torch.zeros(256, 256).bfloat16()
    padded[:192, :200] = given
    assert torch.equal(quantise(given, form), quantise(padded, form)[:192, :200])
    assert torch.equal(block_scales(given, form), block_scales(padded, form)) and block_scales(given, form).shape == (
        2,
        2,
    )
    far = dequantise(quantise(given, form), block_scales(given, form), form, torch.float32) - given.float()
    largest = torch.stack([row.view(2, -1).amax(1) for row in padded.abs().float().view(2, 128, 256).amax(1)])
    assert bool((far.abs() <= largest.amax() / 448 * 16).all())


def test_values_of_nvfp4_are_the_nearest_and_unpack_as_in_transformers():
    form, given = FORMATS["nvfp4"], weights(160, 64).clamp(-10, 10)
    packed, scales = quantise(given, form), block_scales(given, form)
    assert packed.shape == (160, 32) and scales.shape == (160, 4) and scales.dtype == torch.float8_e4m3fn
    own = (scales.float() * form.second).repeat_interleave(16, 1)
    unpacked = Fp8Dequantize(public((1, 16), "float"))._unpack_fp4(packed)
    assert torch.equal(dequantise(packed, scales, form, torch.float32), unpacked * own)
    every = torch.cat([FLOAT4, -FLOAT4])
    errors = (given.float() / own).clamp(-6, 6)[..., None] - every
    assert torch.equal((unpacked - (given.float() / own).clamp(-6, 6)).abs(), errors.abs().amin(-1))
    wanted = given.float().abs().view(160, 4, 16).amax(-1) / 6
    normal = wanted > 2**-6 * form.second
    assert bool(((scales.float() * form.second - wanted).abs() <= wanted / 16)[normal].all())
    middles = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2])  # halfway: the even code
    codes = quantise(middles * form.second * 8, form)
    assert Fp8Dequantize(public((1, 16), "float"))._unpack_fp4(codes)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


LAYOUTS = [
    (DENSE, TrainerLayout(tp=2, pp=2, fused=False), EngineLayout(tp=2, replicas=2)),
    (DENSE, TrainerLayout(dp=2), EngineLayout(replicas=2, whole=True)),
    (MOE, TrainerLayout(tp=2, pp=2, ep=2), EngineLayout(tp=2, expert_parallel=True)),
    (MOE, TrainerLayout(tp=2, dp=2, ep=2, etp=2), EngineLayout(tp=2)),
    (MOE, TrainerLayout(), EngineLayout(tp=2)),
    (LATENT, TrainerLayout(tp=2, ep=2, fused=False), EngineLayout(tp=2, expert_parallel=True)),
    (LATENT, TrainerLayout(tp=2, dp=2, ep=4), EngineLayout(tp=2, replicas=2)),
]


def shards(sizes, layout, whole):
    """Returns {rank: its Megatron parameters}, filled from the whole model."""
    out = {rank: {} for rank in range(layout.world)}
    for holding in rank_layouts.trainer(sizes, layout):
        found: dict[str, list[Rect]] = {}
        for name, rect in holding.parameters:
            found.setdefault(name, []).append(rect)
        for name, rects in found.items():
            flat = name in parameter_mapping.kept_float32(sizes)
            shape = max(r.at_row + r.rows for r in rects), max(r.at_column + r.columns for r in rects)
            parameter = torch.zeros(shape, dtype=torch.float32 if flat else torch.bfloat16)
            tensor_copies.fill(parameter, rects, lambda rect: tensor_copies.from_tensor(whole[rect.tensor], rect))
            for rank in holding.ranks:
                out[rank][name] = parameter[:, 0] if shape[1] == 1 else parameter
    return out


def model(sizes):
    kept = parameter_mapping.kept_float32(sizes)
    return {
        name: weights(rows, columns, seed).to(torch.float32 if name in kept else torch.bfloat16)
        for seed, (name, (rows, columns)) in enumerate(hf_shapes(sizes).items())
    }


def wanted_bytes(sizes, form, whole):
    """Returns the bytes of every tensor of the quantised model, by name: [rows, bytes]."""
    out = {}
    for name, tensor in whole.items():
        if name in quantised_shapes(sizes):
            out[name] = quantise(tensor, form)
            out[name + SCALES] = block_scales(tensor, form).view(torch.uint8)
        else:
            out[name] = tensor.contiguous().view(torch.uint8)
    return out


@pytest.mark.parametrize("quantization", sorted(FORMATS))
@pytest.mark.parametrize(("sizes", "trained", "engine"), LAYOUTS)
def test_every_byte_of_values_and_scales_is_sent_once_fp8(sizes, trained, engine, quantization):
    engine = replace(engine, quantization=quantization)
    topology = Topology(sizes=sizes, trainer=trained, engines=engine, dtype="bfloat16")
    assert TypeAdapter(Topology).validate_python(topology.to_json()) == topology
    ranks = [[RankLocation("a", f"{side}{i}", "cpu") for i in range(side.world)] for side in (trained, engine)]
    plan = topology.plan(RankLocations(ranks[0], dict(enumerate(ranks[1]))), 0.05)
    whole, s = model(sizes), plan.slices
    reads = {rank: topology.sources(rank, own, None) for rank, own in shards(sizes, trained, whole).items()}
    wanted = wanted_bytes(sizes, FORMATS[quantization], whole)
    got, counts = {}, Counter()
    for rank in range(engine.world):
        own = topology._carried(
            [
                rank_layouts.Holding(
                    (rank,),
                    [
                        (n, r)
                        for n, (_, rects) in rank_layouts.engine_parameters(sizes, engine, rank).items()
                        for r in rects
                    ],
                )
            ]
        )
        got[rank] = [(name, rect) for holding in own for name, rect in holding.parameters]
    landed = {
        (rank, name): torch.zeros(
            max(r.at_row + r.rows for n, r in own if n == name),
            max(r.at_column + r.columns for n, r in own if n == name), dtype=torch.int16,
        ) - 1
        for rank, own in got.items() for name, _ in own
    }  # fmt: skip
    for i in range(len(s)):
        source, place = s.source_names[s.source_parameter[i]], s.destination_names[s.destination_parameter[i]]
        rows, columns = int(s.rows[i]), int(s.columns[i])
        values = reads[int(s.source[i])].read(
            source, ParameterPart(int(s.source_row[i]), int(s.source_column[i]), rows, columns)
        )
        row, column = int(s.row[i]), int(s.column[i])
        part = landed[int(s.destination[i]), place][row : row + rows, column : column + columns]
        assert values.dtype == torch.uint8 and bool((part == -1).all()), f"{place} is sent twice"
        part.copy_(values)
        counts[int(s.destination[i])] += rows * columns
    for rank, own in got.items():
        for name, rect in own:
            found = landed[rank, name][
                rect.at_row : rect.at_row + rect.rows, rect.at_column : rect.at_column + rect.columns
            ]
            assert torch.equal(
                found,
                wanted[rect.tensor][rect.row : rect.row + rect.rows, rect.column : rect.column + rect.columns].short(),
            ), (rank, name, rect)
    assert counts == Counter(plan.needed) and plan.sent == plan.lower_bound


def test_blocks_that_ranks_divide_are_refused_with_their_sizes_fp8():
    sizes = known_sizes("qwen3-30b-a3b")  # experts of 768
    assert not block_problems(sizes, TrainerLayout(tp=4, ep=4), EngineLayout(tp=2, quantization="fp8"))
    (said,) = block_problems(sizes, TrainerLayout(), EngineLayout(tp=4, quantization="fp8"))
    assert "engine.quantization = 'fp8' with engine.tp = 4" in said and "rows 0 to 192" in said
    assert not block_problems(sizes, TrainerLayout(), EngineLayout(tp=4, quantization="mxfp8"))
    assert not block_problems(sizes, TrainerLayout(), EngineLayout(tp=4, expert_parallel=True, quantization="fp8"))
    (said,) = block_problems(sizes, TrainerLayout(tp=4, dp=2, etp=4), EngineLayout(quantization="fp8"))
    assert "layout.tp = 4, etp = 4" in said


def test_layers_that_stay_unquantised_are_named_for_engines_fp8():
    assert left_out(MOE) == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert left_out(DENSE) == ["lm_head"]
    shapes = quantised_shapes(LATENT)
    assert not [n for n in shapes if "norm" in n or "gate.weight" in n or "embed" in n or "lm_head" in n]
    assert {n.split(".")[-2] for n in shapes} == {
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    kinds = rank_layouts.engine_parameters(LATENT, EngineLayout(tp=2, quantization="fp8"), 0)
    scales = {n.split(".", 3)[-1]: shape for n, (shape, _) in kinds.items() if n.endswith(SCALES) and ".1." in n}
    assert scales == {  # the shapes of vLLM's and SGLang's parameters, experts stacked
        "self_attn.fused_qkv_a_proj.weight_scale_inv": (2, 2), "self_attn.q_b_proj.weight_scale_inv": (3, 1),
        "self_attn.kv_b_proj.weight_scale_inv": (4, 1), "self_attn.o_proj.weight_scale_inv": (2, 2),
        "mlp.experts.w13_weight_scale_inv": (4 * 2, 2), "mlp.experts.w2_weight_scale_inv": (4 * 2, 1),
        "mlp.shared_experts.gate_up_proj.weight_scale_inv": (2, 2),
        "mlp.shared_experts.down_proj.weight_scale_inv": (2, 1),
    }  # fmt: skip
