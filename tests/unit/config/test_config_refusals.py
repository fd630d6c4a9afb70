"""Settings that exclude each other are refused before a run, with the names and the cure."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import specs as config_checks

from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, Model, RoleConfig, SamplingConfig, TandemConfig, TrainConfig, Use
from megatron_rl.recipes.tango import Tango
from megatron_rl.spec.checks import role_problems

EXAMPLE = Path(__file__).parents[3] / "examples/published/tango_qwen2.5_7b.yaml"
ENDPOINT = "endpoint={url: http://x, model: m}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["verifier.policy=none"], "roles.verifier.policy = 'none', and recipe r trains that role: set policy to own"),
        (
            ["verifier.head=value", "verifier.loss.kl_clamp=null", "verifier.loss.entropy_coef=0"],
            'roles.verifier.head = "value": recipe r needs null there',
        ),
        (
            [f"verifier.{ENDPOINT}"],
            "roles.verifier.endpoint with policy = 'own': an endpoint keeps its weights",
        ),
        ([f"verifier.{ENDPOINT}", "verifier.policy=none", "verifier.tandem={}"], "an endpoint serves one model"),
        (
            ["verifier.lora={}", "verifier.policy=none"],
            "roles.verifier.lora with policy = 'none': nothing is trained; leave lora",
        ),
        (["verifier.tandem={strategy: chunk, chunk_size: 9}", "verifier.sampling.max_tokens=9"], "chunk_size = 9: the"),
        (
            ["verifier.tandem={strategy: chunk, boundary_ids: ids.json}"],
            "roles.verifier.tandem: boundary_ids = 'ids.json' with strategy = 'chunk': word and sentence alone read it",
        ),
        (["verifier.tandem={boundary_ids: README.md}"], "roles.verifier.tandem.boundary_ids = README.md is no JSON"),
        (["verifier.model.path=''"], "roles.verifier.model.path is empty: give a model directory or a hub name"),
        (["verifier.router_replay=true", "verifier.tandem={}"], "vLLM has no model runner that does both"),
        (["roles={}"], "roles is empty: name at least one role"),
    ],
)
def test_roles_that_cannot_be_are_refused(changes, says):
    words = [f"roles.{change}" for change in changes if change != "roles={}"]
    with pytest.raises(ConfigError, match=re.escape(says)):
        config = replace(load(TrainConfig, [EXAMPLE], words), recipe=Use(target="r"))
        config = replace(config, roles={}) if "roles={}" in changes else config
        config_checks.check(config, 32)
        config_checks.check_recipe(config, Tango())


def test_the_longest_chunk_that_leaves_the_junior_a_token_is_allowed():
    pair, sampling = TandemConfig(strategy="chunk", chunk_size=8), SamplingConfig(max_tokens=9)
    role = RoleConfig(model=Model(path="m"), tandem=pair, sampling=sampling)
    assert not [*role_problems(role)]
