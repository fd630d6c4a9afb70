"""Faults of adapters: files of peft that are not W + alpha / r B A, or hold numbers that cannot be computed with."""

import json
import re

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from megatron_rl.config.schema import ConfigError, Lora, Model, RoleConfig
from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find, read_sizes
from megatron_rl.models.lora_targets import CONFIG, WEIGHTS, adapter_problems
from megatron_rl.weights import lora_adapters

RANK, ALPHA = 4, 8
SOME = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("faults_adapters") / "base")


def saved(base, place, **settings):
    """Returns the directory of an adapter that peft wrote, with random numbers in A and B."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"target_modules": SOME, "r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"} | settings
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(0.02 * torch.randn(parameter.shape))
    adapted.save_pretrained(place)
    return place


def own(path, targets=SOME):
    return RoleConfig(model=Model(path="m"), lora=Lora(rank=RANK, alpha=ALPHA, targets=tuple(targets), path=str(path)))


OTHER = [
    {"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "olora"},
    {"use_dora": True}, {"use_rslora": True}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head"]},
    {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}}, {"layers_to_transform": [0]},
    {"layer_replication": [[0, 1], [0, 1]]}, {"trainable_token_indices": [1, 2]},
    {"target_parameters": ["mlp.gate_proj.weight"]},
]  # fmt: skip


@pytest.mark.parametrize("settings", OTHER, ids=str)
def test_faults_an_adapter_that_peft_computes_otherwise_is_refused_by_the_key_that_says_so(base, tmp_path, settings):
    there, [key] = saved(base, tmp_path / "adapter", **settings), settings
    found = adapter_problems(read_sizes(base), own(there), "m")
    assert any(f"{CONFIG} says {key} = " in line for line in found), found
    with pytest.raises(ConfigError, match=f"says {key} = .* not supported"):
        lora_adapters.read_settings(there)


@pytest.mark.parametrize(
    ("key", "value", "taken"),
    [
        ("init_lora_weights", "loftq", False), ("init_lora_weights", "corda", False),
        ("init_lora_weights", "lora_ga", False), ("init_lora_weights", "of_tomorrow", False),
        ("init_lora_weights", False, True), ("init_lora_weights", "gaussian", True),
        ("init_lora_weights", "eva", True), ("init_lora_weights", "orthogonal", True),
        ("fan_in_fan_out", True, False), ("lora_bias", True, False), ("alora_invocation_tokens", [1], False),
        ("use_of_tomorrow", True, False), ("use_of_tomorrow", None, True), ("use_of_tomorrow", False, True),
        ("loftq_config", {"loftq_bits": 4}, False), ("megatron_config", {"a": 1}, False),
        ("peft_type", "ADALORA", False), ("lora_dropout", 0.1, True), ("revision", "main", True),
        ("inference_mode", True, True), ("auto_mapping", {"unsloth_fixed": True}, True),
    ],
)  # fmt: skip
def test_faults_a_key_of_an_adapter_is_harmless_off_or_refused(base, tmp_path, key, value, taken):
    there = tmp_path / "adapter"
    there.mkdir()
    plain = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=SOME).to_dict()
    plain = {name: sorted(told) if isinstance(told, set) else told for name, told in plain.items()}
    (there / CONFIG).write_text(json.dumps(plain))
    assert lora_adapters.read_settings(there).rank == RANK, "peft's defaults are taken"
    (there / CONFIG).write_text(json.dumps(plain | {key: value}))
    assert (adapter_problems(read_sizes(base), own(there), "m") == []) == taken
    if not taken:
        with pytest.raises(ConfigError, match=re.escape(f"says {key} = {value!r}")):
            lora_adapters.read_settings(there)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj", ["self_attn.q_proj", "v_proj"]], ids=str)
def test_faults_an_adapter_is_merged_whatever_way_its_targets_are_named(base, tmp_path, targets):
    there = saved(base, tmp_path / "adapter", target_modules=targets)
    names = Lora().targets if targets == "all-linear" else ("q_proj", "v_proj")
    assert {*lora_adapters.read_settings(there).targets} == {*names}
    assert adapter_problems(read_sizes(base), own(there, names), "m") == []
    merged = tmp_path / "merged"
    said = convert.to_hf(find(there, model=base), merged, verify=True)
    assert re.fullmatch(r"peft's merged weights differ by .* at most", said)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), there).merge_and_unload()
    ours = load_file(merged / "model.safetensors")
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(ours[name], tensor, atol=1e-6)


def test_faults_the_verification_of_a_merged_adapter_compares_with_what_peft_loads(base, tmp_path, monkeypatch):
    """An adapter of PiSSA, as it was taken: it read back "bit for bit", and its logits were off by 0.28."""
    there = saved(base, tmp_path / "adapter", init_lora_weights="pissa")
    source = find(there, model=base)
    monkeypatch.setattr(lora_adapters, "not_plain", lambda told: [])
    with pytest.raises(ConfigError, match=r"differs from what peft makes of .* when it loads it by"):
        convert.to_hf(source, tmp_path / "merged", verify=True)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("broken", ["nan", "inf", "int8", "bool"])
def test_faults_numbers_of_an_adapter_that_cannot_be_computed_with_are_refused_by_tensor(base, tmp_path, broken):
    there = saved(base, tmp_path / "adapter")
    tensors = load_file(there / WEIGHTS)
    name = next(name for name in tensors if "down_proj.lora_B" in name)
    if broken in ("nan", "inf"):
        tensors[name][1, 1] = float(broken)
    else:
        tensors[name] = tensors[name].to(getattr(torch, broken))
    save_file(tensors, there / WEIGHTS)
    with pytest.raises(ConfigError, match=f"{re.escape(name)} (holds numbers that are not finite|is torch.{broken})"):
        lora_adapters.read(there, read_sizes(base), lora_adapters.read_settings(there))
