"""Reward models: the rows that they learn from, their losses as TRL has them, and their scores as rewards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracles
import oracles_rewards
import pytest
from chats import chat_tokenizer
from toys import characters

from megatron_rl.algorithms.value_loss import RewardLoss, loss_of
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, LossConfig, RoleConfig, SftConfig, SftData, TrainConfig
from megatron_rl.data.rows import DataError
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.data.sft import LabelledSteps, read_samples, rows_of_loss, sft_rollouts
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.reward_model import RewardModel
from megatron_rl.recipes.tango import Tango
from megatron_rl.spec.resolve import specify
from megatron_rl.texts.chat_template import ChatTokenizer
from megatron_rl.training.iteration import CreditContext, Iteration, RolloutContext
from megatron_rl.types import STEP, Annotations, Author, Rollout, spans_of


def loss(objective, **args):
    return RewardLoss(LossConfig(objective=objective, objective_args=args))


def rollouts(tmp_path, *rows, objective="bradley_terry", **settings):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kind = rows_of_loss(loss(objective).needs)
    samples = read_samples(SftData(train=str(tmp_path / "rows.jsonl"), **settings), kind=kind)
    return sft_rollouts(samples, characters(), append_eos=True, max_tokens=20)


@pytest.mark.parametrize("name", oracles_rewards.recorded()["rows"])
def test_reward_models_loss_gradient_and_metrics_are_trls(name):
    found, metrics = oracles_rewards.compare(name)
    assert found.loss < oracles.BAR and found.gradient < oracles.BAR
    assert "rewards/accuracies" in metrics and max(metrics.values()) < oracles.BAR, metrics


def test_reward_models_table_stands_in_the_docs():
    page = Path(__file__).parents[3] / "docs/reference/methods.md"
    assert oracles_rewards.table(measured=False) in page.read_text(), "put the output of tests/oracles/table.py there"


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
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e39},
            "bradley_terry",
            r"margin is 1e\+39: give a number up to 1e\+15",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400},
            "bradley_terry",
            "margin is 1000.*: give a number up to",
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


WRITER = characters()


def solution(text, *, outcome=0.0, messages=None, group="0"):
    """A rollout of the generator: the question `ab`, then the text and the end of the text."""
    tokens = [*WRITER.encode("ab" + text), WRITER.eos_token_id]
    return Rollout(
        role="generator", group=group, tokens=np.array(tokens), logprobs=np.zeros(len(tokens)),
        spans=spans_of((2, Author.ENVIRONMENT, -1), (len(tokens) - 2, Author.POLICY, 0)), rewards={"outcome": outcome},
        payload={"question": "ab"} | ({"messages": messages} if messages else {}),
    )  # fmt: skip


def texts(rollouts, reader, *, longest=100, **settings):
    """-> the texts that the reward model reads, with special tokens, and the metrics"""
    context = RolloutContext(
        engines={}, tokenizers={"generator": WRITER, "reward": reader}, grade=lambda *_: [],
        samplings={"reward": Sampling(max_tokens=1)}, max_prompt_tokens={"reward": longest},
    )  # fmt: skip
    recipe = Dapo(updates=1, template="plain", reward_model=RewardModel(weight=1.0, **settings))
    found = recipe.reward_model.texts(context, rollouts, recipe.prompt)["reward"]
    assert [text.group for text in found] == [rollout.group for rollout in rollouts]
    assert all(text.trainable.tolist() == [False] * (len(text.tokens) - 1) + [True] for text in found)
    return [reader.decode(text.tokens[:-1]) for text in found], context.metrics


def test_reward_models_read_the_prompt_and_the_solution_in_their_own_form():
    thought, plain = solution("hm</think>\nyes", group="1"), solution("no")
    assert texts([thought, plain], characters())[0] == ["abhm</think>\nyes<eos>", "abno<eos>"]
    assert texts([thought, plain], characters(), reads="answer")[0] == ["abyes<eos>", "abno<eos>"]
    turns = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    found, metrics = texts([thought], ChatTokenizer(chat_tokenizer()), reads="answer")
    assert found == [turns.format("yes")] and not metrics
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    found, _ = texts([solution("no", messages=conversation)], chat_tokenizer())
    assert found == ["<|im_start|>system\ns<|im_end|>\n" + turns.format("no")]
    begun = [conversation[1], {"role": "assistant", "content": "I say "}]
    assert texts([solution("no", messages=begun)], chat_tokenizer())[0] == [turns.format("I say no")]


def test_reward_models_texts_that_are_too_long_lose_their_beginning():
    found, metrics = texts([solution("cdef"), solution("cd"), solution("c")], characters(), longest=4)
    assert found == ["def<eos>", "bcd<eos>", "abc<eos>"] and metrics == {"generator": {"reward_model_cut": 2.0}}


@pytest.mark.parametrize(("scale", "of"), [("none", lambda x: x), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)))])
def test_reward_models_scores_are_mixed_with_the_outcome_before_groups_are_compared(scale, of):
    recipe = Dapo(updates=1, template="plain", reward_model=RewardModel(weight=0.25, scale=scale), estimator="dr_grpo")
    iteration = Iteration(cycle=0, index=0, roles=("generator",), number=0)
    scores, outcomes = [0.5, -2.0], [0.0, 1.0]
    rollouts = [solution("c", outcome=outcome) for outcome in outcomes]
    read = [scored_rollout("reward", "0", [1, 2], values={"value": [score]}) for score in scores]
    assert [score.by for score in recipe.scores(iteration)] == ["reward"] and recipe.roles()["reward"].head == "score"
    assert Dapo(updates=1).roles().keys() == {"generator"} and not Dapo(updates=1).scores(iteration)
    credited = recipe.credit(iteration, {"generator": rollouts, "reward": read}, CreditContext())
    assert credited.keys() == {"generator"}
    rewards = np.array([0.75 * outcome + 0.25 * of(score) for score, outcome in zip(scores, outcomes, strict=True)])
    assert [r.rewards["trained"] for r in credited["generator"]] == pytest.approx(rewards)
    assert [r.rewards["reward_model"] for r in credited["generator"]] == pytest.approx([of(score) for score in scores])
    assert [np.max(r.advantages) for r in credited["generator"]] == pytest.approx(rewards - rewards.mean())


STEPPED = {"step_weight": 0.25, "step_separator": "\n"}


def test_reward_models_of_steps_read_them_as_in_training():
    """The texts and the places of the scores are those of a row that trains a process reward model."""
    text = "x<step> cd</step>hm<step>e\n</step>yes"
    recipe = Dapo(updates=1, template="plain", reward_model=RewardModel(**STEPPED))
    context = RolloutContext(
        engines={}, tokenizers={"generator": WRITER, "reward": characters()}, grade=lambda *_: [],
        samplings={"reward": Sampling(max_tokens=1)}, max_prompt_tokens={"reward": 100},
    )  # fmt: skip
    both = [solution(text), solution("no steps")]
    read, plain = recipe.reward_model.texts(context, both, recipe.prompt)["reward"]
    sample = LabelledSteps(prompt="ab", steps=["cd", "e"], labels=[True, False], separator="\n")
    [wanted] = sft_rollouts([sample], characters(), append_eos=True, max_tokens=20)
    np.testing.assert_array_equal(read.tokens, wanted.tokens)
    np.testing.assert_array_equal(read.trainable, wanted.trainable)
    assert characters().decode(plain.tokens[:-1]) == "abno steps<eos>" and plain.num_trainable == 1


def test_reward_models_scores_of_steps_become_advantages_of_the_steps():
    """Two solutions with two steps and one. The rewards of the steps are (2 p - 1) / K: 0 and 0.25, and -0.5. Their
    mean is -1/12. A token gets the sum over its step and the later ones."""
    recipe = Dapo(updates=1, template="plain", reward_model=RewardModel(**STEPPED), estimator="dr_grpo")
    iteration = Iteration(cycle=0, index=0, roles=("generator",), number=0)
    solutions = [
        replace(solution("cdefgh", outcome=1.0), annotations={STEP: Annotations(np.array([[2, 4], [4, 6]]))}),
        replace(solution("cd", outcome=0.0), annotations={STEP: Annotations(np.array([[2, 3]]))}),
    ]
    logits = [[0.0, np.log(3)], [-np.log(3)]]
    read = [scored_rollout("reward", "0", [1, 2, 3], ends=range(len(own)), values={"value": own}) for own in logits]
    credited = recipe.credit(iteration, {"generator": solutions, "reward": read}, CreditContext())["generator"]
    assert [own.annotations_of(STEP).scores.tolist() for own in credited] == [
        pytest.approx([0.0, 0.25]),
        pytest.approx([-0.5]),
    ]
    first, second, other = 1 / 12, 1 / 3, -5 / 12
    wanted = [[0, 0, *[first + second] * 2, *[second] * 2, 0, 0, 0], [0, 0, other, 0, 0]]
    for own, outcome, steps in zip(credited, (0.5, -0.5), wanted, strict=True):
        trained = np.array([0.75 * outcome * (place > 1) + 0.25 * step for place, step in enumerate(steps)])
        np.testing.assert_allclose(own.advantages, trained, atol=1e-6)
        assert "reward_model" not in own.rewards
    both = RewardModel(weight=0.5, scale="sigmoid", **STEPPED)
    [one, _] = both.scored({"generator": solutions, "reward": read}, "generator")["generator"]
    assert one.rewards["reward_model"] == pytest.approx(0.75), "the score of a solution is that of its last step"
    cut = scored_rollout("reward", "0", [1, 2], ends=[1], values={"value": [9.0]})
    [left, _] = both.scored({"generator": solutions, "reward": [cut, read[1]]}, "generator")["generator"]
    assert left.annotations_of(STEP).scores is None, "the text lost its beginning, and a step"


def test_reward_models_of_steps_are_refused_where_they_would_be_ignored():
    example = Path(__file__).parents[3] / "examples/published/grpo_qwen2.5_7b.yaml"
    settings = ["recipe.target=megatron_rl.recipes.dapo:Dapo", "recipe.args.reward_model={step_weight: 0.5}"]
    settings += ["roles.reward={model: {path: m}, head: score, max_prompt_tokens: 100000}"]
    spec = specify(load(TrainConfig, [example], [*settings, "recipe.args.estimator=w_reinforce"]), 8)[0]
    with pytest.raises(ConfigError, match=r"step_weight = 0.5, and the estimator w_reinforce has no rule for rewards"):
        spec.recipe.check(spec.checked)
    recipe = Tango(reward_model=RewardModel(step_weight=0.5))
    spec = specify(load(TrainConfig, [example], settings), 8)[0]
    spec.recipe.check(spec.checked)
    with pytest.raises(ConfigError, match=r"step_weight = 0.5: Tango's verifier scores the steps already"):
        recipe.check(spec.checked)


def test_reward_models_that_read_less_than_the_generator_writes_are_refused():
    example = Path(__file__).parents[3] / "examples/published/grpo_qwen2.5_7b.yaml"
    settings = ["recipe.target=megatron_rl.recipes.dapo:Dapo", "recipe.args.reward_model={weight: 0.5}"]
    settings += ["roles.reward={model: {path: m}, head: score, max_prompt_tokens: 10, sampling: {max_tokens: 5}}"]
    spec = specify(load(TrainConfig, [example], settings), 8)[0]
    with pytest.raises(ConfigError, match=r"roles.reward.max_prompt_tokens \+ sampling.max_tokens = 15 is less than"):
        spec.recipe.check(spec.checked)
