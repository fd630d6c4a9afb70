"""Weights: the rectangles of every family and layout, what is read, and which models are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from coverage_of_ranks import check_coverage
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numbered import numbered
from safetensors.torch import load_file, save_file
from tiny_models import LATENT, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.config.schema import ConfigError
from megatron_rl.models import registry
from megatron_rl.models.registry import families
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights import hf_model, parameter_mapping, tensor_copies
from megatron_rl.weights.parameter_mapping import Rect, Shard, megatron, megatron_names


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            "with quant_method 'fp8' is not supported, mxfp4",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0 is not supported, only 7.0 is"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types = "),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False is not supported, only True is"),
        ("llama", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (
            "mistral",
            {"sliding_window": 511},
            "sliding_window = 511 is not supported, attention here is full: set it to null",
        ),
        ("mixtral", {"sliding_window": 16}, "sliding_window = 16 is not supported"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias = False is not supported, only True is"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported"),
        ("qwen2", {"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported, greedy and group"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported, only False is"),
        ("deepseek_v3", {"norm_topk_prob": False}, "Megatron-core makes the chosen sigmoids sum to 1"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False is not supported, only True is"),
        (
            "deepseek_v3",
            {"n_group": 8},
            "num_experts_per_tok = 2, but 8 experts in n_group = 8 groups, of which a token",
        ),
    ],
)
def test_weights_of_an_unsupported_architecture_are_refused(tmp_path, family, change, says):
    make_model(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=says):
        hf_model.read_architecture(tmp_path)


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_a_window_that_no_sequence_leaves_is_harmless(tmp_path, window):
    model = make_model(tmp_path, "mistral", sliding_window=window)  # its context is 512
    assert hf_model.read_architecture(model).family == "mistral"


@pytest.mark.parametrize("family", sorted(families()))
def test_weights_that_no_parameter_takes_are_refused(tmp_path, family):
    make_model(tmp_path, family)
    arch = hf_model.read_architecture(tmp_path)
    parameter_mapping.check_complete(hf_model.tensor_files(tmp_path), arch)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.layers.0.self_attn.out_proj.bias": torch.zeros(64)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match=r"1 tensors have no place .* model.layers.0.self_attn.out_proj.bias"):
        parameter_mapping.check_complete(hf_model.tensor_files(tmp_path), arch)


def test_layers_that_predict_ahead_are_left_out(tmp_path):
    arch = hf_model.read_architecture(make_model(tmp_path, "deepseek_v3"))
    names = {*hf_model.tensor_files(tmp_path), "model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"}
    parameter_mapping.check_complete(names, arch)
    with pytest.raises(
        ConfigError, match="1 tensors have no place in a deepseek_v3 model, e.g. model.layers.0.eh_proj"
    ):
        parameter_mapping.check_complete({*names, "model.layers.0.eh_proj.weight"}, arch)


def test_weights_are_read_in_parts_and_a_missing_one_is_named(tmp_path):
    make_model(tmp_path, "qwen2")
    tensors = hf_model.DirectoryTensors(tmp_path)
    for name, wanted in load_file(tmp_path / "model.safetensors").items():
        rows, columns = wanted.shape[0], wanted.shape[1] if wanted.dim() > 1 else 1
        rect = Rect(name, rows // 3, columns // 3, rows - rows // 3, columns - columns // 3, 0, 0)
        assert torch.equal(tensors.read(rect), tensor_copies.from_tensor(wanted, rect))
    with pytest.raises(ConfigError, match="no tensor 'lm_head.bias'"):
        tensors.read(Rect("lm_head.bias", 0, 0, 1, 1, 0, 0))
    with pytest.raises(ConfigError, match="too small for what config.json says"):
        tensors.read(Rect("model.norm.weight", 0, 0, 65, 1, 0, 0))


@dataclass(frozen=True)
class Layout:
    """A trainer's layout.

    `stages` are the layers per pipeline stage, in order: they may be uneven, and with VPP more than ranks.
    """

    tp: int
    stages: tuple[int, ...]
    ep: int
    etp: int
    fused: bool
    vocab_multiple: int


def ranks(sizes: Sizes, layout: Layout):
    """Yields every distinct (names of its parameters, shard) of the layout."""
    per_rank = sizes.experts // layout.ep
    start = 0
    for stage, count in enumerate(layout.stages):
        for tp_rank in range(layout.tp):
            for ep_rank in range(layout.ep):
                for etp_rank in range(layout.etp):
                    names = megatron_names(
                        sizes,
                        range(start, start + count),
                        range(ep_rank * per_rank, (ep_rank + 1) * per_rank),
                        first=stage == 0,
                        last=stage == len(layout.stages) - 1,
                        fused=layout.fused,
                    )
                    yield names, Shard(layout.tp, tp_rank, layout.etp, etp_rank)
        start += count


@st.composite
def cases(draw):
    """Draws a family, tiny sizes that its layout divides, and the layout."""
    family = draw(st.sampled_from(sorted(families())))
    tp = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = max(kv_heads, tp) * draw(st.sampled_from([1, 2]))
    moe = families()[family].has_experts
    ep, etp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))) if moe else (1, 1)
    etp = 1 if families()[family].common.bias else etp
    stages = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    head_dim = 4 * draw(st.sampled_from([1, 2]))
    assume((heads + 2 * kv_heads) * head_dim % tp == 0)
    sizes = Sizes(
        family=family,
        num_layers=sum(stages),
        hidden=8 * draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=4 * draw(st.integers(1, 3)),
        vocab=draw(st.integers(5, 40)),
        tied=draw(st.booleans()),
        experts=4 * moe,
        expert_ffn=4 * draw(st.integers(1, 2)) * moe,
        shared_ffn=8 if families()[family].has_shared_expert else 0,
    )
    if "kv_rank" in families()[family].keys:
        sizes = replace(
            sizes,
            kv_heads=heads,
            head_dim=6,
            rope_dim=2,
            value_dim=draw(st.sampled_from([3, 4])),
            kv_rank=5,
            q_rank=draw(st.sampled_from([0, 7])),
            shared_ffn=draw(st.sampled_from([0, 8])),
            dense_layers=draw(st.integers(0, sum(stages))),
        )
    return sizes, Layout(tp, stages, ep, etp, draw(st.booleans()), draw(st.sampled_from([1, 8])))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_weights_make_a_round_trip_through_every_layout_and_every_element_is_held_once(case):
    """Copies Hugging Face tensors to every rank's parameters and back, bit for bit.

    What no rectangle covers is zero padding of the vocabulary.
    """
    sizes, layout = case
    whole = numbered(sizes)
    held: list[Rect] = []
    back = {name: torch.full_like(tensor, -1) for name, tensor in whole.items()}
    for names, shard in ranks(sizes, layout):
        for name in names:
            shape, rects = megatron(sizes, name, shard, vocab_multiple=layout.vocab_multiple)
            one_dimensional = all(whole[r.tensor].dim() == 1 for r in rects) and shape[1] == 1
            parameter = torch.full(shape[:1] if one_dimensional else shape, -7.0, dtype=torch.float64)
            tensor_copies.fill(parameter, rects, lambda rect: tensor_copies.from_tensor(whole[rect.tensor], rect))
            assert int((parameter == -7).sum()) == 0
            assert parameter_mapping.padding(shape, rects) == 0 or "embedding" in name or "output_layer" in name
            for rect in rects:
                tensor_copies.from_tensor(back[rect.tensor], rect).copy_(tensor_copies.local(parameter, rect))
            held += rects
    assert all(torch.equal(back[name], tensor) for name, tensor in whole.items())
    check_coverage(sizes, held)
    with pytest.raises(ValueError):
        check_coverage(sizes, held + [Rect("model.norm.weight", 1, 0, 2, 1, 0, 0)])
    lost = held[-1]
    with pytest.raises(ValueError, match="nobody holds|its ranks hold"):
        check_coverage(sizes, [r for r in held if r[:5] != lost[:5]])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_weights_of_engine_ranks_cover_the_model_and_fit_their_parameters(case, expert_parallel):
    sizes, layout = case
    tp = layout.tp
    assume(
        sizes.heads % tp == 0
        and (sizes.kv_heads % tp == 0 or tp % sizes.kv_heads == 0)
        and (sizes.experts or tp) % tp == 0
    )
    held = []
    for rank in range(tp):
        for name, (shape, rects) in parameter_mapping.engine(sizes, tp, rank, expert_parallel=expert_parallel).items():
            parameter = torch.zeros(shape)
            for rect in rects:
                tensor_copies.local(parameter, rect).add_(1)
                assert tensor_copies.local(parameter, rect).shape == (rect.rows, rect.columns)
            assert int((parameter == 1).sum()) == sum(r.elements for r in rects)
            padded = ("model.embed_tokens.weight", "model.embedding.weight", "lm_head.weight")
            assert int((parameter == 0).sum()) == 0 or name in padded
            held += rects
    check_coverage(sizes, held)


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(151936, 4, 37984), (32000, 8, 4000), (96, 2, 64), (65, 8, 16), (130, 3, 64)]
)
def test_weights_of_an_engine_rank_have_the_rows_of_the_vocabulary_that_engines_give_it(vocab, tp, rows):
    """The vocabulary is padded to 64 in all, as in vLLM and SGLang.

    Padded by rank, four ranks of Qwen2.5 would get 38016 rows.
    """
    sizes = Sizes(
        family="llama", num_layers=1, hidden=8, heads=24, kv_heads=24, head_dim=4, ffn=24, vocab=vocab, tied=True
    )
    assert parameter_mapping.engine(sizes, tp, 0)["model.embed_tokens.weight"][0] == (rows, 8)


def test_weights_of_unknown_names_raise():
    sizes = Sizes(family="llama", num_layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=8, vocab=9, tied=False)
    for name in (
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "position_embeddings.weight",
    ):
        with pytest.raises(KeyError, match="no Hugging Face tensor is known"):
            megatron(sizes, name)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
        ({"model_type": "mixtral"}, "'num_experts' is missing"),
        (
            {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}},
            "quantization_config = .* is not",
        ),
        ({"model_type": "deepseek_v2", "n_routed_experts": 4}, "is missing, which a deepseek_v2 model must have"),
        ({}, "model_type None is not supported"),
    ],
)
def test_weights_of_a_config_that_is_not_understood_are_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        registry.read(config)


TINY = {
    **{
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 60,
    },
    **{"intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    **{"num_experts": 4, "num_local_experts": 4, "sliding_window": None},
}


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("tied", [False, True])
def test_weights_have_the_names_and_shapes_that_transformers_writes(tmp_path, family, tied):
    """Compares the table with model directories that transformers made from every family's config.json."""
    own = LATENT | {"num_experts": 8, "num_local_experts": 8}
    config = AutoConfig.for_model(family, **(TINY | (own if "deepseek" in family else {})), tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    sizes = registry.read(json.loads((tmp_path / "config.json").read_text()))
    written = tensor_copies.by_expert(load_file(tmp_path / "model.safetensors"), sizes)
    found = {name: (t.shape[0], t.shape[1] if t.dim() > 1 else 1) for name, t in written.items()}
    assert found == parameter_mapping.hf_shapes(sizes)
    in_memory = tensor_copies.by_expert(model.state_dict(), sizes)
    assert all(torch.equal(tensor, written[name]) for name, tensor in hf_model.read_tensors(tmp_path))
    assert all(torch.equal(in_memory[name], tensor) for name, tensor in written.items())
