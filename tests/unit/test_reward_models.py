"""Reward models: the rows that they learn from, their losses as TRL has them, and their scores as rewards."""

from __future__ import annotations

import json

import oracles
import oracles_rewards
import pytest
from toys import characters

from megatron_rl.algorithms.value_loss import RewardLoss, loss_of
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, LossConfig, RoleConfig, SftConfig, SftData
from megatron_rl.data.rows import DataError
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.data.sft import read_samples, rows_of_loss, sft_rollouts


def loss(objective, **args):
    return RewardLoss(LossConfig(objective=objective, objective_args=args))


def rollouts(tmp_path, *rows, objective="bradley_terry", **settings):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kind = rows_of_loss(loss(objective).needs, uses_advantages=False)
    samples = read_samples(SftData(train=str(tmp_path / "rows.jsonl"), **settings), kind=kind)
    return sft_rollouts(samples, characters(), append_eos=True, max_tokens=20)


@pytest.mark.parametrize("name", oracles_rewards.recorded()["rows"])
def test_reward_models_loss_gradient_and_metrics_are_trls(name):
    found, metrics = oracles_rewards.compare(name)
    assert found.loss < oracles.BAR and found.gradient < oracles.BAR
    assert "rewards/accuracies" in metrics and max(metrics.values()) < oracles.BAR, metrics


def test_reward_models_the_score_of_a_text_is_read_at_its_last_token(tmp_path):
    row = {"prompt": "ab", "chosen": "c", "rejected": "de", "margin": 2}
    chosen, rejected = rollouts(tmp_path, row, {**row, "margin": None})[:2]
    tokenizer = characters()
    for rollout, text in ((chosen, "abc"), (rejected, "abde")):
        assert tokenizer.decode(rollout.tokens[:-2]) == text
        assert rollout.tokens[-2] == tokenizer.eos_token_id, "the head reads the end of the text"
        assert rollout.trainable.tolist() == [False] * (len(rollout.tokens) - 1) + [True]
        assert rollout.values["margin"].tolist() == [0.0] * (len(rollout.tokens) - 1) + [2.0]
    assert chosen.group == rejected.group
    assert not rollouts(tmp_path, {**row, "margin": None})[0].values["margin"].any()


def test_reward_models_scores_of_steps_are_read_at_the_ends_of_the_steps(tmp_path):
    row = {"prompt": "ab", "completions": ["cd", "e", "fg"], "labels": [True, False, 1]}
    [rollout] = rollouts(tmp_path, row, objective="prm", step_separator="ba")
    tokenizer = characters()
    assert tokenizer.decode(rollout.tokens[:-1]) == "abcdbaebafgba"
    ends = [place - 1 for place, trained in enumerate(rollout.trainable) if trained]
    assert [tokenizer.decode(rollout.tokens[: end + 1]) for end in ends] == ["abcdba", "abcdbaeba", "abcdbaebafgba"]
    assert rollout.values["step_label"][rollout.trainable].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("row", "objective", "says"),
    [
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"},
            "bradley_terry",
            "margin is 'x': give a number",
        ),
        ({"prompt": "a", "chosen": "b"}, "bradley_terry", "no rejected"),
        ({"prompt": "a", "completion": "b"}, "prm", "completions and labels are no lists"),
        ({"prompt": "a", "completions": ["b"], "labels": [2]}, "prm", "labels has 2: give true or false"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True]}, "prm", "2 completions with 1 labels"),
        ({"prompt": "a" * 20, "completions": ["b"], "labels": [True]}, "prm", "23 tokens: raise data.max_tokens = 20"),
    ],
)
def test_reward_models_rows_without_what_they_need_are_refused(tmp_path, row, objective, says):
    with pytest.raises(DataError, match=says):
        rollouts(tmp_path, row, objective=objective)


def test_reward_models_the_objective_of_sft_gives_the_model_its_head(tmp_path):
    given = ["model.path=m", "data.train=d"]
    plain, reward = (load(SftConfig, [], [*given, *more]).trained for more in ([], ["loss.objective=bradley_terry"]))
    assert plain.head is None and reward.head == "score"
    assert isinstance(loss_of(reward), RewardLoss) and "pairs" in loss_of(reward).needs
    with pytest.raises(ConfigError, match="'bradley_terry' is the loss of a reward model, and this model has no head"):
        loss_of(RoleConfig(loss=LossConfig(objective="bradley_terry")))
    with pytest.raises(ConfigError, match="center_rewards_coefficient = -1"):
        loss("bradley_terry", center_rewards_coefficient=-1.0)


def test_reward_models_a_text_may_have_several_scores():
    rollout = scored_rollout("reward", "0", [5, 6, 7], ends=[0, -1], values={"a": [1, 2]})
    assert rollout.tokens.tolist() == [5, 6, 7, 7] and rollout.trainable.tolist() == [False, True, False, True]
    assert rollout.values["a"].tolist() == [0, 1, 0, 2]
