"""Two models writing one text in the embedded engine: the equality checks of the method, and who is said to have written what."""

from __future__ import annotations

import conformance
import pytest
import torch
from tiny_models import make_model
from toys import characters

from megatron_rl.algorithms.authors import Rule, boundaries, replay
from megatron_rl.engines import sampler
from megatron_rl.engines.base import Sampling, Tandem
from megatron_rl.engines.embedded import EmbeddedEngine
from megatron_rl.weights import hf

VOCAB = 97
RULES = {
    "bernoulli": Rule(strategy="bernoulli"),
    "alternating": Rule(strategy="alternating"),
    "chunk": Rule(strategy="chunk", chunk_size=3),
    "sentence": Rule(strategy="sentence"),
    "word": Rule(max_gap=4),
    "nobody": Rule(strategy="bernoulli", p=0.0),
}
PROMPTS = [[5, 9, 30], [8] * 17, [40], [7 + i for i in range(50)]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("tandem")
    make_model(base / "senior", vocab_size=VOCAB)
    make_model(base / "junior", vocab_size=VOCAB, seed=1)
    make_model(base / "small", vocab_size=VOCAB, seed=2, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
    return base


def engine_of(models, junior, **options):
    engine = EmbeddedEngine(models / "senior", tokenizer=characters(), junior=junior and models / junior, **options)
    engine.load_pretrained()
    return engine


def drawn(engine, rule, **settings):
    return engine.generate(
        PROMPTS, Sampling(**{"max_tokens": 40, "n": 3, "seed": 5} | settings, tandem=rule and Tandem(rule=rule))
    )


@pytest.mark.parametrize("name", RULES)
def test_the_same_weights_twice_are_the_single_model_when_greedy(models, name):
    alone = drawn(engine_of(models, None), None, temperature=0.0)
    tandem = drawn(engine_of(models, "senior"), RULES[name], temperature=0.0)
    assert [[c.tokens for c in group] for group in tandem] == [[c.tokens for c in group] for group in alone]
    assert any(len(set(c.authors)) == 2 for group in tandem for c in group) or name in ("sentence", "nobody")


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_p_of_one_is_the_senior_alone(models, strategy):
    alone = drawn(engine_of(models, None), None)
    tandem = drawn(engine_of(models, "junior"), Rule(strategy=strategy, p=1.0))
    assert [[(c.tokens, c.logprobs) for c in group] for group in tandem] == [
        [(c.tokens, c.logprobs) for c in g] for g in alone
    ]
    assert all(all(c.authors) for group in tandem for c in group)


def test_p_of_zero_is_the_junior_alone(models):
    junior = EmbeddedEngine(models / "junior", tokenizer=characters())
    junior.load_pretrained()
    tandem = drawn(engine_of(models, "junior"), RULES["nobody"])
    assert [[c.tokens for c in group] for group in tandem] == [
        [c.tokens for c in group] for group in drawn(junior, None)
    ]


@pytest.mark.parametrize("junior", ["junior", "small"])
@pytest.mark.parametrize("name", RULES)
def test_every_token_has_its_authors_log_prob_and_the_authors_are_those_of_a_replay(models, name, junior):
    judges = [conformance.Judge(models / model) for model in ("senior", junior)]
    ids = boundaries(characters(), RULES[name].strategy)
    engine = engine_of(models, junior, max_batch=5)  # rows come and go, and move
    for i, group in enumerate(drawn(engine, RULES[name])):
        for j, c in enumerate(group):
            assert c.authors == replay(RULES[name], ids, sampler.request_seed(5, i) + j, c.tokens)
            senior, other = (judge.logprobs(PROMPTS[i], c) for judge in judges)
            wanted = [a if mine else b for a, b, mine in zip(senior, other, c.authors, strict=True)]
            assert c.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_text_that_is_gone_on_with_keeps_its_authors(models):
    """As the pool does with a completion that a refit cut short."""
    engine = engine_of(models, "junior")
    [[whole]] = engine.generate(PROMPTS[:1], Sampling(max_tokens=40, tandem=Tandem(rule=RULES["word"])))
    head = whole.tokens[:13]
    more = Tandem(rule=RULES["word"], seed=sampler.request_seed(0, 0), written=len(head))
    [[rest]] = engine.generate([PROMPTS[0] + head], Sampling(max_tokens=27, temperature=0.0, tandem=more))
    ids = boundaries(characters(), "word")
    assert whole.authors[:13] + rest.authors == replay(
        RULES["word"], ids, sampler.request_seed(0, 0), head + rest.tokens
    )


def test_at_step_0_a_tandem_with_itself_has_the_distribution_of_the_senior_alone(models):
    """First three tokens of 1,500 texts each: their joint counts are as near as those of two draws of the senior alone."""
    engine = engine_of(models, "senior")

    def counts(seed, tandem):
        sampling = Sampling(max_tokens=3, temperature=0.3, n=1500, seed=seed, tandem=tandem)
        [group] = engine.generate(PROMPTS[:1], sampling)
        found = torch.zeros(3, VOCAB)
        for c in group:
            for place, token in enumerate(c.tokens):
                found[place, token] += 1
        return found / 1500

    solo, again, tandem = counts(1, None), counts(2, None), counts(3, Tandem(rule=Rule(strategy="bernoulli")))

    def distance(a, b):
        return (0.5 * (a - b).abs().sum(dim=-1)).tolist()

    assert all(t < 1.4 * s + 0.02 for t, s in zip(distance(tandem, solo), distance(again, solo), strict=True))
    other = engine_of(models, "junior")
    engine = other
    wrong = counts(3, Tandem(rule=Rule(strategy="bernoulli")))
    assert min(distance(wrong, solo)) > 3 * max(distance(again, solo)), "the test sees a junior that is another model"


def test_a_tandem_without_a_junior_and_one_of_another_vocabulary_are_refused(models, tmp_path):
    with pytest.raises(ValueError, match="no junior"):
        drawn(engine_of(models, None), RULES["word"])
    with pytest.raises(ValueError, match="one vocabulary"):
        EmbeddedEngine(models / "senior", junior=make_model(tmp_path / "other", vocab_size=96))
    with pytest.raises(ValueError, match="tokenizer"):
        engine = EmbeddedEngine(models / "senior", junior=models / "junior")
        engine.load_pretrained()
        drawn(engine, RULES["word"])


def test_without_a_tandem_an_engine_with_a_junior_is_the_senior(models):
    completions = drawn(engine_of(models, "junior"), None)
    assert completions == drawn(engine_of(models, None), None)
    assert completions[0][0].authors is None


def test_a_refit_writes_the_senior_alone(models):
    engine = engine_of(models, "senior")
    places = engine.targets
    engine.begin_refit()
    for name, tensor in hf.read_tensors(models / "junior"):
        rows = tensor.view(len(tensor), -1)
        places.write(name, (0, 0, *rows.shape), rows)
    engine.commit_refit(4)
    judges = [conformance.Judge(models / model) for model in ("junior", "senior")]  # they have changed places
    for prompt, group in zip(PROMPTS, drawn(engine, RULES["word"]), strict=True):
        for c in group:
            new, frozen = (judge.logprobs(prompt, c) for judge in judges)
            assert c.logprobs == pytest.approx(
                [a if mine else b for a, b, mine in zip(new, frozen, c.authors, strict=True)], abs=1e-4
            )
