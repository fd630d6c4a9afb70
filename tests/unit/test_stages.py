"""Stages of a run: the settings that they may change, and the specification of each iteration."""

import pytest

from megatron_rl.config import files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig
from megatron_rl.spec.resolve import resolve

BASE = {
    "roles": {"generator": {"model": {"path": "org/model"}, "loss": {"kl_coef": 0.0}}},
    "recipe": {"target": "megatron_rl.recipes.dapo:Dapo", "args": {"updates": 10}},
    "data": {"sources": {"math": {"path": "m"}, "a.b": {"path": "c", "weight": 0}}},
}


def resolved(*stages):
    made = [{"until": until, "overrides": overrides} for until, overrides in stages]
    return resolve(files.load(TrainConfig, trees=[("run.yaml", BASE | {"stages": made})]), 1)


def test_an_iteration_has_the_settings_of_its_stage_over_those_of_the_run():
    first = {"roles.generator.sampling.max_tokens": 512, "recipe.args.group_size": 16}
    second = {"data": {"sources": {"a.b": {"weight": 2}}}, "roles.generator.loss": {"kl_coef": 0.1, "clip_high": 0.3}}
    spec = resolved((3, first), (5, second))
    own = [spec.at(number) for number in range(10)]
    assert [one.roles["generator"].sampling.max_tokens for one in own] == [512] * 3 + [2048] * 7
    assert [one.roles["generator"].loss.max_tokens for one in own] == [512] * 3 + [2048] * 7, "what follows from it"
    assert [one.recipe.group_size for one in own] == [16] * 3 + [5] * 7
    assert [one.data.weights["a.b"] for one in own] == [0] * 3 + [2] * 2 + [0] * 5
    assert [one.roles["generator"].loss.clip_high for one in own] == [0.2] * 3 + [0.3] * 2 + [0.2] * 5
    assert own[5:] == [spec] * 5 and spec.roles["generator"].reference, "its KL term needs one from the beginning"
    assert not resolved((3, first)).roles["generator"].reference


@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"roles.generator.layout.tp": 2}, "roles.generator.layout.tp cannot change during a run; a stage may change"),
        ({"engine.kind": "vllm"}, r"engine.kind, .* and \d+ more cannot change"),
        ({"roles.generator.model.path": "org/other"}, "roles.generator.model.path cannot change"),
        ({"roles.generator.loss.objective": "gspo"}, "roles.generator.loss.objective cannot change"),
        ({"data.sources.math.path": "other"}, "data.sources.math.path cannot change"),
        ({"recipe.args.template": "plain"}, "recipe.args.template cannot change"),
        ({"recipe.args.updates": 4}, "recipe.args: the recipe then has other roles, scores or iterations"),
        ({"recipe.args.group_size": 1}, "recipe.args.group_size = 1: give at least 2"),
        (
            {"roles.generator.sampling.max_tokens": 4096},
            "max_tokens = 4096 is above 2048, for which memory and engines",
        ),
        ({"roles.generator.sampling.temperature": 0}, "sampling.temperature = 0: all 5 samples .* are the same text"),
        ({"roles.generator.sampling.max_token": 4}, "max_token: unknown key; did you mean 'max_tokens'"),
        ({"roles.generator.optimizer.lr": "high"}, 'optimizer.lr = "high": give a number'),
        ({"data.sources.math.weight": 0}, "no source has a weight above 0"),
    ],
)
def test_check_refuses_a_stage_whose_settings_are_invalid_or_cannot_change(overrides, said):
    with pytest.raises(ConfigError, match=rf"stages\[1\]: .*{said}"):
        resolved((3, {"recipe.args.group_size": 8}), (5, overrides))


def test_stages_follow_each_other():
    with pytest.raises(ConfigError, match=r"stages\[1\].until = 3: the stage before it ends at 3"):
        resolved((3, {"recipe.args.group_size": 8}), (3, {"recipe.args.group_size": 4}))


def test_resets_of_the_reference_need_one_and_its_checkpoint():
    def run(every, save_every, **loss):
        role = BASE["roles"]["generator"] | {"loss": {"kl_coef": 0.1, "reset_reference_every": every, **loss}}
        made = {"roles": {"generator": role}, "run": {"save_every": save_every}}
        return resolve(files.load(TrainConfig, trees=[("run.yaml", BASE | made)]), 1)

    assert run(6, 3).reference_resets == {"generator": 6}
    for save_every in (0, 4):
        with pytest.raises(ConfigError, match=f"= 6: a resumed .* give a multiple of run.save_every = {save_every}"):
            run(6, save_every)
    with pytest.raises(ConfigError, match="nothing reads a reference; set kl_coef above 0"):
        run(6, 3, kl_coef=0.0)


def test_a_stage_without_a_kl_term_may_interrupt_resets_of_the_reference():
    role = BASE["roles"]["generator"] | {"loss": {"kl_coef": 0.1, "reset_reference_every": 6}}
    stages = [{"until": 5, "overrides": {"roles.generator.loss.kl_coef": 0}}]
    made = {"roles": {"generator": role}, "run": {"save_every": 3}, "stages": stages}
    spec = resolve(files.load(TrainConfig, trees=[("run.yaml", BASE | made)]), 1)
    assert spec.reference_resets == {"generator": 6}


def test_a_stage_that_never_begins_is_refused():
    own = {"recipe.args.group_size": 8}
    assert resolved((4, own), (99, own)).at(9).recipe.group_size == 8
    with pytest.raises(ConfigError, match=r"stages\[1\]: the stage begins after 10 iterations, and the run has 10"):
        resolved((10, own), (20, own))


def test_each_stage_has_a_longest_prompt():
    spec = resolved((3, {"roles.generator.max_prompt_tokens": 64}))
    name = "roles.generator.max_prompt_tokens"
    assert spec.prompt_limits("generator") == {name: 2048, f"stages[0].{name}": 64}


def test_data_that_no_source_reads_is_refused():
    data = {"path": "all", "sources": {"math": {"path": "m"}, "code": {"path": "c"}}}
    with pytest.raises(ConfigError, match="data.path = 'all': every source has a path of its own; leave data.path out"):
        files.load(TrainConfig, trees=[("run.yaml", BASE | {"data": data})])
    data["sources"]["code"].pop("path")
    again = files.tree_of(files.load(TrainConfig, trees=[("run.yaml", BASE | {"data": data})]))
    assert files.tree_of(files.load(TrainConfig, trees=[("again", again)])) == again
