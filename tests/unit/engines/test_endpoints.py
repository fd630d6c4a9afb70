"""Engines behind the URL of an OpenAI-compatible endpoint: what is asked, what is made of answers, and how errors are
told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_endpoint import FakeEndpoint
from one_process import CommandsAtOnce, OneProcess
from toys import EOS, characters

from megatron_rl.config.schema import ConfigError, Embedded, EndpointConfig, Model
from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.openai import OpenAiServer, open_endpoint
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.session.open_engines import Direct, open_engines
from megatron_rl.types import Stop
from megatron_rl.weights.hf_model import eos_tokens

SAMPLING = Sampling(max_tokens=4, n=2, seed=3)


@pytest.fixture
def opened(tmp_path):
    made = []

    def make(fake: FakeEndpoint, **settings):
        (tmp_path / "key").write_text("sk-secret\n")
        endpoint = EndpointConfig(
            **{"url": f"{fake.url}/v1/", "model": "judge", "key_file": str(tmp_path / "key")} | settings
        )
        engine = open_endpoint("judge", endpoint, characters(), ends={EOS}, environment={"KEY": "sk-secret"})
        made.extend([engine, fake])
        return engine

    yield make
    for each in made:
        each.close()


def test_token_ids_and_log_probs_come_from_an_endpoint_that_gives_them(opened):
    fake = FakeEndpoint()
    engine = opened(fake)
    groups = complete(engine, [[5, 6], [7]], SAMPLING)
    for completion in (c for group in groups for c in group):
        assert completion.tokens.tolist() == [10, 11, 12, 13] and completion.stop is Stop.LENGTH
        assert completion.logprobs.tolist() == completion.model_logprobs.tolist() == [-0.5] * 4
        assert completion.versions == [(0, 0)]
    assert engine.version == 0 and [len(group) for group in groups] == [2, 2]
    body = min(fake.asked, key=lambda asked: asked["prompt"] != [5, 6])
    assert (body["prompt"], body["model"], body["n"], body["max_tokens"]) == ([5, 6], "judge", 2, 4)
    assert body["return_token_ids"] and body["stop_token_ids"] == [EOS] and 0 <= body["seed"] < 1 << 63
    again = complete(engine, [[5, 6]], SAMPLING)
    assert again and fake.asked[-1]["seed"] == body["seed"]


def test_text_is_tokenised_where_an_endpoint_gives_no_ids(opened):
    """Nothing is known of the log-probs of such tokens; the end of the text is an end-of-sequence token."""
    fake = FakeEndpoint(ids=False)
    fake.end = {"finish_reason": "stop"}
    engine = opened(fake, extensions=False, token_prompts=False)
    tokenizer = characters()
    [[one, _]] = complete(engine, [tokenizer.encode("hello")], SAMPLING)
    assert one.tokens.tolist() == [*tokenizer.encode("abc"), tokenizer.eos_token_id] and one.stop is Stop.EOS
    assert np.isnan(one.logprobs).all() and one.model_logprobs is None
    assert fake.asked[0]["prompt"] == tokenizer.decode(tokenizer.encode("hello"))
    assert not {"top_k", "stop_token_ids", "return_token_ids", "min_p"} & set(fake.asked[0])
    with pytest.raises(RequestRefused, match=r"sampling.top_k: .*set extensions: true"):
        complete(engine, [[5]], Sampling(max_tokens=3, top_k=5))
    with pytest.raises(EngineError, match=r"takes text alone \(token_prompts: false\)"):
        engine.score([[1, 2]])


@pytest.mark.parametrize(
    ("end", "sampling", "stop"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, {}, Stop.EOS),
        ({"finish_reason": "stop", "stop_reason": EOS}, {}, Stop.EOS),
        ({"finish_reason": "stop", "stop_reason": 12}, {"stop_tokens": (12,)}, Stop.STOP),
        ({"finish_reason": "stop", "stop_reason": "x"}, {"stop_strings": ("x",)}, Stop.STOP),
        ({"finish_reason": "stop"}, {"stop_strings": ("x",)}, Stop.STOP),
        ({"finish_reason": "stop"}, {}, Stop.EOS),
        ({"finish_reason": "length"}, {}, Stop.LENGTH),
    ],
)
def test_every_way_to_end_has_its_name(opened, end, sampling, stop):
    fake = FakeEndpoint()
    fake.end = end
    [[c]] = complete(opened(fake), [[5]], Sampling(max_tokens=4, **sampling))
    assert c.stop is stop


def test_log_probs_are_told_only_of_the_distribution_sampled_from(opened):
    """Endpoints tell those of the model at temperature 1, whatever was sampled from."""
    engine = opened(FakeEndpoint())
    [[cool]] = complete(engine, [[5]], Sampling(max_tokens=3, temperature=0.5))
    assert np.isnan(cool.logprobs).all() and cool.model_logprobs is None
    [greedy] = complete(engine, [[5]], Sampling(max_tokens=3, temperature=0.0, n=3))
    assert len(greedy) == 3 and greedy[0].logprobs.tolist() == [0.0] * 3
    assert greedy[2].model_logprobs.tolist() == [-0.5] * 3
    [[unread]] = complete(engine, [[5]], Sampling(max_tokens=3, logprobs=False))
    assert np.isnan(unread.logprobs).all()


def test_a_context_that_the_endpoint_tells_is_kept_to(opened):
    fake = FakeEndpoint(context=8)
    near, full = complete(opened(fake), [[5] * 6, [5] * 8], SAMPLING)
    assert [len(c.tokens) for c in near] == [2, 2]
    assert [(len(c.tokens), c.stop) for c in full] == [(0, Stop.LENGTH)] * 2 and len(fake.asked) == 1


def test_requests_that_wait_for_the_context_wait_for_one_answer(tmp_path):
    """Each asked anew behind the one before: an endpoint that fails slowly held up the last for as many times."""
    fake = FakeEndpoint(context=8)
    fake.hidden = True
    endpoint = EndpointConfig(url=fake.url, model="judge")
    server = OpenAiServer(endpoint, characters(), ends={EOS}, key=fake.key)

    async def at_once(count):
        asked = (server.generate(np.array([5] * 6), SAMPLING, seed=1, timeout_s=30.0) for _ in range(count))
        return await asyncio.gather(*asked, return_exceptions=True)

    async def twice():
        refused = await at_once(8)
        looked, fake.hidden = fake.looked, False
        return refused, looked, await at_once(8)

    refused, looked, answered = asyncio.run(twice())
    assert all(isinstance(each, ServerLost) for each in refused) and looked == 1
    assert all([len(c.tokens) for c in each] == [2, 2] for each in answered) and fake.looked == 2
    fake.close()


def test_busy_and_broken_answers_are_asked_for_again_and_counted(opened, monkeypatch):
    monkeypatch.setattr(OpenAiServer, "retry_after_s", 0.01)
    fake = FakeEndpoint()
    engine = opened(fake)
    fake.faults = [
        (429, {"Retry-After": "0"}, '{"error": "slow down"}'),
        (503, {}, "overloaded"),
        (200, {}, "no JSON"),
        (200, {}, '{"choices": 3}'),
    ]
    [[one]] = complete(engine, [[5]], Sampling(max_tokens=2))
    assert len(one.tokens) == 2 and engine.failures == 4


def test_an_endpoint_that_fails_too_often_is_named(opened, monkeypatch):
    monkeypatch.setattr(OpenAiServer, "retry_after_s", 0.01)
    fake = FakeEndpoint()
    engine = opened(fake, attempts=2)
    fake.faults = [(500, {}, "oh no"), (502, {}, "bad gateway")]
    with pytest.raises(EngineError, match=r"failed 2 times: .*500: oh no; .*502: bad gateway$") as info:
        complete(engine, [[5]], Sampling(max_tokens=2))
    assert fake.url in str(info.value) and "sk-secret" not in str(info.value)
    fake.faults = [(404, {}, "no such model")]
    with pytest.raises(RequestRefused, match="404: no such model"):
        complete(engine, [[5]], Sampling(max_tokens=2))


def test_an_endpoint_is_left_alone_for_as_long_as_it_asks(opened):
    fake = FakeEndpoint()
    engine = opened(fake)
    fake.faults = [(429, {"Retry-After": "1"}, "")]
    start = time.monotonic()
    complete(engine, [[5]], Sampling(max_tokens=2))
    assert time.monotonic() - start >= 1.0


def test_keys_are_read_where_the_settings_say_and_never_told(opened):
    fake = FakeEndpoint()
    assert complete(opened(fake, key_file=None, key_variable="KEY"), [[5]], SAMPLING)
    with pytest.raises(ConfigError, match="key_variable = NOTHING: there is no such environment variable"):
        opened(fake, key_file=None, key_variable="NOTHING")
    with pytest.raises(ConfigError, match="key_file = /nowhere/key: No such file"):
        opened(fake, key_file="/nowhere/key")
    fake.key = "another"
    with pytest.raises(ConfigError, match="refuses the API key: see key_file or key_variable") as info:
        complete(opened(fake), [[5]], SAMPLING)
    assert "sk-secret" not in str(info.value)


def test_scores_are_those_of_the_echoed_prompt(opened):
    fake = FakeEndpoint()
    engine = opened(fake)
    scores = engine.score([[4, 6, 8], [3], [2, 10]])
    assert [each.tolist() for each in scores] == [[0.0, -3.0, -4.0], [0.0], [0.0, -5.0]]
    assert all(each.dtype == np.float32 for each in scores)
    [body] = fake.asked
    assert body["prompt"] == [[4, 6, 8], [2, 10]] and body["echo"] and body["max_tokens"] == 0
    [top] = engine.score_top([[4, 6, 8]], 2)
    assert top.ids.tolist() == [[0, 0], [4, 5], [6, 7]] and top.logprobs.tolist() == [0.0, -3.0, -4.0]
    assert top.top_logprobs.tolist() == [[0.0, 0.0], [-2.0, -2.5], [-3.0, -3.5]]
    assert fake.asked[-1]["logprobs"] == 2 and fake.asked[-1]["return_tokens_as_token_ids"]
    with pytest.raises(EngineError, match="told 2 of the 9 likeliest tokens at a place"):
        engine.score_top([[4, 1]], 9)
    fake.ids = False
    with pytest.raises(EngineError, match="or not their ids: {'e': -2.0"):
        engine.score_top([[4, 6]], 2)
    with pytest.raises(EngineError, match="names the likeliest tokens by their text .extensions: false"):
        opened(fake, extensions=False).score_top([[4, 6]], 2)
    fake.scores = False
    with pytest.raises(EngineError, match=r"told 0 log-probs of a prompt of 2 tokens: it does not score prompts"):
        engine.score([[1, 2]])
    fake.faults = [(400, {}, "echo is not supported")]
    with pytest.raises(EngineError, match="does not score prompts .*echo is not supported"):
        engine.score([[1, 2]])


@pytest.fixture
def ends_of(monkeypatch):
    """Returns a function that opens an endpoint with the files of a model and returns the endpoint's end tokens."""

    def opened_ends(model: Model) -> frozenset[int]:
        told = []
        monkeypatch.setattr(
            "megatron_rl.session.open_engines.open_endpoint",
            lambda *_, ends, **more: told.append(ends) or SimpleNamespace(close=lambda: None),
        )
        role = SimpleNamespace(endpoint="judge", model=model)
        engines = SimpleNamespace(settings=Embedded(), opened={}, roles={"judge": role})
        with contextlib.ExitStack() as stack:
            tokenizers = {"judge": SimpleNamespace(eos_token_id=EOS)}
            open_engines(engines, tokenizers, OneProcess(), CommandsAtOnce(), stack, servers=Direct({}))
        return told[0]

    return opened_ends


def test_twins_the_end_tokens_of_an_endpoint_are_those_of_an_engine_for_its_model(tmp_path, ends_of):
    """generation_config.json names a further end token, as that of Llama's instruct models does. The tokenizer of a
    role may come from another directory, whose generation_config.json does not count."""
    model, apart = tmp_path / "model", tmp_path / "tokenizer"
    for directory, ends in ((model, "[7, 8]"), (apart, "6")):
        directory.mkdir()
        (directory / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    (model / "config.json").write_text('{"eos_token_id": 9, "model_type": "of_nobody"}')
    config = SimpleNamespace(eos_token_id=9)  # as transformers would read it, had it the family
    expected = eos_tokens(model, config, SimpleNamespace(eos_token_id=EOS))
    assert ends_of(Model(path=str(model))) == {EOS, 7, 8, 9} == expected
    assert ends_of(Model(path=str(model), tokenizer=str(apart))) == expected


@pytest.mark.parametrize("path", ["", "of/the_endpoint"])
def test_without_files_of_its_model_an_endpoint_has_the_end_tokens_of_its_tokenizers_directory(path, tmp_path, ends_of):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ends_of(Model(path=path, tokenizer=str(tmp_path))) == {EOS, 7, 8}
