"""Stages of a run: the settings that they may change, and the specification of each iteration."""

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config import files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.session import builders
from megatron_rl.spec.resolve import resolve
from megatron_rl.spec.stages import CHANGING, FIXED

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


CORRECTION = {"kind": "mask", "level": "token", "low": 0.5, "high": 3.0}
# another value of each setting that a stage may change, but those of recipes (test_faults_settings.py)
OTHERS: dict[str, Any] = {
    **{f"data.sources.{name}.weight": 3.0 for name in ("math", "a.b")},
    **{
        f"roles.generator.loss.{name}": value
        for name, value in {
            "objective_args": {"dual_clip": 3.0}, "clip_low": 0.1, "clip_high": 0.3, "kl_coef": 0.1, "kl": "k2",
            "kl_clamp": 5.0, "kl_bias_correction": True, "entropy_coef": 0.1, "aggregation": "constant",
            "max_tokens": 7, "correction": CORRECTION, "off_policy_mask": 0.5,
        }.items()
    },
    **{
        f"roles.generator.sampling.{name}": value
        for name, value in {
            "max_tokens": 64, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_strings": ("x",)
        }.items()
    },
    **{
        f"roles.generator.optimizer.{name}": value
        for name, value in {
            "lr": 1e-3, "min_lr": 1e-7, "betas": (0.5, 0.6), "eps": 1e-4, "weight_decay": 0.3, "clip_grad": 0.5
        }.items()
    },
    "roles.generator.max_prompt_tokens": 64, "roles.generator.samples_per_optimizer_step": 10,
    "run.prompts_per_iteration": 3,
}  # fmt: skip

VALUE_CLIP = "roles.generator.loss.value_clip"  # of a role with a head


def test_faults_the_clip_of_a_critic_is_that_of_the_stage():
    ppo = {"target": "megatron_rl.recipes.ppo:Ppo", "args": {"updates": 10}}
    roles = BASE["roles"] | {"critic": {"model": {"path": "org/model"}, "head": "value"}}
    stages = [{"until": 3, "overrides": {"roles.critic.loss.value_clip": 0.1}}]
    made = BASE | {"recipe": ppo, "roles": roles, "stages": stages}
    spec = resolve(files.load(TrainConfig, trees=[("run.yaml", made)]), 1)
    assert [loss_of(spec.at(number).roles["critic"]).config.value_clip for number in (0, 3)] == [0.1, 0.5]


def leaves(tree: Any, name: str = "") -> Iterator[str]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name


def test_faults_the_table_has_every_setting_that_a_stage_may_change():
    every = set(leaves(files.tree_of(files.load(TrainConfig, trees=[("run.yaml", BASE)]))))
    matches = lambda name, patterns: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)  # noqa: E731
    changing = {name for name in every if matches(name, CHANGING) and not matches(name, FIXED)}
    assert {name for name in changing if not name.startswith("recipe.")} == {*OTHERS, VALUE_CLIP}


@pytest.mark.parametrize("name", OTHERS)
def test_faults_every_setting_of_a_stage_reaches_what_runs(name):
    """The optimizer's settings are followed further by test_actor.py."""
    tree: Any = OTHERS[name]
    *path, last = name.replace("a.b", "a/b").split(".")
    for part in reversed([*path, last]):
        tree = {part.replace("a/b", "a.b"): tree}
    spec = resolved((3, tree))
    before, own = spec.at(3), spec.at(0)
    made = builders.trainee(own.roles["generator"], own.run, None)
    context = builders.context(
        own.roles, own.reward, own.loop.rollouts, {}, {"generator": None}, None, Stopwatch(), seed=own.run.seed
    )
    match path:
        case ["data", *_, source]:
            assert (before.data.weights[source.replace("a/b", "a.b")], spec.at(0).data.weights) != (3.0, None)
            found = own.data.weights[source.replace("a/b", "a.b")]
        case [*_, "loss"]:
            found = getattr(made.loss.config, last)
            found = {k: getattr(found, k) for k in CORRECTION} if last == "correction" else found
        case [*_, "sampling"]:
            found = getattr(context.samplings["generator"], last)
        case [*_, "optimizer"]:
            found = getattr(own.roles["generator"].optimizer, last)
        case ["run"]:
            found = own.run.prompts_per_iteration
        case _ if last == "max_prompt_tokens":
            found = context.max_prompt_tokens["generator"]
        case _:
            found = made.samples_per_optimizer_step
    assert found == OTHERS[name]
