"""What `check` says about servers in the trainer's GPUs, and how they are started."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from specs import check
from specs import problems as problems_of

from megatron_rl.config import files
from megatron_rl.config.schema import (
    ConfigError,
    EvalConfig,
    GenerateConfig,
    Lora,
    Model,
    PromptSet,
    RefitConfig,
    RoleConfig,
    Rollouts,
    TrainConfig,
    Use,
)
from megatron_rl.engines.kind import ServerStart
from megatron_rl.engines.sglang import kind as sglang
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.engines.vllm import kind as vllm
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.session.server_connection import check_gpus
from megatron_rl.spec.resolve import engine_of

G, V = "generator", "verifier"


def settings(**engine):
    roles = {name: RoleConfig(model=Model(path="Qwen/Qwen2.5-7B", dtype="bfloat16")) for name in (G, V)}
    recipe, data = Use(target="megatron_rl.recipes.tango:Tango"), PromptSet(path="data.jsonl")
    return TrainConfig(roles=roles, recipe=recipe, data=data, engine=Vllm(colocate=True, **engine))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollouts": Rollouts(max_staleness=1)}, "no iteration can be written beside training"),
        ({"refit": RefitConfig(delta=True)}, "refit.delta = true"),
        ({"refit": RefitConfig(staging="host")}, "refit.staging = 'host'"),
    ],
)
def test_check_says_what_goes_against_servers_in_the_trainers_gpus(change, words):
    config = settings(memory_share=0.4)
    assert not [p for p in problems_of(config, 8, to_come=True) if "engine.colocate = true" in p]
    [problem] = [p for p in problems_of(replace(config, **change), 8, to_come=True) if "engine.colocate = true" in p]
    assert words in problem


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"start": False}, "each of the trainer's nodes starts"),
        ({"gpus": (0, 1)}, "leave engine.gpus out"),
        ({"replicas": 8, "tp": 2}, "at most one server in a GPU"),
        ({"memory_share": 0.6}, "would take 1.2 of it; lower it to 0.45"),
    ],
)
def test_check_refuses_places_that_overlap_otherwise(engine, words):
    config = settings(**{"memory_share": 0.4} | engine)
    [problem] = [p for p in problems_of(config, 8, to_come=True) if "engine.colocate = true" in p]
    assert words in problem


def test_adapters_and_servers_in_the_trainers_gpus_do_not_go_together():
    config = settings(memory_share=0.4)
    roles = {**config.roles, V: replace(config.roles[V], lora=Lora(rank=4))}
    [problem] = [p for p in problems_of(replace(config, roles=roles), 8, to_come=True) if "engine.colocate = true" in p]
    assert "roles.verifier.lora" in problem


@pytest.mark.parametrize(
    ("schema", "more"), [(EvalConfig, ["sets=[{path: d}]"]), (GenerateConfig, ["data.path=d", "output=x"])]
)
def test_servers_beside_a_trainer_are_refused_where_nothing_trains(schema, more):
    config = files.load(schema, [], ["model.path=m", "engine.kind=vllm", *more])
    check(config, 1, to_come=True)
    with pytest.raises(ConfigError, match="engine.colocate = true where nothing trains"):
        check(replace(config, engine=Vllm(colocate=True)), 1, to_come=True)


def test_the_servers_are_started_with_their_sleep_mode(tmp_path):
    start = partial(
        ServerStart, python="python", model=tmp_path, dtype="bfloat16", port=1, token_file=tmp_path / "token"
    )
    assert "--enable-sleep-mode" in vllm.command(Vllm(colocate=True), start(on_gpu=True)).words
    assert "--enable-sleep-mode" not in vllm.command(Vllm(), start(on_gpu=True)).words
    words = sglang.command(Sglang(colocate=True), start(on_gpu=True)).words
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= {*words}
    for module, own in ((vllm, Vllm(colocate=True)), (sglang, Sglang(colocate=True))):
        with pytest.raises(ConfigError, match="engine.colocate without a GPU"):
            module.command(own, start(on_gpu=False))
    with pytest.raises(ConfigError, match="sleep mode of vllm"):
        check_gpus(engine_of(settings()), {"CUDA_VISIBLE_DEVICES": ""})
