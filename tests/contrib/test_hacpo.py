"""HACPO: loss, advantages and bounds against the paper's formulas in float64, and both roles' rollouts, collected with
scripted engines of different tokenizers."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import specs as checks
import torch
from fake_engines import ScriptedEngine
from scripted_rollouts import says_yes
from toys import EOS, characters, merging

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.data_parallel_split import split
from megatron_rl.batches.packed_batch import Statistics, pack
from megatron_rl.config import plugins
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, LossConfig, TrainConfig
from megatron_rl.contrib import hacpo
from megatron_rl.contrib.hacpo import FIRST, LOW, OBJECTIVE, SECOND, SOURCE, Hacpo, capability_advantages
from megatron_rl.engines.protocol import Sampling
from megatron_rl.training.iteration import CreditContext, Iteration, RolloutContext
from megatron_rl.types import WRITTEN_BY, Author, Prompt, Rollout, spans_of

ALPHABET = "abcdefghnoys? Q:0123456789"
ALPHA = 1.5
# of each rollout: tokens, mean log-prob of the source, bound of the ratio (below 0: the learner's own), advantage, and
# how far the learner's log-probs are from the source's
CASES = [
    (4, -1.0, -1.0, 0.5, 2e-4), (2, -0.5, -1.0, -0.75, -0.2), (4, -1.5, -1.0, 1.0, 0.1),
    (8, -1.25, 0.8, 0.75, -0.1), (4, -2.0, 0.85, -0.5, -0.05), (2, -0.75, 0.8, 1.0, 0.3), (4, -1.0, 0.8, 0.25, -0.5),
    (1, -14.0, 0.8, 1.0, 13.0),
]  # fmt: skip


def make_rollouts():
    return [
        Rollout(
            role="first", group=str(i), tokens=np.arange(2 + n), logprobs=np.zeros(2 + n), advantages=advantage,
            spans=spans_of((2, Author.ENVIRONMENT, -1), (n, Author.POLICY, 0)),
            values={SOURCE: np.full(2 + n, mean, np.float32), LOW: np.full(2 + n, low, np.float32)},
        )
        for i, (n, mean, low, advantage, _) in enumerate(CASES)
    ]  # fmt: skip


def test_loss_and_gradient_are_the_papers_formulas():
    rng, live, old, wanted = np.random.default_rng(0), [], [], []
    for n, mean, low, advantage, apart in CASES:
        source = np.full(n, np.float64(np.float32(mean)))
        noise = rng.standard_normal(n) * 0.1
        own = torch.tensor(source + apart + noise - noise.mean(), dtype=torch.float64, requires_grad=True)
        before = torch.tensor(source + 0.3 * rng.standard_normal(n)) if low < 0 else torch.tensor(source)
        before = before - before.mean() + source.mean()
        s = ((own - before).mean().clamp(-10, 10)).exp()
        if low < 0:
            wanted.append(-min(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage))
        else:
            c = s.clamp(float(np.float32(low)), 1.0)
            wanted.append(-c * c.item() ** ALPHA * advantage)
        live.append(own)
        old.append(before)
    total = torch.stack(wanted).mean()
    gradients = torch.autograd.grad(total, live)
    config = LossConfig(objective=OBJECTIVE, objective_args={"alpha": ALPHA}, kl_coef=0.0)
    loss, batch = PolicyLoss(config), pack(make_rollouts())
    weights, denominator = loss.aggregate(np.array([case[0] for case in CASES], float), np.arange(len(CASES)))
    placed = lambda rows: torch.cat([torch.cat([torch.zeros(1), row.detach(), torch.zeros(1)]) for row in rows])  # noqa: E731
    batch = replace(
        batch, weights=batch.weights * batch.spread(torch.from_numpy(weights)), old_logprobs=placed(old).double()
    )
    own = placed(live).double().requires_grad_()
    value, metrics = loss(Statistics(own, torch.zeros_like(own)), batch)
    (value / denominator).backward()
    assert (value / denominator).item() == pytest.approx(total.item(), abs=1e-10)
    np.testing.assert_allclose(own.grad, placed(gradients), atol=1e-10)
    crossed = [case for case in CASES if case[2] > 0]
    assert metrics["count/cross_ratio"].item() == sum(case[0] for case in crossed)
    ratios = sum(n * math.exp(min(apart, 10)) for n, _, _, _, apart in crossed)
    assert metrics["cross_ratio"].item() == pytest.approx(ratios, rel=1e-6)
    assert metrics["cross_clip_frac"].item() == sum(n for n, _, low, _, d in crossed if not low <= math.exp(d) <= 1)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_advantages_are_the_papers_formulas(ratio):
    rng = np.random.default_rng(1)
    rewards, own = rng.integers(0, 5, 40) / 4, rng.random(40) < 0.5
    groups = [str(i // 8) for i in range(40)]
    rewards[:8] = 0.75  # nothing to compare
    rewards[8:16], own[8:16] = 0.9, np.arange(8) % 2 == 0
    rewards[8] = 1.0  # for ratio 0.5 the baseline is above 1
    found = capability_advantages(rewards, groups, own, ratio)
    for group in range(5):
        at = range(8 * group, 8 * group + 8)
        own_rewards = [float(rewards[i]) for i in at]
        mean = sum(own_rewards) / 8
        deviation = math.sqrt(sum((r - mean) ** 2 for r in own_rewards) / 7)
        baseline = sum(float(rewards[i]) * (1 if own[i] else 1 / ratio) for i in at) / 8
        if baseline > 1:
            baseline = sum(float(rewards[i]) for i in at if own[i]) / sum(own[i] for i in at)
        for i in at:
            wanted = 0.0 if group == 0 else (rewards[i] - baseline) / (deviation + 1e-6)
            assert found[i] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("count", "size"), [(32, 8), (30, 8), (7, 3), (5, 8), (5, None)])
def test_the_bound_of_the_ratio_rises_with_the_optimizer_step(count, size):
    recipe = Hacpo(updates=1, samples_per_optimizer_step=size, cross_clip_step=0.15)
    steps = [number for number, part in enumerate(split(count, size)) for _ in part]
    assert recipe._lows(count).tolist() == pytest.approx([min(1.0, 0.8 + 0.15 * step) for step in steps])


class Problems:
    """Problems whose prompts the first role reads."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def take(self, count=None):
        return [
            Prompt(id=str(i), tokens=self.tokenizer(f"Q{i}:")["input_ids"], payload={"question": str(i)})
            for i in range(4)
        ]


@pytest.fixture
def context():
    tokenizers = {FIRST: characters(ALPHABET), SECOND: merging(ALPHABET, "abes")}
    answers = {FIRST: lambda j: "yes" if j else "no", SECOND: lambda j: "abba" if j < 3 else "yes" + "a" * 30}

    def engine(role):
        made = ScriptedEngine(lambda p, key, j, s: [*tokenizers[role](answers[role](j))["input_ids"], EOS], eos=EOS)
        made.version = 5
        return made

    return RolloutContext(
        engines={role: engine(role) for role in tokenizers}, tokenizers=tokenizers, grade=says_yes,
        samplings=dict.fromkeys(tokenizers, Sampling(max_tokens=20)),
        max_prompt_tokens={FIRST: 12, SECOND: 2 + 1},
    )  # fmt: skip


def test_each_role_learns_from_the_solutions_of_both(context, tmp_path):
    (tmp_path / "q.txt").write_text("Q{question}:")
    recipe = Hacpo(updates=3, group_size=4, window=2, template=str(tmp_path / "q.txt"))
    for number in range(3):
        iteration = Iteration(cycle=number, index=0, roles=(FIRST, SECOND), number=number)
        found = recipe.rollout(iteration, Problems(context.tokenizers[FIRST]), context)
        credited = recipe.credit(iteration, found, CreditContext(metrics=context.metrics))
    assert [len(credited[role]) for role in (FIRST, SECOND)] == [16 + 12, 16 + 16], "one text of each is too long"
    assert context.metrics[FIRST]["cross_left_out"] == 4 and context.metrics[SECOND]["cross_left_out"] == 0
    assert recipe.state_dict() == {"rates": {FIRST: [0.75, 0.75], SECOND: [0.25, 0.25]}}
    again = Hacpo(updates=3)
    again.load_state_dict(recipe.state_dict())
    assert again.state_dict() == recipe.state_dict()
    for role, ratio in ((FIRST, 0.25 / 0.75), (SECOND, 0.75 / 0.25)):
        assert context.metrics[role]["capability_ratio"] == pytest.approx(ratio)
        own = [r for r in credited[role] if WRITTEN_BY not in r.payload]
        crossed = credited[role][len(own) :]
        assert len(own) == 16 and all(r.payload[WRITTEN_BY] == hacpo.OTHER[role] and r.role == role for r in crossed)
        assert {r.values[LOW][-1] for r in own} == {-1.0} and {r.values[LOW][-1] for r in crossed} == {np.float32(0.8)}
        group = [r for r in credited[role] if r.group == "1:1"]
        rewards = np.array([r.rewards["outcome"] for r in group])
        mine = np.array([WRITTEN_BY not in r.payload for r in group])
        wanted = capability_advantages(rewards, ["x"] * len(group), mine, ratio) * np.where(mine, 1, ratio)
        np.testing.assert_allclose([r.advantages for r in group], wanted, rtol=1e-12)
        for r in credited[role]:
            text = context.tokenizers[role].decode(r.tokens)
            assert re.fullmatch(r"Q\d:(yesa*|no|abba)<eos>", text), text
            np.testing.assert_array_equal(r.values[SOURCE], -1), "each source says -1 to each of its own tokens"
            assert r.versions == (5,)
    assert {tuple(r.logprobs[-4:]) for r in credited[FIRST] if WRITTEN_BY in r.payload} == {(-0.5, -0.5, -0.5, -1.0)}


def test_settings_that_would_give_another_method_are_refused():
    base = ["data.path=p.jsonl", "recipe.target=megatron_rl.contrib.hacpo:Hacpo"]
    base += [f"roles.{role}.model.path=x/{role}" for role in (FIRST, SECOND)]
    named = [f"roles.{role}.loss.objective={OBJECTIVE}" for role in (FIRST, SECOND)]
    for settings, says in (
        ([], "cross_clip_low and source_logprobs: take megatron_rl.contrib.hacpo:hacpo"),
        ([*named, "roles.second.samples_per_optimizer_step=8"], "roles.second.samples_per_optimizer_step = 8, and"),
        (named, None),
    ):
        config = load(TrainConfig, [], [*base, *settings, "recipe.args={updates: 1}"])
        if says is None:
            checks.check_recipe(config, plugins.build(config.recipe))
            continue
        with pytest.raises(ConfigError, match=re.escape(says)):
            checks.check_recipe(config, plugins.build(config.recipe))
