"""Tandem RL as a method: what is trained and what is not, when a run stops, and Tango with a tandem generator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_engines import ScriptedEngine
from fake_policy import TablePolicy
from one_process import OneProcess
from specs import check
from stages import credited
from test_recipes import (
    TOKENIZER,
    Problems,
    by_answer,
    context_of,
    ids,
    iteration,
    judged,
    mixed_generator,
    mixed_verifier,
    problems,
    roll_out,
    solution,
    texts,  # noqa: F401 (a fixture)
    verification,
)
from toys import EOS, graded

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.batches.packed_batch import Statistics, pack
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, CorrectionConfig, LossConfig, TrainConfig
from megatron_rl.engines.protocol import Completion, EngineError, Sampling, TandemSampling
from megatron_rl.recipes import tandem
from megatron_rl.recipes.tango import Tango
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import from_completion, measure, sample
from megatron_rl.training.update import Trainee, update
from megatron_rl.types import NO_VERSION, STEP, Author, Prompt, Stop

JUNIOR_FIRST = TandemSampling(rule=Rule(strategy="bernoulli"))


class Pair(ScriptedEngine):
    """A tandem in which every other token is the senior's, beginning with the junior's; without authors where `mask`
    says so."""

    def __init__(self, answer, *, mask=lambda length: [i % 2 == 1 for i in range(length)]):
        super().__init__(answer, eos=EOS)
        self.mask = mask

    def one(self, prompt, key, sample, sampling):
        found = super().one(prompt, key, sample, sampling)
        return replace(found, authors=self.mask(len(found.tokens))) if sampling.tandem is not None else found


def writes(i, j):
    return [*ids(solution(2, "yes" if j == 0 else "no")), EOS]


def with_pair(weight=0.0, **engine):
    return RolloutContext(
        engines={"generator": Pair(lambda prompt, i, j, sampling: writes(i, j), **engine)},
        tokenizers={"generator": TOKENIZER},
        samplings={"generator": Sampling(max_tokens=4000, tandem=JUNIOR_FIRST)},
        max_prompt_tokens={"generator": 10_000},
        grade=by_answer,
        partner_weights={"generator": weight},
    )


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "g.txt").write_text("Q {question}\n")
    return tandem.Tandem(updates=1, group_size=2, template=str(tmp_path / "g.txt"))


def test_the_whole_text_is_graded_and_the_seniors_tokens_alone_are_trained(recipe):
    rollouts, m = roll_out(recipe, "generator", 2, with_pair())
    assert m["reward/outcome"] == 0.5
    assert m["senior_share"] == pytest.approx(0.5, abs=0.01)
    for t in rollouts:
        assert t.response[: len(ids("<think>"))].tolist() == ids("<think>"), (
            "a text that the junior begins is read whole"
        )
        assert not t.trainable[t.start] and t.trainable[t.start + 1] and isinstance(t.advantages, float)
        assert len(t.annotations_of(STEP)) == 2 and t.partner_weight == 0.0
        assert np.array_equal(t.weights > 0, t.trainable) and np.array_equal(t.logprobs == -1.0, t.written)
    assert m["length"] == sum(len(t.response) for t in rollouts) / 4
    assert m["switches"] == m["length"] - 1


def test_the_mask_of_the_papers_example():
    """Response masks 111111 and 1111, authorship 110010 and 0110: senior share 5 / 10."""
    answers = iter([([5] * 6, [1, 1, 0, 0, 1, 0]), ([5] * 4, [0, 1, 1, 0])])

    class Two(ScriptedEngine):
        def one(self, prompt, key, sample, sampling):
            tokens, authors = next(answers)
            logprobs = np.full(len(tokens), -1.0)
            return Completion(tokens=tokens, logprobs=logprobs, stop=Stop.LENGTH, authors=np.array(authors, bool))

    context = replace(with_pair(), engines={"generator": Two(lambda *_: [], eos=EOS)})
    prompts = [Prompt(id="a", tokens=[3, 3]), Prompt(id="b", tokens=[4])]
    found = sample(context, "generator", prompts, Sampling(max_tokens=6, tandem=JUNIOR_FIRST))
    assert [t.trainable.tolist() for t in found] == [
        [False] * 2 + [True, True, False, False, True, False],
        [False, False, True, True, False],
    ]
    assert measure(found)["senior_share"] == 0.5 and measure(found)["switches"] == (3 + 2) / 2


def test_spans_tell_authors_and_versions_apart():
    completion = Completion(
        tokens=[5] * 7,
        logprobs=[-1.0] * 7,
        stop=Stop.EOS,
        authors=[True, True, False, False, True, True, True],
        versions=[(0, 3), (3, 4), (6, 5)],
    )
    t = from_completion(Prompt(id="a", tokens=[1, 2]), completion, role="g", group="x", version=9)
    policy, partner = Author.POLICY, Author.PARTNER
    assert t.spans.tolist() == [
        [0, 2, Author.ENVIRONMENT, NO_VERSION],
        [2, 4, policy, 3],
        [4, 6, partner, NO_VERSION],
        [6, 8, policy, 4],
        [8, 9, policy, 5],
    ]
    assert (t.versions, t.version, t.num_trainable, t.length) == ((3, 4, 5), 3, 5, 7)
    plain = from_completion(
        Prompt(id="a", tokens=[1]), replace(completion, authors=None), role="g", group="x", version=9
    )
    assert plain.spans[:, :2].tolist() == [[0, 1], [1, 4], [4, 7], [7, 8]]
    alone = from_completion(
        Prompt(id="a", tokens=[1]), replace(completion, authors=None, versions=[]), role="g", group="x", version=9
    )
    assert alone.spans.tolist() == [[0, 1, Author.ENVIRONMENT, NO_VERSION], [1, 8, policy, 9]]
    nothing = replace(completion, tokens=[], logprobs=[], authors=[])
    assert from_completion(Prompt(id="a", tokens=[1]), nothing, role="g", group="x", version=9).length == 0


@pytest.mark.parametrize("mask", [lambda length: None, lambda length: [True] * (length - 1)], ids=["none", "short"])
def test_without_an_author_for_each_token_a_run_does_not_start(recipe, mask):
    with pytest.raises(EngineError, match="without an author"):
        credited(recipe, iteration("generator"), Problems(2), with_pair(mask=mask))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
def test_a_senior_share_that_the_strategy_does_not_give_stops_the_run(recipe, share):
    def mask(length):
        return [i % 4 < 4 * share for i in range(length)]

    with pytest.raises(EngineError, match="senior wrote"):
        credited(recipe, iteration("generator"), Problems(2), with_pair(mask=mask))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_weight_brings_the_juniors_tokens_into_the_loss_and_nowhere_else(recipe, aggregation):
    """Gradient of the plain loss at ratio 1: -advantage x weight, over the weights of the whole batch or of the token's
    sequence."""
    rollouts, metrics = roll_out(recipe, "generator", 2, with_pair(weight=0.25))
    without, others = roll_out(recipe, "generator", 2, with_pair())
    correction = CorrectionConfig(kind="truncate", high=2.0)
    loss = PolicyLoss(LossConfig(kl_coef=0.0, aggregation=aggregation, correction=correction))
    batch = pack(rollouts)
    assert torch.equal(batch.mask, pack(without).mask) and metrics == others
    response = torch.cat([torch.arange(len(t.tokens)) + 1 >= t.start for t in rollouts])
    response[batch.cu_seqlens[1:] - 1] = False  # the last token predicts nothing
    weights = torch.where(batch.mask, 1.0, 0.25) * response
    assert torch.equal(batch.weights, weights) and torch.equal(batch.counted, response)
    assert not response[batch.mask].logical_not().any()
    # the junior's are no part of importance sampling
    old = torch.where(batch.mask, batch.engine_logprobs, torch.tensor(-9.0))
    own, denominator = loss.aggregate(batch.sequence_sums(weights).numpy(), np.arange(len(rollouts)))
    batch = replace(batch, old_logprobs=old, weights=weights * batch.spread(torch.from_numpy(own)))
    logprobs = old.clone().requires_grad_()
    total, sums = loss(Statistics(logprobs, torch.zeros(len(old))), batch)
    (gradient,) = torch.autograd.grad(total / denominator, logprobs)
    whole = weights.sum()
    if aggregation == "sequence_mean":
        sizes = [part.sum() for part in weights.split(batch.lengths.tolist())]
        whole = len(sizes) * torch.stack(sizes).repeat_interleave(batch.lengths)
    torch.testing.assert_close(gradient, -batch.advantages * weights / whole)
    assert gradient[~batch.mask & response].any() and sums["ratio"] == batch.mask.sum()


def test_it_is_evaluated_alone(recipe):
    context = with_pair()
    recipe.evaluate(problems(2), context)
    assert [sampling.tandem for _, sampling in context.engines["generator"].asked] == [None] * 4


def test_gradients_are_zero_on_junior_tokens(recipe):
    """Through the loss with every term on, and through a policy whose rows for the junior's contexts stay as is."""
    rollouts, _ = roll_out(recipe, "generator", 2, with_pair())
    batch = pack(rollouts)
    logprobs = torch.randn(len(batch.tokens)).requires_grad_()
    entropy = torch.rand(len(batch.tokens)).requires_grad_()
    full = replace(
        batch, old_logprobs=torch.randn(len(batch.tokens)), reference_logprobs=torch.randn(len(batch.tokens))
    )
    total, _ = PolicyLoss(LossConfig(kl_coef=0.1, entropy_coef=0.1))(Statistics(logprobs, entropy), full)
    total.backward()
    senior = batch.mask
    assert logprobs.grad is not None and entropy.grad is not None
    assert not logprobs.grad[~senior].any() and not entropy.grad[~senior].any() and logprobs.grad[senior].all()
    assert float(senior.sum()) == sum(t.num_trainable for t in rollouts)

    policy = TablePolicy(len(TOKENIZER))
    before = policy.table.detach().clone()
    update(OneProcess(), Trainee(policy=policy, loss=PolicyLoss(LossConfig(kl_coef=0.0))), rollouts)
    previous = torch.cat([batch.tokens[:1], batch.tokens[:-1]])
    contexts = previous * policy.vocab + batch.tokens
    trained = set(contexts[senior].tolist())
    moved = set((policy.table.detach() != before).any(dim=1).nonzero()[:, 0].tolist())
    assert moved and moved <= trained, "contexts of junior tokens alone do not move"


def test_an_iteration_of_the_juniors_tokens_alone_has_nothing_to_train():
    completion = Completion(tokens=[2, 3], logprobs=[-1.0] * 2, stop=Stop.EOS, authors=[False, False])
    t = from_completion(Prompt(id="a", tokens=[1]), completion, role="generator", group="a", version=0)
    assert t.response.tolist() == [2, 3] and t.num_trainable == 0 and t.versions == ()
    assert measure([t])["senior_share"] == 0.0


def test_tango_with_a_tandem_generator_is_a_setting(tmp_path):
    """The generator's iterations are written with the junior, and judged whole; the verifier is trained on all of its
    own tokens."""
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
    context = replace(
        alone,
        engines={**alone.engines, "verifier": verifier},
        tokenizers=dict.fromkeys(("generator", "verifier"), TOKENIZER),
        samplings={**alone.samplings, "verifier": Sampling(max_tokens=4000)},
        max_prompt_tokens=dict.fromkeys(("generator", "verifier"), 10_000),
        grade=graded(lambda response, payload: "yes" in response),
    )
    rollouts, m = roll_out(recipe, "generator", 2, context)
    assert m["senior_share"] == pytest.approx(0.5, abs=0.01)
    assert all(judged(t) and not t.trainable[t.start] for t in rollouts)
    assert all(((t.advantages != 0) <= t.trainable).all() for t in rollouts)
    judgements, m = roll_out(recipe, "verifier", 2, context, number=1)
    assert all(t.trainable[t.start :].all() for t in judgements) and "senior_share" not in m


def test_sglang_offers_no_tandem():
    settings = [
        "roles.generator={model: {path: some/model}, tandem: {}}",
        "recipe.target=megatron_rl.recipes.tandem:Tandem",
        "data.path=some/data",
        "engine.kind=sglang",
    ]
    with pytest.raises(ConfigError, match=r"roles.generator.tandem with engine.kind = 'sglang'"):
        check(load(TrainConfig, overrides=settings), 1)
    check(load(TrainConfig, overrides=[*settings[:-1], "engine.kind=vllm"]), 1)


def test_a_tandem_verifiers_partner_weighs_what_its_role_says(texts):  # noqa: F811
    recipe = Tango(verifications=3, **texts)
    context = context_of(mixed_generator, mixed_verifier, partner_weights={"verifier": 0.25, "generator": 0.5})
    for role, weight in (("verifier", 0.25), ("generator", 0.5)):
        rollouts, _ = roll_out(recipe, role, 1, context)
        assert {r.partner_weight for r in rollouts} == {weight}
    spent = context.watch.take()
    assert {"seconds/rollout", "seconds/reward", "seconds/review"} <= set(spent)
    assert all(0 <= seconds < 60 for seconds in spent.values()), "durations, not times of the day"
