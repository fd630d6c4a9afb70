"""Recipes with critics: which roles an iteration trains, what it asks of the trainer, and what its credit gives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chats import THINKING, chat_tokenizer
from test_recipes import Problems
from test_recipes_tango_agents import WRITES, by_thought, context_of, problems, thinks, writer

from megatron_rl.algorithms.gae import Gae, assign_gae, mix_steps
from megatron_rl.config.base import Use
from megatron_rl.config.files import load
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.recipes.ppo import Ppo
from megatron_rl.recipes.tango import Tango
from megatron_rl.spec.checks import recipe_problems
from megatron_rl.spec.resolve import specify
from megatron_rl.training.credit import CreditStage, RolloutError, with_values
from megatron_rl.training.iteration import Collected, CreditContext, Iteration, Score
from megatron_rl.types import STEP, Annotations, Author, Rollout, spans_of

EXAMPLES = Path(__file__).parents[3] / "examples/published"
RECIPES = "megatron_rl.recipes"


def made(recipe, estimator="gae", **args):
    return build(Use(target=f"{RECIPES}.{recipe}", args={"estimator": estimator, **args}))


def ppo(**gae):
    return made("ppo:Ppo", {"target": "gae", "args": gae}, updates=4)


def rollouts_of(role, outcomes, **more):
    """A prompt token and three of the policy's, with scores of the trainer."""
    draw = np.random.default_rng(len(outcomes))
    return [
        Rollout(
            role=role, group="0", tokens=np.zeros(4), logprobs=np.zeros(4), rewards={"outcome": r, "verifier": r},
            spans=spans_of((1, Author.ENVIRONMENT, -1), (3, Author.POLICY, 0)),
            values={n: draw.normal(size=4).astype(np.float32) for n in ("value", "logprobs", "reference_logprobs")},
            **more,
        )
        for r in outcomes
    ]  # fmt: skip


def iteration(*roles, updates=9):
    return Iteration(cycle=0, index=0, roles=roles, number=updates, updates=dict.fromkeys(roles, updates))


def test_a_critic_is_trained_with_its_role():
    recipe = ppo()
    assert recipe.schedule() == [[("generator", "critic")]] * 4
    assert {name: part.head for name, part in recipe.roles().items()} == {"generator": None, "critic": "value"}
    assert recipe.scores(iteration("generator", "critic")) == [Score(role="generator", name="value", by="critic")]
    context = CreditContext()
    credited = recipe.credit(
        iteration("generator", "critic"), {"generator": rollouts_of("generator", [0.0, 1.0])}, context
    )
    assert list(credited) == ["generator", "critic"] and all(len(own) == 2 for own in credited.values())
    for own, read in zip(credited["generator"], credited["critic"], strict=True):
        assert (own.role, read.role, read.values.keys()) == ("generator", "critic", {"old_value", "returns"})
        assert own.advantages[0] == read.values["returns"][0] == read.values["old_value"][0] == 0
        np.testing.assert_array_equal(own.tokens, read.tokens)
    assert context.metrics["critic"]["explained_variance"] < 1 and "generator" not in context.metrics


def test_a_role_waits_while_its_critic_warms_up():
    recipe, rollouts = ppo(critic_warmup=2), rollouts_of("generator", [0.0, 1.0])
    sizes = []
    for done in range(4):
        own = recipe.credit(iteration("generator", "critic", updates=done), {"generator": rollouts}, CreditContext())
        sizes.append((len(own["generator"]), len(own["critic"])))
    assert sizes == [(0, 2), (0, 2), (2, 2), (2, 2)]


def test_the_kl_coefficient_is_a_state_that_the_credit_changes():
    recipe = ppo(kl_coef=0.5, kl_target=0.01, kl_horizon=4)
    assert [score.name for score in recipe.scores(iteration("generator", "critic"))] == [
        *("value", "logprobs", "reference_logprobs")
    ]
    assert recipe.roles()["generator"].reference and not recipe.roles()["critic"].reference
    context = CreditContext()
    recipe.credit(iteration("generator", "critic"), {"generator": rollouts_of("generator", [0.0, 1.0])}, context)
    found = context.metrics["generator"]
    error = np.clip(found["kl_in_reward"] / 0.01 - 1, -0.2, 0.2)
    assert found["kl_coef"] == 0.5 and recipe.state_dict() == {"kl_factors": {"generator": 1 + error * 2 / 4}}
    other = ppo(kl_coef=0.5)
    other.load_state_dict(recipe.state_dict())
    assert other.state_dict() == recipe.state_dict() != ppo(kl_coef=0.5).state_dict()


def tango(**args) -> Tango:
    return made("tango:Tango", generator_updates=4, warmup_updates=1, **args)


def test_tango_has_a_critic_for_each_trained_role_and_mixes_as_the_paper():
    recipe = tango(alpha_start=0.25, alpha_min=0.25)
    pairs = {name: (name, f"{name}_critic") for name in ("generator", "verifier")}
    assert recipe.schedule()[0] == [pairs["verifier"]] and recipe.schedule()[1][0] == pairs["generator"]
    steps = {STEP: Annotations(np.array([[1, 2], [2, 4]]), np.array([0.5, -0.5]))}
    rollouts = rollouts_of("generator", [0.0, 1.0], annotations=steps)
    credited = recipe.credit(
        iteration(*pairs["generator"]), {"generator": rollouts}, CreditContext(handed_over={"reviewed": None})
    )
    bare = assign_gae(rollouts, Gae(), reward="outcome").policy
    for own, wanted, outcome in zip(credited["generator"], mix_steps(bare, alpha=0.25), bare, strict=True):
        np.testing.assert_array_equal(own.advantages, wanted.advantages)
        assert not np.allclose(own.advantages, outcome.advantages)
    alone = tango(train_verifier=False)
    assert "verifier_critic" not in alone.roles() and "generator_critic" in alone.roles()


def test_class_weights_of_the_verifier_leave_its_critic_alone():
    labels, rollouts = [True, False, False, False], rollouts_of("verifier", [1.0, 0.0, 1.8, 0.8])
    one = tango()
    context = CreditContext(handed_over={"labels": labels})
    credited = one.credit(iteration("verifier", "verifier_critic"), {"verifier": rollouts}, context)
    bare = assign_gae(rollouts, Gae(), reward="verifier")
    ratios = [
        np.abs(r.advantages).max() / np.abs(b.advantages).max()
        for r, b in zip(credited["verifier"], bare.policy, strict=True)
    ]
    assert ratios[0] > 1.2 > 1 > ratios[1] and ratios[1:] == pytest.approx([ratios[1]] * 3)
    for own, wanted in zip(credited["verifier_critic"], bare.critic, strict=True):
        np.testing.assert_array_equal(own.values["returns"], wanted.values["returns"])
    rests = one.credit(iteration("verifier", "verifier_critic"), {"verifier": []}, CreditContext())
    assert rests == {"verifier": [], "verifier_critic": []}


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_critic_credits_a_transcript_that_was_cut_as_a_whole(tmp_path, warmup):
    """Its returns go over the cut to the outcome; each part has its own tokens' advantages, and so has the critic."""
    tokenizer, draw = chat_tokenizer(THINKING), np.random.default_rng(0)
    writes = tuple(tuple(thinks(k, texts) for k in range(len(texts))) for texts in WRITES)
    context = context_of(writer(writes, tokenizer), by_thought, tokenizer)
    estimator = {"target": "gae", "args": {"lam": 0.5, "whiten": False, "critic_warmup": warmup}}
    (tmp_path / "v.txt").write_text("Q {question} S {solution} K {num_steps}.")
    own = made(
        "tango_agents:TangoAgents", estimator, environment={"target": "test_recipes_tango_agents:Asks"}, group_size=3,
        verifier_template=str(tmp_path / "v.txt"), turn_form="{number}) {text} ", told_form="tool: {text} ",
        dialogue="chat", alpha_start=0.0, alpha_min=0.0,
    )  # fmt: skip
    now = iteration("generator", "generator_critic", updates=0)
    rollouts = [
        replace(r, values={"value": draw.normal(size=len(r.tokens)).astype(np.float32)})
        for r in own.rollout(now, Problems(problems(1)), context)["generator"]
    ]
    handed = CreditContext(handed_over=context.handed_over)
    found = own.credit(now, {"generator": rollouts}, handed)
    assert [len(found[name]) for name in now.roles] == [0 if warmup else 5, 5]
    for outcome, places in ((1.0, [0, 1]), (0.0, [2]), (0.0, [3, 4])):
        value = np.concatenate([rollouts[place].values["value"][rollouts[place].trainable] for place in places])
        advantage = np.zeros(len(value) + 1)
        for t in reversed(range(len(value))):
            last = t + 1 == len(value)
            advantage[t] = (outcome if last else value[t + 1]) - value[t] + 0.5 * advantage[t + 1]
        read = [found["generator_critic"][place] for place in places]
        returns = np.concatenate([r.values["returns"][r.trainable] for r in read])
        np.testing.assert_allclose(returns, advantage[:-1] + value, atol=1e-6)
        assert {r.role for r in read} == {"generator_critic"}
        if not warmup:
            credit = [found["generator"][place] for place in places]
            given = np.concatenate([r.advantages[r.trainable] for r in credit])
            np.testing.assert_allclose(given, advantage[:-1], atol=1e-6)


def test_agents_have_a_critic_each():
    environment = {"target": "megatron_rl.contrib.kuhn_poker:KuhnPoker"}
    recipe = made(
        "agents:Agents", {"target": "gae", "args": {"level": "turn"}}, updates=1, environment=environment,
        agents={"first": 1, "second": 1}, group_size=1,
    )  # fmt: skip
    roles = ("first", "second", "first_critic", "second_critic")
    assert recipe.schedule() == [[roles]] and list(recipe.roles()) == list(roles)
    credited = recipe.credit(
        iteration(*roles), {name: rollouts_of(name, [0.0, 1.0]) for name in roles[:2]}, CreditContext()
    )
    assert {name: len(own) for name, own in credited.items()} == dict.fromkeys(roles, 2)
    for own in credited["second"]:
        assert len(set(own.advantages[1:].tolist())) == 1, "a turn has one advantage"


@pytest.mark.parametrize(
    ("recipe", "args", "says"),
    [
        ("grpo:Grpo", {"updates": 1}, "estimator 'gae' needs a critic, which this recipe does not have: use Ppo"),
        ("dapo:Dapo", {"updates": 1}, "estimator 'gae' needs a critic"),
        ("ppo:Ppo", {"updates": 1, "estimator": "rloo"}, "recipe.args.estimator = 'rloo' uses no critic"),
        ("ppo:Ppo", {"updates": 1, "estimator": {"target": "gae", "args": {"lam": 1.5}}}, "estimator gae: lam"),
        ("ppo:Ppo", {"updates": 1, "estimator": {"target": "gae", "args": {"lamda": 1.0}}}, "did you mean 'lam'"),
    ],
)
def test_an_estimator_that_does_not_fit_is_refused(recipe, args, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        build(Use(target=f"{RECIPES}.{recipe}", args={"estimator": "gae"} | args))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["roles.critic.head=null"], 'roles.critic.head = null: recipe megatron_rl.recipes.ppo:Ppo needs "value"'),
        (["roles.critic.max_prompt_tokens=512"], "roles.critic.max_prompt_tokens = 512 is less than roles.generator."),
        (["roles.generator.sampling.max_tokens=600"], "roles.critic.sampling.max_tokens = 512 is less than roles.gen"),
    ],
)
def test_a_run_whose_critic_cannot_read_its_role_is_refused(settings, says):
    spec, problems = specify(load(TrainConfig, [EXAMPLES / "methods/ppo.yaml"], settings), 8)
    found = recipe_problems(spec)
    assert not problems and len(found) == 1 and says in found[0], found


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (("generator", "value", "judge"), "by judge, and judge is not one of its roles"),
        (("solver", "value", "critic"), "of solver's rollouts by critic, and solver is not one of its roles"),
        (("generator", "entropy", "critic"), "log-probs if it has none"),
        (("generator", "value", "generator"), "a role has values if it has a head"),
        (("generator", "reference_logprobs", "generator"), "by generator, which keeps no reference: set `reference`"),
    ],
)
def test_a_score_that_the_run_cannot_compute_is_refused(score, says):
    """It failed in the first iteration, after the rollouts."""

    class Late(Ppo):
        def scores(self, iteration):
            return [Score(role=score[0], name=score[1], by=score[2])]

    spec, problems = specify(load(TrainConfig, [EXAMPLES / "methods/ppo.yaml"], ["recipe.args.estimator=gae"]), 8)
    assert not problems and not recipe_problems(spec)
    found = recipe_problems(replace(spec, recipe=Late(updates=1)))
    assert len(found) == 1 and says in found[0], found


def test_a_reward_model_without_a_model_is_refused():
    file = EXAMPLES.parent / "miniatures/reward_model/scored.yaml"
    spec, problems = specify(load(TrainConfig, [file], ["roles.reward.policy=none"]), 1)
    assert not problems and "roles.reward.policy = 'none' has no model" in "".join(recipe_problems(spec))


def test_a_penalty_in_the_reward_keeps_the_reference():
    """The example has loss.kl_coef = 0, so that the loss keeps none."""
    for coef, wanted in ((0.001, True), (0.0, False)):
        spec, _ = specify(
            load(TrainConfig, [EXAMPLES / "methods/ppo.yaml"], [f"recipe.args.estimator.args.kl_coef={coef}"]), 8
        )
        assert {name: role.reference for name, role in spec.roles.items()} == {"generator": wanted, "critic": False}


def test_a_policy_gets_its_rollouts_with_the_values_of_its_critic():
    own, others = rollouts_of("generator", [0.0, 1.0]), rollouts_of("critic", [0.0, 1.0])
    advantaged = [replace(r, advantages=1.0, values={}) for r in own]
    read = [replace(r, tokens=one.tokens, values={"returns": np.ones(4)}) for r, one in zip(others, own, strict=True)]
    for merged, one in zip(with_values("generator", advantaged, read), own, strict=True):
        assert (merged.role, merged.advantages, [*merged.values]) == ("generator", 1.0, ["returns"])
        np.testing.assert_array_equal(merged.tokens, one.tokens)
    other = [read[0], replace(read[1], tokens=read[1].tokens + 1)]
    for wrong in (read[:1], other):
        with pytest.raises(
            RolloutError,
            match=rf"the 2 rollouts of policy generator and the {len(wrong)} rollouts of the critic that shares",
        ):
            with_values("generator", advantaged, wrong)


@pytest.mark.parametrize(
    ("example", "changes", "says"),
    [
        (
            "methods/ppo.yaml",
            ["roles.critic.same_as=generator", "recipe.args.estimator.args.critic_warmup=2"],
            "critic_warmup = 2 of the estimator gae, and critic shares the policy of generator",
        ),
        (
            "tango_gae_qwen2.5_7b.yaml",
            ["roles.verifier_critic.same_as=generator", "recipe.args.estimator.args.critic_warmup=0"],
            "same_as = 'generator', and verifier_critic reads the rollouts of verifier: name verifier, or give it",
        ),
        (
            "tango_gae_qwen2.5_7b.yaml",
            [
                "roles.generator_critic.same_as=generator",
                "roles.verifier.same_as=generator",
                "recipe.args.estimator.args.critic_warmup=0",
            ],
            "roles.verifier_critic has a model of its own, and verifier trains the policy of generator, which learns",
        ),
    ],
)
def test_a_critic_shares_the_policy_of_the_role_that_it_reads_without_a_warm_up(example, changes, says):
    config = load(TrainConfig, [EXAMPLES / example], [*changes, "roles.generator.loss.value_coef=0.5"])
    spec = specify(config, 8)[0]
    with pytest.raises(ConfigError, match=re.escape(says)):
        spec.recipe.check(spec.checked)


def test_faults_a_critic_logs_no_rewards_of_the_role_that_it_reads():
    """One column of rewards had the trained reward of the role and the outcome of the critic; and the report advised to
    raise the critic's `max_tokens`."""
    stage = CreditStage(ppo(kl_coef=0.5))
    collected = Collected(rollouts={"generator": rollouts_of("generator", [0.0, 1.0])}, metrics={})
    metrics = stage.apply(iteration("generator", "critic", updates=0), collected).metrics
    assert metrics["generator"].keys() >= {"reward/outcome", "length", "finished", "samples", "tokens"}
    shared = {"samples": 2.0, "tokens": 6.0}
    assert {name: metrics["critic"][name] for name in shared} == shared
    assert not [name for name in metrics["critic"] if name.startswith("reward/") or name in ("length", "finished")]
