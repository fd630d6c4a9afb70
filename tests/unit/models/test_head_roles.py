"""Roles with a head (critics, reward models): their settings, sizes, files and loss. tests/multi/test_layouts.py and
test_heads.py of that folder compare the model with transformers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_cases import case_of
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_scored

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.algorithms.value_loss import PolicyAndValueLoss, ValueLoss, loss_of
from megatron_rl.batches.packed_batch import Statistics, pack, statistics_needed, values_needed
from megatron_rl.config.files import load, tree_of
from megatron_rl.config.schema import ConfigError, Lora, LossConfig, Model, RoleConfig, TrainConfig
from megatron_rl.models.lora_targets import owners
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import plan as plans
from megatron_rl.spec.checks import role_problems
from megatron_rl.spec.resolve import engine_of, roles_of
from megatron_rl.types import Author, Rollout, spans_of
from megatron_rl.weights import counting, flops, hf_model
from megatron_rl.weights.parameter_mapping import hf_shapes

EXAMPLE = Path(__file__).parents[3] / "examples/published/tango_qwen2.5_7b.yaml"
PPO = EXAMPLE.parent / "methods/ppo.yaml"
PLAIN = ("roles.verifier.loss.kl_clamp=null", "roles.verifier.loss.entropy_coef=0.0")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["head=value", "policy=none"], "head = 'value' with policy = 'none': the trainer computes"),
        (["head=score", "tandem={}"], "head = 'score' with tandem: a model with a head generates no text"),
        (["head=value", "router_replay=true"], "head = 'value' with router_replay = true: an engine's choices"),
        (["head=value", "loss.kl_coef=0.1"], "head = 'value' with loss.kl_coef = 0.1: a value loss reads value_clip"),
        (["head=value", "loss.objective=gspo"], "with loss.objective = 'gspo': a value loss reads value_clip"),
        (["loss.value_clip=0.2"], "loss.value_clip = 0.2 without head: only a value loss reads it; leave it out"),
    ],
)
def test_settings_that_contradict_a_head_are_refused(changes, says):
    config = load(TrainConfig, [EXAMPLE], [*PLAIN, *(f"roles.verifier.{one}" for one in changes)])
    found = "\n".join(role_problems(config.roles["verifier"]))
    assert says in found and found.count("\n") == 0, found


SHARED = ("roles.verifier.head=value", "roles.verifier.same_as=generator", "roles.generator.loss.value_coef=0.5")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            SHARED[:2],
            r"same_as = 'generator': set roles.generator.loss.value_coef, the weight of the value loss in that",
        ),
        (
            (*SHARED[1:], "roles.verifier.head=score"),
            r"head = 'score' with same_as = 'generator': only a value head can",
        ),
        (
            SHARED[2:],
            r"roles.generator.loss.value_coef = 0.5, and no role with head = 'value' has same_as = 'generator'",
        ),
    ],
)
def test_a_head_on_another_policy_is_a_value_head_with_a_weight(changes, says):
    with pytest.raises(ConfigError, match=says):
        load(TrainConfig, [EXAMPLE], changes)


def test_a_critic_that_shares_a_policy_has_the_settings_of_that_policy():
    """`EXAMPLE` gives the verifier settings of its own, which do not hold for a critic that shares the policy."""
    changes = (*SHARED, "roles.verifier.sampling.max_tokens=7", "roles.generator.loss.value_clip=0.3")
    config = load(TrainConfig, [EXAMPLE], changes)
    roles = roles_of(config)
    critic, owner = roles["verifier"], roles["generator"]
    assert not [*role_problems(critic), *role_problems(owner)]
    assert critic.shares_as_critic and not owner.shares_as_critic and not critic.has_policy
    assert critic.sampling == owner.sampling and critic.loss == owner.loss and critic.owner == "generator"
    assert [*engine_of(config).roles] == ["generator"]
    assert isinstance(loss_of(owner), PolicyAndValueLoss) and type(loss_of(critic)) is ValueLoss
    assert load(TrainConfig, trees=[("the settings of a run", tree_of(config))]) == config


def test_a_plan_trains_a_shared_critic_with_its_policy():
    alone = plans.make(case_of(load(TrainConfig, [PPO], ["roles.critic.head=value"]), "4x8xA100-80"))
    settings = load(TrainConfig, [PPO], [one.replace("verifier", "critic") for one in SHARED])
    made = plans.make(case_of(settings, "4x8xA100-80"))
    assert [role.name for role in alone.roles] == ["generator", "critic"]
    assert [role.name for role in made.roles] == ["generator"]
    [own], [iteration] = alone.iterations, made.iterations
    assert (own.role, iteration.role) == ("generator + critic", "generator")
    assert (
        "score generator by critic" in iteration.phases
        and iteration.seconds < own.seconds
        and own.generated == iteration.generated
    )


def test_a_role_with_a_head_has_no_engine_and_no_correction():
    config = load(TrainConfig, [EXAMPLE], [*PLAIN, "roles.verifier.head=value", "rollouts.max_staleness=1"])
    roles = roles_of(config)
    assert [*engine_of(config).roles] == ["generator"]
    assert roles["verifier"].loss.correction is None and not [*role_problems(roles["verifier"])]
    assert isinstance(loss_of(roles["verifier"]), ValueLoss) and isinstance(loss_of(roles["generator"]), PolicyLoss)


def test_a_head_is_shared_with_no_other_role():
    plain = RoleConfig(model=Model(path="m"), lora=Lora())
    roles = {"a": replace(plain, head="value"), "b": plain, "c": replace(plain, head="value"), "d": plain}
    assert owners(roles) == {"a": "a", "b": "b", "c": "c", "d": "b"}
    apart = dict.fromkeys(roles, range(4)) | {"d": range(2)}
    assert owners(roles, apart)["d"] == "d", "other ranks have a base model of their own"


def test_a_head_takes_the_place_of_the_output_layer_in_counts(tmp_path):
    shape = read_shape(str(make_model(tmp_path / "tied", "qwen2", tie_word_embeddings=True)))
    scored = replace(shape, sizes=shape.sizes.with_head("value"))
    assert hf_shapes(scored.sizes) == hf_shapes(shape.sizes) | {"score.weight": (1, 64)}
    assert counting.total(scored) == counting.total(shape) + 64
    assert counting.active(scored) == counting.active(shape) - 96 * 64 + 64
    assert flops.of_token(scored) == replace(flops.of_token(shape), head=2.0 * 64)
    model = shape.sizes.with_head(None)
    assert model is shape.sizes


def test_a_plan_counts_no_vocabulary_engine_or_reference_of_a_head():
    plain = plans.make(case_of(load(TrainConfig, [EXAMPLE], PLAIN), "4x8xA100-80"))
    made = plans.make(case_of(load(TrainConfig, [EXAMPLE], [*PLAIN, "roles.verifier.head=value"]), "4x8xA100-80"))
    assert [server.role for server in made.servers] == ["generator"] != [server.role for server in plain.servers]
    role, other = made.roles[1].training, plain.roles[1].training
    assert role.swapped == 0 < other.swapped and role.workspace < other.workspace and role.weights < other.weights
    [own] = [iteration for iteration in made.iterations if iteration.role == "verifier"]
    [was] = [iteration for iteration in plain.iterations if iteration.role == "verifier"]
    assert not {"rollout verifier", "reference log-probs"} & own.phases.keys()
    assert own.sent == 0 < was.sent and own.flops < was.flops and own.generated < was.generated


def test_a_bias_of_a_head_is_refused_and_a_bias_of_0_is_not(tmp_path):
    directory = make_scored(make_model(tmp_path / "model", "qwen2"))
    file, sizes = directory / "model.safetensors", hf_model.read_architecture(directory, "value")
    tensors = load_file(file)
    save_file(tensors | {"score.bias": torch.zeros(1)}, file)
    hf_model.check(directory, sizes)
    save_file(tensors | {"score.bias": torch.full((1,), 0.5)}, file)
    with pytest.raises(ConfigError, match=re.escape("score.bias is [0.5], and heads here have no bias: set it to 0")):
        hf_model.check(directory, sizes)
    save_file(tensors | {"score.weight": torch.zeros(3, 64)}, file)
    with pytest.raises(ConfigError, match=re.escape("score.weight is [3, 64], but config.json requires [1, 64]")):
        hf_model.check(directory, sizes)


def test_a_language_model_is_not_read_from_a_classifier(tmp_path):
    directory = make_scored(make_model(tmp_path / "model", "qwen2"))
    with pytest.raises(ConfigError, match="holds score.weight, the head of a reward model or a critic, and no text"):
        hf_model.check(directory, hf_model.read_architecture(directory))


def rollout(tokens: int, prompt: int, **values) -> Rollout:
    spans = spans_of((prompt, Author.ENVIRONMENT, -1), (tokens - prompt, Author.POLICY, 0))
    return Rollout(
        role="critic", group="0", tokens=np.arange(tokens), logprobs=np.zeros(tokens), spans=spans, advantages=0.0,
        values={name: np.array(own, np.float32) for name, own in values.items()},
    )  # fmt: skip


def test_value_loss_by_hand():
    """Tokens 2 to 5 are trained: not clipped; clipped, where the clip makes the loss larger; clipped, where it would
    make the loss smaller; and a value that is not finite stands at the prompt."""
    old, returns = [np.nan, np.nan, 1.0, 1.0, 1.0, 0.0], [np.nan, np.nan, 2.0, 3.0, 0.0, 0.0]
    batch = pack([rollout(6, 2, old_value=old, returns=returns)])
    value = torch.tensor([np.nan, 1.25, 2.0, 2.0, 0.25, np.nan], requires_grad=True)
    loss = ValueLoss(LossConfig(value_clip=0.5))
    total, sums = loss(Statistics(value=value), batch)
    total.backward()
    # (1.25 - 2)^2, (1.5 - 3)^2 for (2 - 3)^2, (2 - 0)^2 for (1.5 - 0)^2, 0.25^2
    assert total.item() == 0.5 * (0.5625 + 2.25 + 4.0 + 0.0625)
    assert value.grad.tolist() == [0.0, -0.75, 0.0, 2.0, 0.25, 0.0]
    wanted = {"value": 5.5, "returns": 5.0, "value_error": 5.625, "returns_square": 13.0, "value_clip_frac": 1.0}
    assert {name: float(found) for name, found in sums.items()} == wanted
    unclipped = float(ValueLoss(LossConfig(value_clip=None))(Statistics(value=value.detach()), batch)[0])
    assert unclipped == 0.5 * 5.625


def test_the_loss_of_a_shared_policy_is_the_sum_of_both():
    """A batch in which the critic's values are in the same rollouts as the advantages."""
    old, returns = [np.nan, np.nan, 1.0, 1.0, 1.0, 0.0], [np.nan, np.nan, 2.0, 3.0, 0.0, 0.0]
    batch = pack([replace(rollout(6, 2, old_value=old, returns=returns), advantages=0.5)])
    settings = LossConfig(value_coef=0.25, value_clip=0.5, kl_coef=0.0, entropy_coef=0.1)
    draw = torch.Generator().manual_seed(1)
    logprobs, entropy, value = (torch.randn(6, generator=draw, requires_grad=True) for _ in range(3))
    live = Statistics(logprobs, entropy, value=value)
    both, policy, values = PolicyAndValueLoss(settings), PolicyLoss(settings), ValueLoss(settings)
    total, sums = both(live, batch)
    first, second = policy(live, batch), values(live, batch)
    assert torch.equal(total, first[0] + 0.25 * second[0]) and sums == first[1] | second[1]
    found = torch.autograd.grad(total, [logprobs, entropy, value])
    wanted = torch.autograd.grad(first[0] + 0.25 * second[0], [logprobs, entropy, value])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(found, wanted, strict=True))
    counts, groups = np.array([4.0, 1.0]), np.array([0, 1])
    assert both.aggregate(counts, groups)[1] == policy.aggregate(counts, groups)[1]
    assert "advantages" in both.needs and {"old_value", "returns"} == {*values_needed(both.needs)}
    assert statistics_needed(both.needs) == ("value", "logprobs", "entropy")


def test_a_value_loss_asks_for_values_alone():
    assert statistics_needed(ValueLoss.needs) == ("value",)
    assert values_needed(ValueLoss.needs) == ("old_value", "returns")
    assert statistics_needed(frozenset({"entropy"})) == ("logprobs", "entropy")
