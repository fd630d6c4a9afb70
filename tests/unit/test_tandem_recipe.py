"""Tandem RL as a method: what is trained and what is not, when a run stops, and Tango with a tandem generator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_recipes import TOKENIZER, by_answer, ids, problems, solution, turn, verification
from toys import EOS, graded

from megatron_rl.algorithms.authors import Rule
from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.config.checks import check
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, LossConfig, TrainConfig
from megatron_rl.engines.base import Completion, EngineError, Sampling, Tandem
from megatron_rl.engines.fake import ScriptedEngine, TablePolicy
from megatron_rl.recipes import tandem
from megatron_rl.recipes.tango import Tango
from megatron_rl.training.rollouts import measure, sample, trajectories_from_jsonl, trajectories_to_jsonl
from megatron_rl.training.turns import Players
from megatron_rl.types import Prompt, Stop, Trajectory, pack

JUNIOR_FIRST = Tandem(rule=Rule(strategy="bernoulli"))


class Pair(ScriptedEngine):
    """A tandem in which every other token is the senior's, beginning with the junior's; without authors where `mask` says so."""

    def __init__(self, answer, *, mask=lambda length: [i % 2 == 1 for i in range(length)]):
        super().__init__(answer, eos=EOS)
        self.mask = mask

    def _one(self, prompt, i, j, sampling):
        found = super()._one(prompt, i, j, sampling)
        return replace(found, authors=self.mask(len(found.tokens))) if sampling.tandem is not None else found


def writes(i, j):
    return [*ids(solution(2, "yes" if j == 0 else "no")), EOS]


def with_pair(**engine):
    return Players(
        engines={"generator": Pair(lambda prompt, i, j, sampling: writes(i, j), **engine)},
        tokenizers={"generator": TOKENIZER},
        samplings={"generator": Sampling(max_tokens=4000, tandem=JUNIOR_FIRST)},
        max_prompt_tokens={"generator": 10_000},
        grade=by_answer,
    )


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "g.txt").write_text("Q {question}\n")
    return tandem.Tandem(updates=1, group_size=2, template=str(tmp_path / "g.txt"))


def test_the_whole_text_is_graded_and_the_seniors_tokens_alone_are_trained(recipe):
    played = recipe.play(turn("generator"), problems(2), with_pair())
    assert played.metrics["reward/outcome"] == 0.5
    assert played.metrics["senior_share"] == pytest.approx(0.5, abs=0.01)
    for t in played.trajectories:
        assert t.response[: len(ids("<think>"))] == ids("<think>"), "a text that the junior begins is read whole"
        assert not t.trainable[t.start] and t.trainable[t.start + 1]
        assert len(t.steps) == 2
        assert all((a != 0.0) == on for a, on in zip(t.advantages, t.trainable, strict=True))
        assert all(p == (-1.0 if on else 0.0) for p, on in zip(t.logprobs, t.trainable, strict=True))
    assert played.metrics["length"] == sum(len(t.response) for t in played.trajectories) / 4
    assert played.metrics["switches"] == played.metrics["length"] - 1


def test_the_mask_of_the_papers_example():
    """Response masks 111111 and 1111, authorship 110010 and 0110: senior share 5 / 10."""
    answers = iter([([5] * 6, [1, 1, 0, 0, 1, 0]), ([5] * 4, [0, 1, 1, 0])])

    class Two(ScriptedEngine):
        def _one(self, prompt, i, j, sampling):
            tokens, authors = next(answers)
            return Completion(
                tokens=tokens, logprobs=[-1.0] * len(tokens), stop=Stop.LENGTH, authors=[bool(a) for a in authors]
            )

    engine = Two(lambda *_: [], eos=EOS)
    found = sample(
        engine, [Prompt(id="a", tokens=[3, 3]), Prompt(id="b", tokens=[4])], Sampling(max_tokens=6, tandem=JUNIOR_FIRST)
    )
    assert [t.trainable for t in found] == [
        [False] * 2 + [True, True, False, False, True, False],
        [False, False, True, True, False],
    ]
    assert measure(found)["senior_share"] == 0.5
    assert trajectories_from_jsonl(trajectories_to_jsonl(found)) == found


@pytest.mark.parametrize("mask", [lambda length: None, lambda length: [True] * (length - 1)], ids=["none", "short"])
def test_without_an_author_for_each_token_a_run_does_not_start(recipe, mask):
    with pytest.raises(EngineError, match="without an author"):
        recipe.play(turn("generator"), problems(2), with_pair(mask=mask))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
def test_a_senior_share_that_the_strategy_does_not_give_stops_the_run(recipe, share):
    def mask(length):
        return [i % 4 < 4 * share for i in range(length)]

    with pytest.raises(EngineError, match="senior wrote"):
        recipe.play(turn("generator"), problems(2), with_pair(mask=mask))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_weight_brings_the_juniors_tokens_into_the_loss_and_nowhere_else(recipe, aggregation):
    """Gradient of the plain loss at ratio 1: -advantage x weight, over the weights of the whole batch or of the token's sequence."""
    players = with_pair()
    sampling = replace(players.samplings["generator"], tandem=replace(JUNIOR_FIRST, junior_weight=0.25))
    played = recipe.play(turn("generator"), problems(2), replace(players, samplings={"generator": sampling}))
    without = recipe.play(turn("generator"), problems(2), players)
    assert trajectories_from_jsonl(trajectories_to_jsonl(played.trajectories)) == played.trajectories
    batch, loss = pack(played.trajectories), PolicyLoss(LossConfig(kl_coef=0.0, aggregation=aggregation, tis_cap=2.0))
    assert torch.equal(batch.mask, pack(without.trajectories).mask) and played.metrics == without.metrics
    response = torch.cat([torch.arange(len(t.tokens)) + 1 >= t.start for t in played.trajectories])
    response[batch.cu_seqlens[1:] - 1] = False  # the last token predicts nothing
    weights = torch.where(batch.mask, 1.0, 0.25) * response
    assert (
        torch.equal(batch.weights, weights)
        and torch.equal(batch.counted, response)
        and not response[batch.mask].logical_not().any()
    )
    old = torch.where(
        batch.mask, batch.engine_logprobs, torch.tensor(-9.0)
    )  # the junior's are no part of importance sampling
    batch = replace(batch, old_logprobs=old)
    logprobs = old.clone().requires_grad_()
    total, sums = loss(logprobs, torch.zeros(len(old)), batch)
    (gradient,) = torch.autograd.grad(total / loss.denominator(batch), logprobs)
    whole = weights.sum()
    if aggregation == "sequence_mean":
        sizes = [part.sum() for part in weights.split(batch.lengths.tolist())]
        whole = len(sizes) * torch.stack(sizes).repeat_interleave(batch.lengths)
    torch.testing.assert_close(gradient, -batch.advantages * weights / whole)
    assert gradient[~batch.mask & response].any() and sums["ratio"] == batch.mask.sum()


def test_without_a_junior_the_recipe_refuses_to_run(recipe):
    players = with_pair()
    alone = replace(players, samplings={"generator": Sampling(max_tokens=4000)})
    for attempt in (
        lambda: recipe.play(turn("generator"), problems(1), alone),
        lambda: recipe.evaluate(problems(1), alone, 0),
    ):
        with pytest.raises(ConfigError, match="no junior"):
            attempt()


def test_it_is_evaluated_alone(recipe):
    players = with_pair()
    recipe.evaluate(problems(2), players, 0)
    assert [sampling.tandem for _, sampling in players.engines["generator"].asked] == [None, None]


def test_gradients_are_zero_on_junior_tokens(recipe):
    """Through the loss with every term on, and through a policy whose rows for the junior's contexts stay as they were."""
    played = recipe.play(turn("generator"), problems(2), with_pair())
    batch = pack(played.trajectories)
    logprobs = torch.randn(len(batch.tokens)).requires_grad_()
    entropy = torch.rand(len(batch.tokens)).requires_grad_()
    full = replace(
        batch, old_logprobs=torch.randn(len(batch.tokens)), reference_logprobs=torch.randn(len(batch.tokens))
    )
    total, sums = PolicyLoss(LossConfig(kl_coef=0.1, entropy_coef=0.1))(logprobs, entropy, full)
    total.backward()
    senior = batch.mask
    assert logprobs.grad is not None and entropy.grad is not None
    assert not logprobs.grad[~senior].any() and not entropy.grad[~senior].any() and logprobs.grad[senior].all()
    assert (
        PolicyLoss(LossConfig(kl_coef=0.0)).denominator(batch)
        == float(senior.sum())
        == sum(sum(t.trainable) for t in played.trajectories)
    )

    policy = TablePolicy(len(TOKENIZER))
    before = policy.table.detach().clone()
    policy.update(batch, PolicyLoss(LossConfig(kl_coef=0.0)))
    previous = torch.cat([batch.tokens[:1], batch.tokens[:-1]])
    contexts = previous * policy.vocab + batch.tokens
    trained = set(contexts[senior].tolist())
    moved = set((policy.table.detach() != before).any(dim=1).nonzero()[:, 0].tolist())
    assert moved and moved <= trained, "contexts of junior tokens alone do not move"


def test_a_turn_of_the_juniors_tokens_alone_has_nothing_to_train():
    t = Trajectory(
        group="a", tokens=[1, 2, 3], trainable=[False] * 3, logprobs=[0.0] * 3, version=0, stop=Stop.EOS, start=1
    )
    assert t.response == [2, 3] and measure([t])["senior_share"] == 0.0


def test_tango_with_a_tandem_generator_is_a_setting(tmp_path):
    """The generator's turns are written with the junior, and judged whole; the verifier is trained on all of its own tokens."""
    for name, text in (("g", "Q {question}\n"), ("v", "Q {question} S {solution} K {num_steps}\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    recipe = Tango(
        group_size=2,
        verifications=2,
        generator_template=str(tmp_path / "g.txt"),
        verifier_template=str(tmp_path / "v.txt"),
    )
    verifier = ScriptedEngine(lambda p, i, j, s: [*ids(verification("+-", "+" if j == 0 else "-")), EOS], eos=EOS)
    alone = with_pair()
    players = replace(
        alone, engines={**alone.engines, "verifier": verifier}, tokenizers=dict.fromkeys(("generator", "verifier"), TOKENIZER),
        samplings={**alone.samplings, "verifier": Sampling(max_tokens=4000)},
        max_prompt_tokens=dict.fromkeys(("generator", "verifier"), 10_000),
        grade=graded(lambda response, payload: "yes" in response),
    )  # fmt: skip
    played = recipe.play(turn("generator"), problems(2), players)
    assert played.metrics["senior_share"] == pytest.approx(0.5, abs=0.01)
    assert all(t.step_rewards and not t.trainable[t.start] for t in played.trajectories)
    judged = recipe.play(turn("verifier", 1), problems(2), players)
    assert all(t.start is None and all(t.trainable[t.prompt_length :]) for t in judged.trajectories)
    assert "senior_share" not in judged.metrics


def test_sglang_offers_no_tandem():
    settings = [
        "roles.generator={model: {path: some/model}, tandem: {}}", "recipe.target=megatron_rl.recipes.tandem:Tandem", "data.path=some/data",
        "engine.kind=sglang",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"roles.generator.tandem with engine.kind = 'sglang'"):
        check(load(TrainConfig, overrides=settings), 1)
    check(load(TrainConfig, overrides=[*settings[:-1], "engine.kind=vllm"]), 1)
