"""Settings of adapters (LoRA): what is refused, with the cure, and what reading them needs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import specs as checks
import torch
from fake_vllm import FakeVllm
from safetensors.torch import save_file
from tiny_models import make_model

from megatron_rl.config.schema import (
    ConfigError,
    Embedded,
    Lora,
    Model,
    PromptSet,
    RoleConfig,
    Rollouts,
    TandemConfig,
    TrainConfig,
    Use,
)
from megatron_rl.engines.http import ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.server import Adapters
from megatron_rl.engines.vllm.client import AdapterServer
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.models import registry
from megatron_rl.models.lora_targets import adapter_problems, num_elements, projections
from megatron_rl.weights import lora_adapters
from megatron_rl.weights.parameter_mapping import WHOLE, Shard

QWEN = registry.known_sizes("qwen2.5-7b")


def role(**settings):
    return RoleConfig(**{"model": Model(path="a/model"), "lora": Lora(), **settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"targets": ()}, "name at least one matrix"),
        ({"targets": ("q_proj", "q_proj")}, "each of them once"),
    ],
)
def test_lora_settings_that_cannot_be_used_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        Lora(**settings)


@pytest.mark.parametrize(
    ("sizes", "settings", "says"),
    [
        (
            "qwen3-30b-a3b",
            {},
            "has experts: its attention alone can have adapters, gate_proj cannot; set lora.targets to [q_proj, k_proj",
        ),
        ("deepseek-v2-lite", {"lora": Lora(targets=("o_proj",))}, "attends through latents"),
        ("qwen2.5-7b", {"model": Model(path="m", fp8=True)}, "set fp8 to false"),
        ("qwen2.5-7b", {"model": Model(path="m", init="random")}, "set it to pretrained"),
        ("qwen2.5-7b", {"lora": Lora(path="nowhere")}, "give the directory of an adapter"),
    ],
)
def test_lora_problems_name_the_cure(sizes, settings, says):
    [found] = adapter_problems(registry.known_sizes(sizes), role(**settings), "a/model")
    assert says in found
    assert adapter_problems(registry.known_sizes(sizes), role(**settings | {"lora": None}), "a/model") == []


@pytest.mark.parametrize(
    ("own", "engine", "says"),
    [
        ({"lora": None}, {}, "engine.adapters = 'served', and no role has lora: set it to merged"),
        ({}, {"urls": {"a": ("http://x:1",)}, "start": False}, "those servers share no directory with the run"),
        ({"tandem": TandemConfig()}, {}, "vLLM holds no adapters beside two models; set it to merged"),
        ({"lora": Lora(rank=513)}, {}, "roles.a.lora.rank = 513 with engine.adapters = 'served': vLLM takes up to 512"),
        ({}, {"pause": "keep"}, "answers under way would need adapters that are gone; set engine.pause to abort or"),
        ({"policy": "none"}, {}, "roles.a.lora with policy = 'none': nothing is trained"),
    ],
)
def test_lora_that_servers_cannot_serve_is_refused(own, engine, says):
    settings = {"roles": {"a": role(model=Model(path="an/model"), **own)}, "recipe": Use(target="m:R")}
    config = TrainConfig(**settings, data=PromptSet(path="some/set"), rollouts=Rollouts(max_staleness=2),
                         engine=Vllm(adapters="served", **engine))  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        checks.check(config, 1, to_come=True)
    assert says in str(refused.value)


def test_lora_of_qwen_7b_has_as_many_numbers_as_peft_says():
    """28 layers: q and o 3584 x 3584, k and v 512 x 3584, gate, up and down 18944 x 3584; r (rows + columns) each."""
    by_hand = 28 * 16 * (2 * (3584 + 3584) + 2 * (512 + 3584) + 3 * (18944 + 3584))
    assert num_elements(QWEN, Lora(rank=16)) == by_hand == 40_370_176
    assert num_elements(QWEN, Lora(rank=16, targets=("q_proj",))) == 28 * 16 * 7168
    assert [p.name for p in projections(QWEN, 0)] == [*Lora().targets]


def test_lora_ranks_hold_every_number_of_an_adapter():
    for name, tensor in (
        ("q_proj", "self_attn.q_proj"),
        ("down_proj", "mlp.down_proj"),
        ("k_proj", "self_attn.k_proj"),
    ):
        for part in ("lora_a", "lora_b"):
            own = lora_adapters.parameter_name(5, name, part)
            shape, [rect] = lora_adapters.held(QWEN, own, WHOLE, 8)
            assert rect.tensor == f"base_model.model.model.layers.5.{tensor}.lora_{part[-1].upper()}.weight"
            assert lora_adapters.is_adapter(own) and not lora_adapters.is_adapter(
                "decoder.layers.5.mlp.linear_fc1.weight"
            )
            parts = [lora_adapters.held(QWEN, own, Shard(4, rank), 8) for rank in range(4)]
            elements = sum(rows * columns for (rows, columns), _ in parts)
            is_partitioned = (name == "down_proj") == (part == "lora_a")
            assert elements == shape[0] * shape[1] * (1 if is_partitioned else 4)


def test_lora_adapters_that_are_not_the_settings_are_refused(tmp_path):
    sizes = registry.read(json.loads((make_model(tmp_path / "m") / "config.json").read_text()))
    lora, there = Lora(rank=2, alpha=4.0), tmp_path / "adapter"
    tensors = {name: torch.ones(shape) for name, shape in lora_adapters.shapes(sizes, lora).items()}
    lora_adapters.write(there, tensors, lora, str(tmp_path / "m"), "digest")
    own = replace(lora, path=str(there))
    assert adapter_problems(sizes, role(lora=own), "m") == []
    assert (
        lora_adapters.read(there, sizes, own).keys() == tensors.keys() and lora_adapters.read_settings(there).rank == 2
    )
    for change, says in (
        ({"rank": 3}, "lora.rank = 3, and the adapter in lora.path"),
        ({"alpha": 5.0}, "lora.alpha = 5.0"),
        ({"targets": ("q_proj",)}, "lora.targets = ['q_proj']"),
    ):
        assert says in adapter_problems(sizes, role(lora=replace(own, **change)), "m")[0]
    with pytest.raises(ConfigError, match="set lora.targets to the adapter's"):
        lora_adapters.read(there, sizes, replace(own, targets=("q_proj",)))
    with pytest.raises(ConfigError, match="is it another model's"):
        lora_adapters.read(there, sizes, replace(own, rank=3))
    told = json.loads((there / "adapter_config.json").read_text())
    (there / "adapter_config.json").write_text(json.dumps(told | {"use_rslora": True}))
    assert "says use_rslora = True" in adapter_problems(sizes, role(lora=own), "m")[0]
    (there / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        lora_adapters.read(there, sizes, own)


def test_lora_of_another_training_of_the_model_is_told_apart(tmp_path):
    """One number in the middle of the weights differs."""
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    assert lora_adapters.base_digest(first) == lora_adapters.base_digest(second)
    tensors = dict(lora_adapters.hf_model.read_tensors(second))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["model.layers.2.mlp.up_proj.weight"][3, 3] += 1.0
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    assert lora_adapters.base_digest(first) != lora_adapters.base_digest(second)


@pytest.mark.parametrize("odd", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 8}}, {"bias": "all"}])
def test_an_adapter_of_another_kind_is_not_merged_by_the_plain_rule(tmp_path, odd):
    """rsLoRA's factor is alpha / sqrt(r): `convert to-hf` merged with alpha / r."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain))
    assert lora_adapters.read_settings(tmp_path) == Lora(rank=4, alpha=8, targets=("q_proj",))
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain | odd))
    with pytest.raises(ConfigError, match=f"says {next(iter(odd))} = .* not supported; give a plain LoRA adapter"):
        lora_adapters.read_settings(tmp_path)


def sharing(engine, **own):
    roles = {"a": role(model=Model(path="an/model")), "b": role(**{"model": Model(path="an/model"), **own})}
    return TrainConfig(roles=roles, recipe=Use(target="m:R"), data=PromptSet(path="some/set"), engine=engine)


def test_lora_roles_of_one_model_share_the_servers_that_compute_with_adapters():
    served = Vllm(adapters="served")
    both = sharing(served, lora=Lora(rank=4))
    engine = checks.spec_of(both).engine
    assert list(engine.server_roles) == ["a"]
    other = Model(path="an/other")
    apart = [sharing(Vllm()), sharing(Embedded()), sharing(served, lora=None), sharing(served, model=other)]
    apart += [sharing(served, model=Model(path="an/model", dtype="bfloat16"))]
    assert all(list(checks.spec_of(config).engine.server_roles) == ["a", "b"] for config in apart)
    late = replace(both, rollouts=Rollouts(max_staleness=2))
    with pytest.raises(ConfigError, match=r"roles\.b and roles\.a share servers .* set it to 1"):
        checks.check(late, 1, to_come=True)
    [said] = [line for line in checks.explain(checks.spec_of(both)) if "servers" in line]
    assert said == "b: answers come from the servers of a, which compute with adapters of both"


def test_lora_adapters_of_roles_that_share_a_server_have_numbers_and_names_of_their_own(tmp_path):
    servers = [
        AdapterServer(
            "http://127.0.0.1:1", "token", Vllm(), 1.0, ModelFacts(adapters=Adapters(tmp_path / name, place, 2))
        )
        for place, name in enumerate("ab")
    ]
    named = [server._named(version) for server in servers for version in range(3)]
    assert sorted(number for _, number, _ in named) == [1, 2, 3, 4, 5, 6]
    assert len({name for name, _, _ in named}) == 6 and named[4][2] == str(tmp_path / "b/v1")
    for server in servers:
        server.close()


@pytest.mark.parametrize("answers", [[False], [True, False], []])
def test_lora_adapter_that_a_server_did_not_load_is_noticed(tmp_path, answers):
    """vLLM answers "False", a text that is true."""
    fake = FakeVllm("token")
    server = AdapterServer(fake.url, "token", Vllm(), 1.0, ModelFacts(adapters=Adapters(tmp_path, 0, 1)))
    try:
        server.update(1, 1.0)
        fake.loaded = answers
        with pytest.raises(ServerLost, match="could not load the adapter of version 2: see its log"):
            server.update(2, 1.0)
        assert server.version() == 1
    finally:
        server.close()
        fake.close()
