"""Two models writing one text in the embedded engine: the equality checks of the method, and who is said to have
written what."""

from __future__ import annotations

from pathlib import Path

import conformance
import numpy as np
import pytest
import torch
from tiny_models import make_model
from toys import characters

from megatron_rl.algorithms.tandem_authors import Rule, boundaries, replay
from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, TandemSampling, complete
from megatron_rl.weights import hf_model

VOCAB = 97
RULES = {
    "bernoulli": Rule(strategy="bernoulli"),
    "alternating": Rule(strategy="alternating"),
    "chunk": Rule(strategy="chunk", chunk_size=3),
    "sentence": Rule(strategy="sentence"),
    "word": Rule(max_gap=4),
    "nobody": Rule(strategy="bernoulli", p=0.0),
    "given": Rule(boundary_ids=str(Path(__file__).parents[2] / "helpers/boundary_ids.json")),
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
    sampling = Sampling(**{"max_tokens": 40, "n": 3, "seed": 5} | settings, tandem=rule and TandemSampling(rule=rule))
    return complete(engine, PROMPTS, sampling)


def told(groups):
    """Returns tokens and log-probs of every completion, and the authors where there are some, as lists."""
    arrays = [[(c.tokens, c.logprobs, c.authors) for c in group] for group in groups]
    return [[tuple(None if a is None else a.tolist() for a in c) for c in group] for group in arrays]


def tokens_of(groups):
    return [[c.tokens.tolist() for c in group] for group in groups]


@pytest.mark.parametrize("name", RULES)
def test_the_same_weights_twice_are_the_single_model_when_greedy(models, name):
    alone = drawn(engine_of(models, None), None, temperature=0.0)
    tandem = drawn(engine_of(models, "senior"), RULES[name], temperature=0.0)
    assert tokens_of(tandem) == tokens_of(alone)
    assert any(len(set(c.authors.tolist())) == 2 for group in tandem for c in group) or name in ("sentence", "nobody")


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_p_of_one_is_the_senior_alone(models, strategy):
    alone = drawn(engine_of(models, None), None)
    tandem = drawn(engine_of(models, "junior"), Rule(strategy=strategy, p=1.0))
    assert [[c[:2] for c in group] for group in told(tandem)] == [[c[:2] for c in group] for group in told(alone)]
    assert all(c.authors.all() for group in tandem for c in group)


def test_p_of_zero_is_the_junior_alone(models):
    junior = EmbeddedEngine(models / "junior", tokenizer=characters())
    junior.load_pretrained()
    tandem = drawn(engine_of(models, "junior"), RULES["nobody"])
    assert tokens_of(tandem) == tokens_of(drawn(junior, None))


@pytest.mark.parametrize("junior", ["junior", "small"])
@pytest.mark.parametrize("name", RULES)
def test_every_token_has_its_authors_log_prob_and_the_authors_are_those_of_a_replay(models, name, junior):
    judges = [conformance.Judge(models / model) for model in ("senior", junior)]
    ids = boundaries(characters(), RULES[name])
    engine = engine_of(models, junior, max_batch=5)  # rows come and go, and move
    for i, group in enumerate(drawn(engine, RULES[name])):
        for j, c in enumerate(group):
            authors = replay(RULES[name], ids, sampling_seeds.request_seed(5, i) + j, c.tokens)
            assert c.authors.tolist() == list(authors) and c.authors.dtype == bool
            senior, other = (judge.logprobs(PROMPTS[i], c) for judge in judges)
            assert c.logprobs == pytest.approx(np.where(c.authors, senior, other), abs=1e-4)


def test_a_text_that_is_gone_on_with_keeps_its_authors(models):
    """The pool goes on so with a completion that a refit cut short."""
    engine = engine_of(models, "junior")
    [[whole]] = complete(engine, PROMPTS[:1], Sampling(max_tokens=40, tandem=TandemSampling(rule=RULES["word"])))
    head = whole.tokens[:13].tolist()
    more = TandemSampling(rule=RULES["word"], seed=sampling_seeds.request_seed(0, 0), written=len(head))
    [[rest]] = complete(engine, [PROMPTS[0] + head], Sampling(max_tokens=27, temperature=0.0, tandem=more))
    ids = boundaries(characters(), RULES["word"])
    wanted = replay(RULES["word"], ids, sampling_seeds.request_seed(0, 0), head + rest.tokens.tolist())
    assert [*whole.authors[:13], *rest.authors] == list(wanted)


def test_at_step_0_a_tandem_with_itself_has_the_distribution_of_the_senior_alone(models):
    """First three tokens of 1,500 texts each: their joint counts are as near as those of two draws of the senior
    alone."""
    engine = engine_of(models, "senior")

    def counts(seed, tandem):
        sampling = Sampling(max_tokens=3, temperature=0.3, n=1500, seed=seed, tandem=tandem)
        [group] = complete(engine, PROMPTS[:1], sampling)
        found = torch.zeros(3, VOCAB)
        for c in group:
            found[torch.arange(len(c.tokens)), torch.tensor(c.tokens, dtype=torch.int64)] += 1
        return found / 1500

    solo, again, tandem = counts(1, None), counts(2, None), counts(3, TandemSampling(rule=Rule(strategy="bernoulli")))

    def distance(a, b):
        return (0.5 * (a - b).abs().sum(dim=-1)).tolist()

    assert all(t < 1.4 * s + 0.02 for t, s in zip(distance(tandem, solo), distance(again, solo), strict=True))
    other = engine_of(models, "junior")
    engine = other
    wrong = counts(3, TandemSampling(rule=Rule(strategy="bernoulli")))
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
    assert told(completions) == told(drawn(engine_of(models, None), None))
    assert completions[0][0].authors is None


def test_a_refit_writes_the_senior_alone(models):
    engine = engine_of(models, "senior")
    places = engine.targets
    engine.begin_refit()
    for name, tensor in hf_model.read_tensors(models / "junior"):
        rows = tensor.view(len(tensor), -1)
        places.write(name, (0, 0, *rows.shape), rows)
    engine.commit_refit(4)
    judges = [conformance.Judge(models / model) for model in ("junior", "senior")]  # they have changed places
    for prompt, group in zip(PROMPTS, drawn(engine, RULES["word"]), strict=True):
        for c in group:
            new, frozen = (judge.logprobs(prompt, c) for judge in judges)
            assert c.logprobs == pytest.approx(np.where(c.authors, new, frozen), abs=1e-4)


def test_rows_with_and_without_the_junior_share_a_round(models):
    engine, rule = engine_of(models, "junior", max_batch=4), TandemSampling(rule=RULES["word"])
    session = engine.session()
    for key, prompt in enumerate(PROMPTS):
        tandem = rule if key % 2 else None
        session.ask(key, prompt, Sampling(max_tokens=20, n=2, seed=5, tandem=tandem))
    found = dict(session.answers())
    alone, both = drawn(engine, None, max_tokens=20, n=2), drawn(engine, RULES["word"], max_tokens=20, n=2)
    for key, group in found.items():
        for one, other in zip(group, (both if key % 2 else alone)[key], strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and np.array_equal(one.authors, other.authors)
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
