"""Values at the very boundary of a rule, and defaults, that the tests of whole methods pass by."""

from __future__ import annotations

import numpy as np
import pytest
from test_collector import Greedy, credited, rollout, rollout_maker

from megatron_rl.algorithms import objectives
from megatron_rl.algorithms.policy_loss import GIVEN_REFERENCE, PolicyLoss
from megatron_rl.config import files
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.schema import ConfigError, LossConfig, TrainConfig
from megatron_rl.recipes.dynamic_sampling import Group
from megatron_rl.recipes.length_rewards import Brevity, LengthReward
from megatron_rl.recipes.solutions import Solution
from megatron_rl.training.iteration import Iteration
from megatron_rl.types import Prompt


def test_an_objective_has_no_loss_per_rollout_and_applies_no_correction_unless_it_says_so():
    plain = objectives.objective()(lambda live, batch: live)
    assert (plain.reads_correction, plain.per_rollout) == (False, False)
    assert plain.needs == objectives.find("clipped", {}).needs == {"advantages"}


@pytest.mark.parametrize(
    ("kl_coef", "given", "wanted"),
    [(0.0, False, set()), (0.0, True, set()), (0.1, False, {"reference"}), (0.1, True, {GIVEN_REFERENCE})],
)
def test_a_loss_asks_for_a_reference_only_where_it_computes_with_one(kl_coef, given, wanted):
    loss = PolicyLoss(LossConfig(objective="nll", kl_coef=kl_coef), given_reference=given)
    assert loss.needs & {"reference", GIVEN_REFERENCE} == wanted


def test_a_config_nested_ten_thousand_deep_is_refused_before_the_stack_overflows(tmp_path):
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 10_000 + "]" * 10_000)
    with pytest.raises(ConfigError, match="values are nested more than 64 deep"):
        files.read_yaml(tmp_path / "deep.yaml")


@pytest.mark.parametrize("words", ["run.name", "run..name=x", "=x", ".".join("a" * 65) + "=x"])
def test_an_override_that_is_no_setting_and_value_is_refused(words):
    with pytest.raises(ConfigError, match="it has the form a.b=value"):
        files.load(TrainConfig, [], [words])


def test_results_of_eval_go_to_a_json_file():
    words = ["model.path=m", "output=results.txt"]
    with pytest.raises(ConfigError, match="output = 'results.txt': give NAME.json"):
        files.load(EvalConfig, [], words)


def test_brevity_gives_nothing_to_a_group_without_right_solutions():
    wrong = [Solution(rollout=rollout(), text="no", correct=False) for _ in range(3)]
    group = Group(prompt=Prompt(id="0", tokens=[1], payload={}), solutions=wrong, drawn=3)
    assert Brevity(share=1.0).rewards([group], 10) == [[0.0, 0.0, 0.0]]


def test_brevity_gives_nothing_to_the_wrong_solutions_of_a_group_with_a_right_one():
    solutions = [Solution(rollout=rollout(), text="", correct=correct) for correct in (True, False)]
    group = Group(prompt=Prompt(id="0", tokens=[1], payload={}), solutions=solutions, drawn=2)
    (right, wrong) = Brevity(share=1.0).rewards([group], 10)[0]
    assert right < 0 and wrong == 0


def test_a_length_reward_tells_two_lengths_apart():
    solutions = [Solution(rollout=rollout(tokens=(7, *[1] * n)), text="", correct=True) for n in (1, 3, 1)]
    group = Group(prompt=Prompt(id="0", tokens=[7], payload={}), solutions=solutions, drawn=3)
    assert LengthReward().rewards([group], 10) == [[0.5, -0.5, 0.5]]


def test_experts_of_all_tokens_but_the_last_are_what_an_engine_tells():
    told = rollout(experts=np.zeros((1, 1, 1), np.int16))
    found = credited(
        rollout_maker(Greedy(wrong={0: {"a": [told]}})), Iteration(cycle=0, index=0, roles=("a",), number=0)
    )
    assert len(found.rollouts["a"]) == 1
