"""Model families: their files, what their config.json says, and the one table of what must divide by what."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_rl.config.schema import ConfigError, Layout
from megatron_rl.models import registry
from megatron_rl.models.divisibility import (
    allowed,
    engine_problems,
    engine_violations,
    trainer_problems,
    trainer_violations,
)
from megatron_rl.models.registry import families, known, known_sizes
from megatron_rl.models.shape import read_shape
from megatron_rl.models.sizes import Rotary, Sizes
from megatron_rl.weights import hf_model, parameter_mapping
from megatron_rl.weights.counting import Parallel, counts, total

# Parameters of public models in billions, as their cards and papers give them.
PUBLISHED = {
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-7b": 7.61,
    "qwen3-0.6b": 0.6,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "llama3-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141,
    "smollm2-135m": 0.135,
    "smollm2-360m": 0.362,
    "smollm2-1.7b": 1.71,
    "gemma-3-270m": 0.268,
    "gemma-3-1b": 1.0,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236,
    "deepseek-v3": 671,
    "olmo-2-1b": 1.485,
    "olmo-2-7b": 7.299,
    "olmo-2-13b": 13.72,
    "olmo-2-32b": 32.23,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_public_models_parameters_are_as_many_as_its_card_says(name):
    found = sum(map(math.prod, parameter_mapping.hf_shapes(known_sizes(name)).values())) / 1e9
    assert found == pytest.approx(PUBLISHED[name], rel=0.02)
    assert total(read_shape(name)) / 1e9 == found


def test_of_every_family_with_public_models_one_is_counted():
    counted = {known()[name]["model_type"] for name in PUBLISHED}
    assert counted == {config["model_type"] for config in known().values()}


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama3-8b", "qwen3-30b-a3b", "deepseek-v2"])
def test_the_ranks_of_a_layout_are_counted_as_the_rectangles_have_them(name):
    """Planning counts equal layers together; the maps of weights go parameter by parameter."""
    shape, parallel = (
        read_shape(name),
        Parallel(world=16, tp=2, pp=2, ep=4 if "30b" in name or "deepseek" in name else 1),
    )
    sizes = shape.sizes
    for stage, layers in enumerate((range(sizes.num_layers // 2), range(sizes.num_layers // 2, sizes.num_layers))):
        ends = {"first": stage == 0, "last": stage == 1}
        here = range(sizes.experts // parallel.ep)
        names = parameter_mapping.megatron_names(sizes, layers, here, fused=False, **ends)
        held = {n: math.prod(parameter_mapping.megatron(sizes, n, parameter_mapping.Shard(tp=2))[0]) for n in names}
        expert = sum(size for n, size in held.items() if parameter_mapping.is_expert(n))
        found = counts(shape, parallel, stage)
        assert (found.dense, found.expert) == (sum(held.values()) - expert, expert)


@pytest.mark.parametrize("family", sorted(families()))
def test_a_model_directory_has_the_features_that_its_config_says(tmp_path, family):
    """The features of config.json are those of transformers' own config, which fills in what the file leaves out."""
    make_model(tmp_path, family, rms_norm_eps=3e-5)
    arch, file = hf_model.read_architecture(tmp_path), json.loads((tmp_path / "config.json").read_text())
    assert arch.features == registry.features(file) and registry.read(file).family == family
    assert arch.features.norm_eps == 3e-5
    assert arch.features.experts_per_token == (2 if families()[family].has_experts else 0)
    assert hash(arch) == hash(arch) and arch == hf_model.read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rotary(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rotary(theta=5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 32.0}},
            Rotary(theta=5e5, kind="llama3", factor=32.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            Rotary(theta=5e5, kind="yarn", factor=4),
        ),
        ({}, Rotary()),
    ],
)
def test_rotary_embeddings_are_read_in_both_spellings(config, wanted):
    assert Rotary.read(config) == wanted


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_scaled_rotary_embeddings_are_those_of_transformers_in_the_whole_context(tmp_path, scaling):
    make_model(tmp_path, "llama", rope_parameters={"rope_theta": 5e4, **scaling})
    arch, theirs = hf_model.read_architecture(tmp_path), LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    positions = torch.arange(512)  # of the model's context
    assert arch.features.kinds[0].rotary.kind == scaling["rope_type"]
    for own, wanted in zip(arch.rotary(positions), theirs(torch.zeros(1), positions[None]), strict=True):
        assert torch.equal(own, wanted[0])


SMALL = Sizes(family="qwen2", num_layers=6, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=100, tied=False)
SPARSE = replace(SMALL, family="qwen2_moe", experts=12, expert_ffn=20, shared_ffn=24)
LATENT = replace(SPARSE, family="deepseek_v2", heads=16, ffn=100, dense_layers=1, kv_rank=8, rope_dim=4, value_dim=8)


@pytest.mark.parametrize(
    ("sizes", "layout", "says"),
    [
        (SMALL, {"tp": 3}, "num_attention_heads = 8 of it is not divisible by tp = 3: the nearest that work are tp"),
        (SMALL, {"tp": 3}, "num_key_value_heads = 4 of it is not divisible by tp = 3: the nearest that work are tp"),
        (SMALL, {"tp": 8}, "num_key_value_heads = 4 of it is not divisible by tp = 8: the nearest that works is tp"),
        (replace(SMALL, ffn=98), {"tp": 4}, "intermediate_size = 98 of it is not divisible by tp = 4: the nearest"),
        (SMALL, {"pp": 4}, "by pp x vpp = 4: the nearest that work are pp x vpp = 3 and pp x vpp = 6"),
        (SMALL, {"pp": 2, "vpp": 2, "overlap_p2p": True}, "num_hidden_layers = 6 of it is not divisible by pp x vpp"),
        (SMALL, {"ep": 2}, "it has no experts: set layout.ep = 2 to 1"),
        (SPARSE, {"ep": 8}, "num_experts = 12 of it is not divisible by ep = 8: the nearest that work are ep = 6"),
        (SPARSE, {"etp": 8}, "moe_intermediate_size = 20 of it is not divisible by etp = 8: the nearest that work are"),
        (LATENT, {"tp": 8}, "intermediate_size = 100 of it is not divisible by tp = 8: the nearest that works is"),
        (SPARSE, {"tp": 2}, "trains that only with sequence parallelism; set layout.sequence_parallel to true"),
        (replace(SPARSE, family="gpt_oss"), {"etp": 2}, "it has experts with biases, and layout.etp = 2 (null: tp)"),
        (replace(SPARSE, family="gpt_oss"), {"tp": 2, "sequence_parallel": True}, "the bias; set layout.etp to 1"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_divide_a_model_is_refused_with_the_nearest_that_does(sizes, layout, says):
    problems = trainer_problems(sizes, Layout(**layout), "it")
    assert any(says in line for line in problems), problems


@pytest.mark.parametrize(
    ("sizes", "tp", "expert_parallel", "says"),
    [
        (SMALL, 3, False, "num_attention_heads = 8"),
        (replace(SMALL, kv_heads=6, heads=12, ffn=96), 4, False, "num_key_value_heads = 6"),
        (replace(SMALL, ffn=97), 2, False, "intermediate_size = 97"),
        (SPARSE, 8, False, "moe_intermediate_size = 20"),
        (SPARSE, 8, True, "num_experts = 12"),
        (SMALL, 8, False, None),  # engines repeat key/value heads
        (SMALL, 2, True, "has no experts"),
    ],
)
def test_an_engine_that_does_not_divide_a_model_is_refused(sizes, tp, expert_parallel, says):
    problems = engine_problems(sizes, tp, "it", expert_parallel=expert_parallel)
    assert problems == [] if says is None else any(says in line for line in problems)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([SMALL, SPARSE]), st.integers(1, 12), st.integers(1, 12), st.integers(1, 24))
def test_the_nearest_that_work_are_allowed_and_none_is_nearer(sizes, tp, pp, ep):
    layout = Layout(tp=tp, pp=pp, ep=ep if sizes.experts else 1, etp=tp)
    for violation in trainer_violations(sizes, layout):
        works = allowed(sizes, violation.axis)
        assert not works(violation.ranks) and violation.nearest and all(map(works, violation.nearest))
        low, high = min(violation.nearest), max(violation.nearest)
        between = range(low + 1, high if len(violation.nearest) == 2 else violation.ranks)
        assert not any(map(works, between))
    for violation in engine_violations(sizes, tp):
        assert all(not engine_violations(sizes, near) for near in violation.nearest)


def test_attention_through_a_latent_keeps_one_vector_of_a_token_on_every_rank_of_an_engine():
    """DeepSeek-V3 keeps 512 + 64 numbers of a token in a layer (section 2.1.2 of DeepSeek-V2's report)."""
    sizes = known_sizes("deepseek-v3")
    assert (sizes.cached, sizes.cache_copies(8), sizes.expert_layers) == (576, 8, 58)
    assert (SMALL.cached, SMALL.cache_copies(8), SMALL.expert_layers) == (64, 2, 0)
    layer = {row.name: row for row in registry.layer_rows(sizes, 0)}
    matrices = [row for row in layer.values() if row.name.startswith("self_attention.linear")]
    assert sizes.attention_weights == sum(source.rows * source.columns for row in matrices for source in row.sources)


def test_a_config_that_lacks_a_key_is_told_of_it():
    with pytest.raises(ConfigError, match="'num_experts_per_tok' is missing, which a mixtral model must have"):
        registry.features({"model_type": "mixtral"})
