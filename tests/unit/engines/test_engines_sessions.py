"""Sessions with servers: asks at any time with a sampling each, prefixes that are kept, scores; and servers whose
weights are fixed.
"""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from fake_servers import TOKEN, RunEngines, engines_in, expected, until
from fake_vllm import GENERATE, SCORE, logprob_of, top_of

from megatron_rl.engines.http import RequestRefused
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.pool.membership import Limits, Members
from megatron_rl.engines.pool.server_pool import ServerEngine, given
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.engines.vllm.client import VllmServer
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.lib.frames import pack, unpack
from megatron_rl.session.server_connection import connect

SAMPLING = Sampling(max_tokens=6, n=2, seed=3)
PROMPTS = [[i + 1, 7, 9] for i in range(12)]


@pytest.fixture
def run_engines(tmp_path):
    with engines_in(tmp_path) as made:
        yield made


def tokens(group) -> list[list[int]]:
    return [c.tokens.tolist() for c in group]


def test_every_ask_has_its_own_sampling_and_any_key(run_engines: RunEngines):
    run_engines.start()
    session = run_engines.serving(replicas=1).session()
    asks = {-3: SAMPLING, 1 << 62: Sampling(max_tokens=2, n=3, seed=9), 5: Sampling(max_tokens=4, seed=9)}
    for key, sampling in asks.items():
        session.ask(key, np.array(PROMPTS[0]), sampling)
    found = dict(session.answers())
    assert {key: tokens(group) for key, group in found.items()} == {
        key: expected(PROMPTS[0], sampling, key) for key, sampling in asks.items()
    }
    with pytest.raises(ValueError, match="key 5 was asked before in this session"):
        session.ask(5, PROMPTS[1], SAMPLING)
    with pytest.raises(ValueError, match=r"sampling.top_p = 0.0"):
        session.ask(6, PROMPTS[1], Sampling(max_tokens=3, top_p=0.0))


def test_answers_wait_for_those_who_may_ask_and_for_nobody_else(run_engines: RunEngines):
    run_engines.start()
    session = run_engines.serving(replicas=1).session()
    assert list(session.answers()) == []
    inside, go = threading.Event(), threading.Event()

    def ask() -> None:
        with session.asking():
            inside.set()
            assert go.wait(30)
            session.ask(1, PROMPTS[1], SAMPLING)

    thread = threading.Thread(target=ask)
    thread.start()
    assert inside.wait(30)
    session.ask(0, PROMPTS[0], SAMPLING)
    seen = []
    for key, _ in session.answers():
        seen.append(key)
        go.set()
    thread.join()
    assert seen == [0, 1]


def test_an_asker_that_fails_does_not_keep_the_reader(run_engines: RunEngines):
    run_engines.start()
    session = run_engines.serving(replicas=1).session()
    with pytest.raises(LookupError), session.asking():
        session.ask(0, PROMPTS[0], SAMPLING)
        raise LookupError
    assert [key for key, _ in session.answers()] == [0]


def test_a_conversation_stays_with_the_server_that_holds_its_prefix(run_engines: RunEngines):
    fakes = [run_engines.start(0, stall_after=0), run_engines.start(1, stall_after=0)]
    session = run_engines.serving(2).session()
    for key in (0, 1):  # one at each server
        session.ask(key, PROMPTS[key], SAMPLING)
        until("it", lambda: sum(f.running for f in fakes) == key + 1)  # noqa: B023
    for fake in fakes:
        fake.release()
    first = {prompt: i for i, fake in enumerate(fakes) for prompt in fake.prompts}
    assert len(dict(session.answers())) == 2 and sorted(first.values()) == [0, 1]
    for turn in range(3):
        key = 10 * (turn + 1)
        for home in (0, 1):
            before = [f.count(GENERATE) for f in fakes]
            session.ask(key + home, [*PROMPTS[home], turn], SAMPLING, after=home if turn == 0 else key + home - 10)
            dict(session.answers())
            here = first[tuple(PROMPTS[home])]
            assert fakes[here].count(GENERATE) == before[here] + 1


def test_a_prefix_is_not_worth_a_much_more_loaded_server(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    session = run_engines.serving(2, max_sequences=16).session()
    session.ask(0, PROMPTS[0], SAMPLING)
    dict(session.answers())
    [home] = [f for f in fakes if f.count(GENERATE)]
    [other] = [f for f in fakes if f is not home]
    home.stall_after = 0
    for key in (1, 2, 3):  # 2 sequences each: up to 4 more than elsewhere are borne
        session.ask(key, [*PROMPTS[0], key], SAMPLING, after=0)
        until("it", lambda: home.running == key)  # noqa: B023
    session.ask(4, [*PROMPTS[0], 4], SAMPLING, after=0)
    until("the other's answer", lambda: other.count(GENERATE) == 1)
    home.release()
    assert len(dict(session.answers())) == 4


def test_what_is_called_off_is_not_sent_and_the_session_goes_on(run_engines: RunEngines):
    fake = run_engines.start(stall_after=0)
    fake.passing = PROMPTS[:1]
    session = run_engines.serving(replicas=1, max_sequences=4).session()
    for key, prompt in enumerate(PROMPTS):
        session.ask(key, prompt, SAMPLING)
    for key, _ in session.answers():
        assert key == 0
        break
    fake.release()
    session.ask(99, PROMPTS[3], SAMPLING)
    assert [key for key, _ in session.answers()] == [99]
    assert fake.count(GENERATE) <= 4, "two more were on their way"
    session.close()
    with pytest.raises(EngineError, match="the session was closed"):
        session.ask(100, PROMPTS[3], SAMPLING)


def test_a_session_may_be_closed_while_another_thread_reads_it(run_engines: RunEngines):
    fake = run_engines.start(stall_after=0)
    session = run_engines.serving(replicas=1).session()
    session.ask(0, PROMPTS[0], SAMPLING)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(key for key, _ in session.answers()))
    thread.start()
    until("the request", lambda: fake.running == 1)
    session.close()
    thread.join(30)
    assert not thread.is_alive() and found == []


def scores_of(sequence: list[int]) -> list[float]:
    return [0.0, *(np.float32(logprob_of(token)) for token in sequence[1:])]


def test_scores_are_spread_over_the_servers_and_failures_asked_elsewhere(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2)
    some = [list(range(1, n)) for n in (3, 9, 2, 30, 5)]
    assert [each.tolist() for each in pool.score(some)] == [scores_of(each) for each in some]
    assert sorted(n for fake in fakes for n in fake.scored) == [2, 3] and pool.failures == 0
    fakes[0].fail(SCORE, "error", "nan", "few", "garbage")
    assert [each.tolist() for each in pool.score(some * 4)] == [scores_of(each) for each in some * 4]
    assert pool.failures > 0 and pool.score([]) == []
    for each, scores in zip(some, pool.score_top(some, 3), strict=True):
        assert scores.logprobs.tolist() == scores_of(each) and scores.ids.dtype == np.int32
        assert scores.ids.tolist() == [[0] * 3, *top_of(np.array(each[1:]), 3).tolist()]
        assert scores.top_logprobs[1:].tolist() == [[logprob_of(t) for t in ids] for ids in scores.ids[1:]]
    for fake in fakes:
        fake.fail(SCORE, *["nan"] * 9)
    with pytest.raises(EngineError, match="failed 3 times: .*log-probs that are not numbers"):
        pool.score(some)


def test_scores_are_of_one_version_of_the_weights(run_engines: RunEngines):
    fake, asked, go = run_engines.start(), [], threading.Event()

    class Slow(VllmServer):
        async def score(self, sequences, k, *, timeout_s):
            asked.append(fake.version)
            assert await asyncio.to_thread(go.wait, 30)
            return await super().score(sequences, k, timeout_s=timeout_s)

    pool = run_engines.serving(
        replicas=1, connector=lambda listing: Slow(listing.url, TOKEN, Vllm(), 5, ModelFacts(vocab=97))
    )
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.extend(pool.score([[1, 2]])))
    thread.start()
    until("the request", lambda: asked)
    run_engines.refit(2)
    go.set()
    thread.join(30)
    assert asked == ["1", "2"] and found[0].tolist() == scores_of([1, 2])


def test_texts_of_a_call_that_was_refused_are_not_scored_any_more(run_engines: RunEngines):
    asked, go = list[int](), threading.Event()

    class Refusing(VllmServer):
        async def score(self, sequences, k, *, timeout_s):
            asked.append(int(sequences[0][0]))
            if len(asked) == 1:
                raise RequestRefused("it is too long")
            assert await asyncio.to_thread(go.wait, 30)
            return await super().score(sequences, k, timeout_s=timeout_s)

    server = Refusing(run_engines.start().url, TOKEN, Vllm(), 5, ModelFacts(vocab=97))
    engine = ServerEngine(Members("judge", Limits(servers=3, at_once=1), servers=[server]), look_s=30.0)
    with pytest.raises(RequestRefused, match="it is too long"):
        engine.score([[1, 2], [2, 2], [3, 2]])
    go.set()
    engine.score([[4, 2]])
    assert asked == [1, 2, 4], "the second text was sent before the caller knew that the first was refused"
    engine.close()


def test_servers_with_fixed_weights_serve_without_a_refit_also_when_they_come_back(run_engines: RunEngines):
    """A role without a policy has such."""
    fake = run_engines.start()
    pool = run_engines.open(fixed=True, replicas=1, lost_after_s=2.0)
    assert pool.version == 0
    [[one, _]] = complete(pool, PROMPTS[:1], SAMPLING)
    assert one.versions == [(0, 0)]
    run_engines.beats[0].clear()
    run_engines.living(0)
    run_engines.beats[0].set()
    assert len(complete(pool, PROMPTS, SAMPLING)) == len(PROMPTS)
    assert set(fake.seen) <= {GENERATE, "/v1/models"}


@pytest.fixture
def two_given(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    listings = run_engines.registry.read("generator")
    limits = Limits(servers=2, at_once=8, attempts=2)
    engine = given("judge", [connect(Vllm(), TOKEN, 5.0)(each) for each in listings], limits)
    yield engine, fakes
    engine.close()


def test_a_request_that_a_given_server_fails_goes_to_the_other(two_given):
    engine, fakes = two_given
    fakes[0].fail(GENERATE, "error")
    fakes[1].fail(GENERATE, "error")
    fakes[1].fail(SCORE, "error")
    session = engine.session()
    session.ask(0, [1, 2], SAMPLING)
    with pytest.raises(EngineError, match=r"failed 2 times: .*500: .*500: Internal Server Error$"):
        dict(session.answers())
    [group] = complete(engine, [[1, 2]], SAMPLING)
    assert tokens(group) == expected([1, 2], SAMPLING, 0) and group[0].versions == [(0, 0)]
    assert engine.score([[1, 2]] * 4)[3].tolist() == scores_of([1, 2])


def test_a_given_server_that_fails_at_once_does_not_draw_all_requests_to_it(two_given):
    """It always seemed the least loaded one."""
    engine, fakes = two_given
    fakes[0].fail(GENERATE, *["error"] * 99)
    groups = complete(engine, PROMPTS, SAMPLING)
    assert [tokens(group) for group in groups] == [expected(p, SAMPLING, i) for i, p in enumerate(PROMPTS)]
    assert fakes[0].count(GENERATE) < len(PROMPTS)


def test_frames_that_are_none_are_found_out():
    frame = pack({"n": 1}, {"tokens": np.arange(5, dtype=np.int32), "experts": np.ones((2, 3, 1), np.int16)})
    about, arrays = unpack(frame)
    assert about == {"n": 1} and arrays["tokens"].tolist() == [0, 1, 2, 3, 4] and arrays["experts"].shape == (2, 3, 1)
    assert len(pack(None, {"tokens": np.zeros(1000, np.int32)})) < 4000 + 100
    for broken in (b"", b"{}", frame[:-1], frame + b"\0", b"\xff" * 40, frame.replace(b"int32", b"int64")):
        with pytest.raises(ValueError):
            unpack(broken)
    with pytest.raises(TypeError, match="complex64 does not travel"):
        pack(None, {"tokens": np.zeros(3, np.complex64)})
