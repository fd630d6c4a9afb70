"""What a run says and when it ends while no server serves."""

import logging
import time
from types import SimpleNamespace

import pytest
from fake_servers import Asked, engines_in, until
from fake_vllm import GENERATE

from megatron_rl.engines.pool import membership
from megatron_rl.engines.pool.membership import FIRST_SAY_S, SAY_S, Members, Waiting
from megatron_rl.engines.protocol import EngineError, Sampling


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def members(wait_s):
    return SimpleNamespace(
        check_open=lambda: None, limits=SimpleNamespace(wait_s=wait_s), role="solver", known=lambda: "none is known",
        waits=lambda: None, hopeless=lambda: None,
    )  # fmt: skip


@pytest.mark.parametrize("wait_s, first", [(1000.0, FIRST_SAY_S), (8.0, 2.0)])
def test_a_wait_is_told_soon_then_now_and_then_and_ends_with_its_limit(clock, caplog, wait_s, first):
    waiting, said = Waiting(members(wait_s)), []
    with pytest.raises(EngineError, match=f"no solver engine for {wait_s:g} s .engine.wait_s.: none is known"):
        for tick in range(2 * int(wait_s) + 10):
            clock.s = 100.0 + tick / 2
            before = len(caplog.records)
            waiting.on()
            said += [tick / 2] * (len(caplog.records) - before)
    assert tick / 2 == wait_s + 0.5, "the limit itself still counts"
    assert said[0] == first + 0.5 and len(said) == (33 if wait_s == 1000 else 1)
    assert {later - sooner for sooner, later in zip(said, said[1:], strict=False)} <= {SAY_S + 0.5}


def test_a_wait_begins_anew_after_a_server_served(clock, caplog):
    caplog.set_level(logging.WARNING)
    waiting = Waiting(members(10.0))
    waiting.on()
    clock.s += 9
    waiting.over()
    waiting.on()
    clock.s += 9
    waiting.on()
    assert [record.message for record in caplog.records] == ["waiting for a solver engine for 9 s: none is known"]


def test_a_wait_that_is_hopeless_ends_at_once(clock):
    left = members(10.0)
    left.hopeless = lambda: "all have left"
    with pytest.raises(EngineError, match="all have left"):
        Waiting(left).on()


def test_closed_members_are_asked_nothing():
    closing = SimpleNamespace(role="solver", closing=SimpleNamespace(is_set=lambda: True))
    with pytest.raises(EngineError, match="the pool of solver engines was closed"):
        Members.check_open(closing)


def test_the_pool_looks_around_although_nothing_happens(tmp_path):
    with engines_in(tmp_path) as run_engines:
        line, looks = run_engines.open()._dispatcher._queue, []
        line.look = lambda: looks.append(1)
        until("it looks", lambda: len(looks) >= 3, timeout_s=30)


def test_occupied_places_are_counted_up_to_the_batch_of_each_server(tmp_path):
    with engines_in(tmp_path) as run_engines:
        fake = run_engines.start(0, stall_after=1)
        start = time.monotonic()
        prompts, sampling = [[4, 5, i] for i in range(12)], Sampling(max_tokens=3, n=2)
        asked = Asked(run_engines.serving(1, replicas=2, max_batch=4, max_sequences=100), prompts, sampling)
        members = run_engines.pool.members
        until("all requests", lambda: fake.running == 12)
        before, begun = members.occupied_s(), time.monotonic()
        until("some time", lambda: time.monotonic() - begun > 0.05)
        end = time.monotonic()
        during = members.occupied_s() - before
        fake.release()
        assert len(asked.result()) == 12 and members.limits.places == 8
        assert 4 * 0.05 <= during <= 4 * (time.monotonic() - begun)  # 24 sequences in a batch of 4
        assert 0 <= before <= 4 * (end - start)
        empty = members.occupied_s()
        assert members.occupied_s() == empty  # no request is in progress


def test_samples_of_an_iteration_ahead_of_training_free_their_places_one_by_one(tmp_path):
    """Each sample is a request, with the same tokens as in a request for the whole group."""
    sampling, found = Sampling(max_tokens=5, n=4, seed=7), []
    with engines_in(tmp_path) as run_engines:
        fake, pool = run_engines.start(0), run_engines.serving(1)
        for priority, wanted in ((0, 1), (3, 4)):
            before, session = fake.count(GENERATE), pool.session(priority)
            session.ask(0, [4, 5, 6], sampling)
            [(_, samples)] = session.answers()
            assert fake.count(GENERATE) - before == wanted
            found.append([sample.tokens.tolist() for sample in samples])
    assert found[0] == found[1] and len({*map(tuple, found[0])}) == 4
