"""Settings of 8-bit rollouts: what check refuses, what becomes of defaults, command lines of servers, and plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from tiny_models import make_model

from megatron_rl.config.engines import Quantization
from megatron_rl.config.files import load
from megatron_rl.config.model import CORRECTION_AHEAD
from megatron_rl.config.schema import ConfigError, EvalConfig, TrainConfig
from megatron_rl.engines.kind import ServerStart, kind_of
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.main import main
from megatron_rl.models.registry import known_sizes
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import compute
from megatron_rl.planning.compute import EngineSetup
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.memory import Actor, Precision
from megatron_rl.spec.resolve import LOW_PRECISION_GAP, resolve, specify
from megatron_rl.weights import counting
from megatron_rl.weights.counting import Parallel
from megatron_rl.weights.quantisation import FORMATS

EXAMPLE = Path(__file__).parents[3] / "examples/published/grpo_fp8_qwen3_30b_a3b.yaml"
NO_CORRECTION = ["roles.generator.loss.correction.kind=none", "roles.generator.loss.correction.high=null"]
ONLINE_DPO = ["recipe.target=megatron_rl.recipes.online_dpo:OnlineDpo", "roles.generator.loss.objective=dpo"]


def checked(capsys, *words: str) -> str:
    """Returns what `check` says about the example with changes; empty if it accepts them."""
    status = main(["check", str(EXAMPLE), "--ranks", "16", "--elsewhere", *words])
    said = capsys.readouterr().err
    assert status in (0, 2)
    return said if status else ""


def test_formats_of_the_setting_are_those_of_the_table_fp8():
    assert set(get_args(Quantization)) == set(FORMATS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([], ""),
        (NO_CORRECTION, "generator.loss.correction.kind = 'none' with engine.quantization"),
        ([*NO_CORRECTION, "engine.quantization=null"], "generator.loss.correction.kind = 'none' with"),
        ([*NO_CORRECTION, "engine.quantization=null", "engine.kv_cache_dtype=auto"], ""),
        ([*NO_CORRECTION, *ONLINE_DPO], ""),  # a loss of pairs, which has no importance weights
        ([*NO_CORRECTION, "roles.generator.loss.objective=nll"], "generator.loss.correction.kind = 'none' with"),
        (["engine.quantization=nvfp4"], "engine.quantization = 'nvfp4': servers need a second scale"),
        (["engine.kv_cache_dtype=fp8_e5m2"], "engine.kv_cache_dtype = 'fp8_e5m2' with engine.quantization = 'fp8'"),
        (
            ["roles.generator.tandem={junior: org/m}"],
            "generator.tandem with engine.quantization: such servers hold one",
        ),
        (["engine.adapters=served"], "engine.quantization = 'fp8' with engine.adapters = 'served'"),
    ],
)
def test_check_says_what_8_bit_rollouts_need_fp8(capsys, change, says):
    found = checked(capsys, *change)
    assert (says in found) if says else not found


@pytest.mark.parametrize("published", [False, True])
def test_blocks_and_files_are_checked_against_the_layout_fp8(tmp_path, capsys, published):
    model = make_model(
        tmp_path / "m", "qwen3", hidden_size=256, intermediate_size=256, head_dim=64, num_key_value_heads=4
    )  # 256 / 4: 64 rows
    words = [
        f"roles.generator.model.path={model}",
        "roles.generator.layout={tp: 4, ep: 1, etp: null}",
        "engine.tp=1",
        "engine.replicas=16",
    ]
    if published:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
        said = checked(capsys, *words, "engine.quantization=null")
        assert "has quantised weights, and engine.quantization = null" in said
    else:
        said = checked(capsys, *words)
        assert "engine.quantization = 'fp8' with layout.tp = 4" in said and "divide blocks of 128 rows" in said
        assert not checked(capsys, *words, "engine.quantization=mxfp8")


def test_nothing_that_does_not_train_is_quantised_fp8():
    words = ["model.path=org/m", "sets=[{path: org/d}]", "engine.quantization=fp8"]
    with pytest.raises(ConfigError, match="engine.quantization = 'fp8' where nothing trains: weight syncs quantise"):
        resolve(load(EvalConfig, [], words), 1)


@pytest.mark.parametrize(
    ("words", "corrected", "limit"),
    [
        (["engine.quantization=null", "engine.kv_cache_dtype=auto"], None, 0.05),
        ([], CORRECTION_AHEAD, LOW_PRECISION_GAP),
        (["engine.quantization=null"], CORRECTION_AHEAD, LOW_PRECISION_GAP),
        (["preflight.max_logprob_gap=0.01"], CORRECTION_AHEAD, 0.01),
    ],
)
def test_defaults_of_correction_and_preflight_follow_the_engines_precision_fp8(words, corrected, limit):
    config = load(TrainConfig, [EXAMPLE], ["roles.generator.loss.correction=null", "rollouts.max_staleness=0", *words])
    spec, _ = specify(config, 16)
    assert spec.roles["generator"].loss.correction == corrected and spec.loop.preflight.gap_limit == limit


def command(settings, path, *, on_gpu=True, quantization="fp8"):
    start = ServerStart(
        python="python", model=path, dtype="bfloat16", port=9, token_file=path / "token", on_gpu=on_gpu,
        quantization=quantization,
    )  # fmt: skip
    return kind_of(settings).command(settings, start).words


@pytest.mark.parametrize(("kind", "option"), [(Vllm, "--hf-overrides"), (Sglang, "--json-model-override-args")])
def test_servers_are_told_the_format_and_start_without_weights_fp8(tmp_path, kind, option):
    path = make_model(tmp_path / "m", "qwen3_moe")
    found = command(kind(kv_cache_dtype="fp8_e4m3"), path)
    assert found[found.index("--load-format") + 1] == "dummy"
    assert found[found.index("--kv-cache-dtype") + 1] == "fp8_e4m3"
    assert json.loads(found[found.index(option) + 1]) == {
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "ignored_layers": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(2))],
        }
    }  # fmt: skip
    plain = command(kind(), path, quantization=None)
    assert not {option, "--load-format", "--kv-cache-dtype", "--quantization"} & set(plain)
    for settings, quantization in ((kind(), "fp8"), (kind(kv_cache_dtype="fp8_e5m2"), None)):
        with pytest.raises(ConfigError, match="without a GPU"):
            command(settings, path, on_gpu=False, quantization=quantization)


def test_plans_count_the_bytes_of_quantised_weights_fp8():
    shape, form = read_shape("qwen3-30b-a3b"), FORMATS["fp8"]
    sizes, whole = known_sizes("qwen3-30b-a3b"), 2.0 * counting.total(shape)
    linear = counting.total(shape) - 2 * sizes.vocab * sizes.hidden
    found = counting.engine_bytes(shape, 2, form)
    assert counting.engine_bytes(shape, 2, None) == whole
    assert found == pytest.approx(whole - linear * (1 - 4 / 128**2), rel=1e-3)  # one byte and a share of a scale
    published = 31.2e9  # bytes of the files of Qwen3-30B-A3B-FP8
    assert found == pytest.approx(published, rel=0.02)
    setup = EngineSetup(replicas=8, tp=2, max_batch=256, kv_bytes=2e10)
    eight = replace(setup, format=form, cache_width=1)
    cluster, actor = parse_cluster("4x8xH100"), Actor(shape, Parallel(world=16, tp=2, ep=8), Precision.gpu("bfloat16"))
    both = [compute.refit_cost(actor, one, cluster, place="elsewhere") for one in (setup, eight)]
    assert both[1].sent / both[0].sent == pytest.approx(found / whole)
    slow, fast = (
        compute.decode_step_seconds(shape, one, cluster, rows=64, context=2000, width=2) for one in (setup, eight)
    )
    assert 0.5 < fast / slow < 0.8
