"""Settings that a model does not allow are refused by its config.json, before the model is loaded."""

import json

import pytest
import specs as config_checks
import yaml
from test_config import BASE, write

from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, TrainConfig


@pytest.fixture
def base(tmp_path):
    return write(tmp_path / "base.yaml", yaml.safe_dump(BASE))


DENSE = {  # what a config.json must have
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 96,
}

SINKS = DENSE | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
PACKED = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ("{tp: 3}", "num_attention_heads = 4"),
        ("{tp: 4}", "num_key_value_heads = 2"),
        ("{pp: 2}", "num_hidden_layers = 3"),
        ("{tp: 2}", "intermediate_size = 33"),
    ],
)
def test_the_models_sizes_are_checked_without_loading_it(tmp_path, base, layout, key):
    facts = DENSE | {"intermediate_size": 33}
    write(tmp_path / "config.json", json.dumps(facts))
    read = load(TrainConfig, [base], [f"roles.a.model.path={tmp_path}", f"roles.a.layout={layout}"])
    with pytest.raises(ConfigError, match=f"roles.a: {key}"):
        config_checks.check(read, 12)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("{ep: 4}", "num_experts = 6 of .* is not divisible by ep = 4"),
        ("{ep: 2, etp: 3}", "moe_intermediate_size = 32 of .* is not divisible by etp = 3"),
        ("{tp: 2}", "trains that only with sequence parallelism; set layout.sequence_parallel to true"),
        ("{tp: 2, ep: 3, sequence_parallel: true}", None),
        (
            "{tp: 4, ep: 6, sequence_parallel: true}",
            "etp 4 x ep 6 x pp 1 = 24 does not divide 12 ranks: lower ep or etp",
        ),
        (
            "{tp: 4, ep: 3, etp: 1, sequence_parallel: true}",
            "shared_expert_intermediate_size = 66 of .* is not divisible by tp = 4",
        ),
        ("{etp: 0}", "layout.etp = 0: give a value greater than or equal to 1"),
    ],
)
def test_expert_layouts_are_checked_without_loading_the_model(tmp_path, base, layout, says):
    facts = DENSE | {"model_type": "qwen2_moe", "num_key_value_heads": 4, "intermediate_size": 33}
    facts |= {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 66}
    facts |= {"num_experts_per_tok": 2}
    write(tmp_path / "config.json", json.dumps(facts))
    overrides = [f"roles.a.model.path={tmp_path}", f"roles.a.layout={layout}"]
    if says is None:
        read = load(TrainConfig, [base], overrides)
        config_checks.check(read, 12)
        assert "experts ep 3 x etp 2" in config_checks.explain(config_checks.spec_of(read, 12))[0]
        return
    with pytest.raises(ConfigError, match=says):
        config_checks.check(load(TrainConfig, [base], overrides), 12)


@pytest.mark.parametrize(
    ("engine", "tandem", "says"),
    [
        ("embedded", False, None),
        ("embedded", True, None),
        ("vllm", False, None),
        ("vllm", True, "vLLM has no model runner that does both"),
        ("sglang", False, "the experts that its servers choose are not read"),
    ],
)
def test_router_replay_wants_an_engine_that_tells_its_experts(base, engine, tandem, says):
    words = [f"engine.kind={engine}", "roles.a.router_replay=true", *(["roles.a.tandem={}"] if tandem else [])]
    problems = [p for p in config_checks.problems(load(TrainConfig, [base], words), 2, to_come=True) if "replay" in p]
    assert [says in problem for problem in problems] == ([True] if says else [])


EXPERTS = DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
GEMMA = DENSE | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4}
YARN = DENSE | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
LONGROPE = DENSE | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}


@pytest.mark.parametrize(
    ("facts", "words", "says"),
    [
        (DENSE, ["roles.a.router_replay=true"], "router_replay = true, and .* has no experts: set it to false"),
        (EXPERTS, ["roles.a.router_replay=true"], None),
        (DENSE, ["roles.a.model.router_aux_loss=0.1"], "model.router_aux_loss = 0.1, and .* has no experts"),
        (EXPERTS, ["roles.a.model.router_aux_loss=0.1"], None),
        (DENSE, ["roles.a.shared_prefixes=true"], None),
        (DENSE, ["roles.a.shared_prefixes=true", "roles.a.layout.cp=2"], "layout.cp = 2: context parallelism"),
        (EXPERTS | {"num_experts_per_tok": 1}, [], "num_experts_per_tok = 1 with renormalised probabilities"),
        (GEMMA, ["roles.a.model.fp8=true"], "model.fp8 = true, and Transformer Engine's layers cannot compute"),
        (YARN, ["roles.a.model.fp8=true"], "model.fp8 = true, and Transformer Engine's layers cannot compute"),
        (YARN, [], None),
        (DENSE, ["roles.a.model.fp8=true"], None),
        (LONGROPE, [], "rope_type 'longrope' is not supported: default, linear, yarn, llama3 are"),
        (GEMMA | {"layer_types": ["chunked_attention"] * 3}, [], "is not the config.json of a gemma3_text model"),
        ({k: v for k, v in EXPERTS.items() if k != "num_experts_per_tok"}, [], "'num_experts_per_tok' is missing"),
        (DENSE, ["engine.kind=vllm", "engine.tp=3"], "engine of a: num_attention_heads = 4 of .* by tp = 3"),
        (DENSE, ["engine.kind=vllm", "engine.expert_parallel=true"], "engine of a: .* has no experts"),
        (DENSE, ["engine.kind=vllm", "engine.tp=2"], None),
        (DENSE | {"model_type": "gpt2"}, ["roles.a.policy=none"], "model_type 'gpt2' is not supported"),
        (SINKS, [], None),
        (SINKS, ["roles.a.model.attention_backend=flash"], "roles.a: .* has attention sinks, which torch's flash"),
        (SINKS, ["roles.a.layout={ep: 2, etp: 2}"], "roles.a: .* has experts with biases, and layout.etp = 2"),
        (SINKS, ["engine.kind=vllm", "engine.tp=2"], "engine of a: .* has experts with biases, and engine.tp = 2"),
        (SINKS, ["engine.kind=vllm", "engine.tp=2", "engine.expert_parallel=true"], None),
        (SINKS, ["engine.kind=vllm", "engine.quantization=fp8"], "engine.quantization = 'fp8', and .* with biases"),
        (SINKS | PACKED, ["engine.kind=vllm"], "has quantised weights, .* directory that `megatron-rl convert to-hf`"),
        (SINKS | PACKED, [], None),
    ],
)  # fmt: skip
def test_settings_that_a_model_does_not_allow_are_refused_before_it_is_built(tmp_path, base, facts, words, says):
    """The trainer refuses them in the same words, when the run has started."""
    write(tmp_path / "config.json", json.dumps(facts))
    read = load(TrainConfig, [base], [f"roles.a.model.path={tmp_path}", *words])
    if says is None:
        config_checks.check(read, 12)
        return
    with pytest.raises(ConfigError, match=says):
        config_checks.check(read, 12)


def test_a_junior_of_an_unknown_family_is_refused(tmp_path, base):
    write(tmp_path / "config.json", json.dumps({"model_type": "gpt2"}))
    read = load(TrainConfig, [base], [f"roles.a.tandem={{junior: {tmp_path}}}"])
    with pytest.raises(ConfigError, match="roles.a.tandem.junior: .* model_type 'gpt2' is not supported"):
        config_checks.check(read, 12)


def test_expert_parallelism_of_a_dense_model_is_refused(tmp_path, base):
    write(tmp_path / "config.json", json.dumps(DENSE))
    for layout in ("{ep: 2}", "{tp: 2, etp: 1}"):
        read = load(TrainConfig, [base], [f"roles.a.model.path={tmp_path}", f"roles.a.layout={layout}"])
        with pytest.raises(ConfigError, match=r"has no experts: set layout.ep = \d to 1 and layout.etp = \w+ to null"):
            config_checks.check(read, 12)
