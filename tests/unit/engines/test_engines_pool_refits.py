"""Refits of a pool's servers: who serves what when, what becomes of requests under way, and servers that fail or come
back.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from fake_servers import ADDRESS, Asked, RunEngines, engines_in, expected, failed_at, seed_of, until
from fake_vllm import GENERATE, JOIN, PAUSE, UPDATE, FakeVllm, logprob_of, token_at

from megatron_rl.engines.http import ServerLost
from megatron_rl.engines.pool.continuation import joined, seed_after, spans
from megatron_rl.engines.protocol import Completion, EngineError, Sampling, complete
from megatron_rl.types import Stop

SAMPLING = Sampling(max_tokens=8, n=2, seed=5)
PROMPTS = [[i + 1, 4] for i in range(6)]


@pytest.fixture
def run_engines(tmp_path):
    with engines_in(tmp_path) as made:
        yield made


def right(groups) -> bool:
    return [[c.tokens.tolist() for c in group] for group in groups] == [
        expected(p, SAMPLING, i) for i, p in enumerate(PROMPTS)
    ]


def continued(prompt: list[int], index: int, sample: int, cut: int) -> list[int]:
    """Tokens that were cut short after `cut`, and continued as a prompt of their own."""
    seed = seed_of(SAMPLING, index) + sample
    begun = [token_at(prompt, seed, place) for place in range(cut)]
    return begun + [
        token_at(prompt + begun, seed_after(seed, cut), place) for place in range(SAMPLING.max_tokens - cut)
    ]


def under_way(run_engines: RunEngines, fake: FakeVllm, **settings) -> Asked:
    """PROMPTS, each with three tokens written by version 1."""
    fake.stall_after = 3
    asked = Asked(run_engines.serving(**{"replicas": 1} | settings), PROMPTS, SAMPLING)
    until("requests under way", lambda: fake.running == len(PROMPTS))
    return asked


def test_a_refit_goes_through_its_steps_in_order(run_engines: RunEngines):
    fake = run_engines.start()
    pool = run_engines.open(replicas=1)
    assert pool.version == -1
    assert pool.begin_refit(4, ADDRESS, wait_s=3.0) == [0] and pool.version == 4
    assert pool.end_refit() == 1
    first = [path for path in fake.seen if path != "/v1/models"]
    assert first == [
        JOIN, PAUSE, "/start_weight_update", UPDATE, "/finish_weight_update", "/reset_prefix_cache", "/weight_info",
        "/resume",
    ]  # fmt: skip
    assert fake.joined == {"host": "127.0.0.1", "port": 1, "secret": "s3", "replica": 0} and fake.version == "4"
    run_engines.refit(5)
    assert fake.count(JOIN) == 1, "it has its location"
    pool.begin_refit(6, ("127.0.0.1", 2, "s3"), wait_s=3.0)
    assert pool.end_refit() == 1 and fake.joined == {"host": "127.0.0.1", "port": 2, "secret": "s3", "replica": 0}, (
        "another trainer, another store"
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_refit_aborts_is_continued_with_the_version_of_every_token(run_engines: RunEngines, replicas):
    fakes = [run_engines.start(i, stall_after=3) for i in range(replicas)]
    pool = run_engines.serving(replicas, replicas=replicas)
    asked = Asked(pool, PROMPTS, SAMPLING)
    until("requests under way", lambda: sum(f.running for f in fakes) == len(PROMPTS))
    assert run_engines.refit(2) == replicas
    for fake in fakes:
        fake.release()
    for i, group in enumerate(asked.result()):
        for j, c in enumerate(group):
            assert c.tokens.tolist() == continued(PROMPTS[i], i, j, 3) and c.stop is Stop.LENGTH
            assert c.versions == [(0, 1), (3, 2)]
            assert c.logprobs.tolist() == c.model_logprobs.tolist() == [logprob_of(t) for t in c.tokens]
    assert pool.failures == 0


@pytest.mark.parametrize("partial", ["continue", "restart"])
def test_experts_are_told_for_the_whole_text_also_of_what_a_refit_cuts(run_engines: RunEngines, partial):
    fake = run_engines.start()
    fake.experts = True
    asked = under_way(run_engines, fake, partial=partial)
    run_engines.refit(2)
    fake.release()
    for prompt, group in zip(PROMPTS, asked.result(), strict=True):
        for c in group:
            assert c.experts.dtype == np.int16
            assert c.experts.tolist() == [[[token]] for token in [*prompt, *c.tokens.tolist()][:-1]]


def test_what_a_refit_aborts_may_begin_anew(run_engines: RunEngines):
    fake = run_engines.start()
    asked = under_way(run_engines, fake, partial="restart")
    run_engines.refit(2)
    fake.release()
    groups = asked.result()
    assert right(groups) and {(tuple(c.versions), len(c.logprobs)) for g in groups for c in g} == {(((0, 2),), 8)}


def test_several_refits_cut_one_completion(run_engines: RunEngines):
    fake = run_engines.start()
    asked = under_way(run_engines, fake)
    run_engines.refit(2)
    until("all samples under way again", lambda: fake.running == 2 * len(PROMPTS))
    run_engines.refit(3)
    fake.release()
    assert {tuple(c.versions) for g in asked.result() for c in g} == {((0, 1), (3, 2), (6, 3))}


def test_the_rest_of_a_prompts_samples_are_written_at_the_same_time(run_engines: RunEngines):
    """They were written one after the other: n times as slow."""
    fake = run_engines.start(stall_after=3)
    asked = Asked(run_engines.serving(replicas=1), PROMPTS[:1], replace(SAMPLING, n=5))
    until("the request", lambda: fake.running == 1)
    run_engines.refit(2)
    until("all of its samples", lambda: fake.running == 5)
    fake.release()
    assert len(asked.result()[0]) == 5


def test_a_completion_cut_before_its_first_token_has_one_version(run_engines: RunEngines):
    """It had two that began at token 0, and counted as stale."""
    fake = run_engines.start(stall_after=0)
    asked = Asked(run_engines.serving(replicas=1), PROMPTS, SAMPLING)
    until("requests under way", lambda: fake.running == len(PROMPTS))
    run_engines.refit(2)
    fake.release()
    groups = asked.result()
    assert right(groups) and {tuple(c.versions) for g in groups for c in g} == {((0, 2),)}


def test_requests_are_kept_over_a_refit(run_engines: RunEngines):
    fake = run_engines.start()
    asked = under_way(run_engines, fake, pause="keep")
    run_engines.refit(2)
    fake.release()
    groups = asked.result()
    assert right(groups) and {tuple(c.versions) for g in groups for c in g} == {((0, 1), (3, 2))}
    assert fake.count(GENERATE) == len(PROMPTS)


def test_no_prefix_of_old_weights_is_read_after_a_refit_that_keeps_requests(run_engines: RunEngines):
    """vLLM emptied nothing while requests held parts of its cache, and answered 200."""
    fake = run_engines.start()
    asked = under_way(run_engines, fake, pause="keep")
    run_engines.refit(2)
    assert fake.cached == fake.version == "2"
    fake.release()
    asked.result()


def test_a_refit_begins_when_the_requests_it_waits_for_have_ended(run_engines: RunEngines):
    """The trainer was told to begin while servers waited for requests, and left them out as silent."""
    fake = run_engines.start()
    asked = under_way(run_engines, fake, pause="wait")

    def release() -> None:
        until("the pause", lambda: fake.count(PAUSE) == 2)
        fake.release()

    thread = threading.Thread(target=release)
    thread.start()
    run_engines.pool.begin_refit(2, ADDRESS, wait_s=5.0)
    assert fake.running == 0 and fake.count(PAUSE) == 2
    thread.join()
    assert run_engines.pool.end_refit() == 1
    groups = asked.result()
    assert right(groups) and {tuple(c.versions) for g in groups for c in g} == {((0, 1),)}


def test_answers_are_dated_by_the_version_that_was_asked(run_engines: RunEngines):
    """Without a word from the server the date was that of the pool when the answer came: a refit later, say."""

    class Silent:
        url = "http://silent"

        def __init__(self) -> None:
            self.asked, self.go, self.weights = threading.Event(), threading.Event(), -1

        def ready(self) -> bool:
            return True

        async def generate(self, prompt, sampling, *, seed, timeout_s, priority=0) -> list[Completion]:
            self.asked.set()
            assert await asyncio.to_thread(self.go.wait, 30)
            return [Completion(tokens=[1], logprobs=[0.0], stop=Stop.EOS)] * sampling.n

        async def score(self, sequences, k, *, timeout_s): ...

        def join(self, host, port, secret, replica) -> None: ...

        def pause(self) -> None: ...

        def update(self, version, wait_s) -> None:
            self.weights = version

        def resume(self) -> None: ...

        def version(self) -> int:
            return self.weights

        def hang_up(self) -> None: ...

        def close(self) -> None:
            self.go.set()

    server = Silent()
    run_engines.announce("http://silent")
    asked = Asked(run_engines.serving(replicas=1, connector=lambda listing: server), PROMPTS[:1], SAMPLING)
    assert server.asked.wait(30)
    run_engines.refit(2)
    server.go.set()
    assert [c.versions for c in asked.result()[0]] == [[(0, 1)], [(0, 1)]]


def test_a_server_that_ends_requests_without_a_refit_is_failing(run_engines: RunEngines):
    """Its requests were sent again without end."""
    fake = run_engines.start(stall_after=2)
    pool = run_engines.serving(replicas=1)
    asked = Asked(pool, PROMPTS[:1], SAMPLING)
    for attempt in range(3):
        until("the request", lambda: fake.count(GENERATE) == attempt + 1 and fake.running == 1)  # noqa: B023
        fake.abort()
    with pytest.raises(EngineError, match="failed 3 times: .*ended a request early, though no refit had begun"):
        asked.result()


def test_a_server_with_other_weights_than_it_should_have_is_failing(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2, version=3)
    fakes[0].version = "default"
    groups = complete(pool, PROMPTS, SAMPLING)
    assert right(groups) and pool.failures > 0 and {tuple(c.versions) for g in groups for c in g} == {((0, 3),)}
    fakes[1].version = "2"
    with pytest.raises(EngineError, match=r"answered with version (-1|2) of the weights, not 3"):
        complete(pool, PROMPTS, SAMPLING)


@pytest.mark.parametrize("told", ["4", str(2**31), str(10**30)])
def test_faults_a_server_with_a_version_that_nobody_made_is_failing(run_engines: RunEngines, told):
    """A version of the future was stored, and made the ages of rollouts negative; beyond int32 it ended the run."""
    fake = run_engines.start(0)
    pool = run_engines.serving(1, version=3)
    fake.version = told
    with pytest.raises(EngineError, match=f"answered with version {told} of the weights, and the newest is 3"):
        complete(pool, PROMPTS, SAMPLING)


def whole(count, **settings):
    return Completion(tokens=[1] * count, logprobs=[-1.0] * count, stop=Stop.EOS, **settings)


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ([(0, 3)], ""),
        ([(0, 2)], "answered with version 2 of the weights, not 3"),
        ([(0, 3), (1, 4)], "answered with version 4 of the weights, and the newest is 3"),
        ([(0, 2), (1, 3)], "answered with version 2 of the weights, not 3"),
    ],
)
def test_every_version_of_an_answer_is_between_that_which_was_asked_and_the_newest(
    run_engines: RunEngines, versions, problem
):
    run_engines.start(0)
    pool = run_engines.serving(1, version=3)
    [member], answer = pool.members.living(), whole(2, versions=versions)
    with pytest.raises(ServerLost, match=problem) if problem else nullcontext():
        assert pool.session()._checked(member, 3, answer, 0).versions == versions


def test_an_answer_that_arrives_when_its_session_is_closed_is_not_kept(run_engines: RunEngines):
    run_engines.start(0)
    session = run_engines.serving(1).session()
    session.ask(0, PROMPTS[0], SAMPLING)
    session.close()
    assert session._take_in(0, {0: whole(1)}) is None and not session._asked


def test_a_replica_that_fails_its_refit_is_out_while_the_others_serve(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2)
    fakes[1].fail(UPDATE, "error")
    assert run_engines.refit(2) == 1
    before = fakes[1].count(GENERATE)
    assert right(complete(pool, PROMPTS, SAMPLING)) and fakes[1].count(GENERATE) == before
    assert (
        "it is out until it takes version 2" in (pool.members.by_replica[1].state.why or "")
        and len(pool.members.living()) == 2
    )
    assert run_engines.refit(3) == 2 and fakes[1].count(JOIN) == 2, "it joins anew"
    assert right(complete(pool, PROMPTS, SAMPLING)) and fakes[1].count(GENERATE) > before


def test_a_server_that_updates_to_something_else_is_out(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2)
    fakes[0].fail("/weight_info", "shape")
    assert run_engines.refit(2) == 1
    assert right(complete(pool, PROMPTS, SAMPLING)) and fakes[0].count(GENERATE) == 0


def test_requests_kept_by_a_server_that_fails_its_refit_are_answered_elsewhere(run_engines: RunEngines):
    """It stays paused: they waited for their deadline."""
    fakes = [run_engines.start(0, stall_after=3), run_engines.start(1, stall_after=3)]
    pool = run_engines.serving(2, pause="keep", request_timeout_s=600.0)
    asked = Asked(pool, PROMPTS, SAMPLING)
    until("requests at both", lambda: [f.running for f in fakes] == [3, 3])
    fakes[1].fail(UPDATE, "error")
    assert run_engines.refit(2) == 1
    fakes[0].release()
    assert right(asked.result())


def test_a_replica_started_anew_serves_nothing_before_its_refit(run_engines: RunEngines):
    first, other = run_engines.start(0), run_engines.start(1)
    pool = run_engines.serving(2)
    run_engines.beats[0].clear()
    first.close()
    second = run_engines.start(0)
    until("its return", lambda: pool.members.by_replica[0].server.url == second.url and len(pool.members.living()) == 2)
    assert right(complete(pool, PROMPTS, SAMPLING))
    assert second.seen == [] and other.count(GENERATE) >= len(PROMPTS)
    refreshes = run_engines.refreshes()
    assert right(complete(pool, PROMPTS, SAMPLING))
    assert refreshes == [[0]] and second.version == "1" and other.count(UPDATE) == 1, "the others are left alone"
    assert right(complete(pool, PROMPTS * 2, SAMPLING)[:6]) and second.count(GENERATE) > 0 and refreshes == [[0]]


def test_a_replica_that_was_silent_is_stale_until_a_refit(run_engines: RunEngines):
    fake = run_engines.start()
    pool = run_engines.serving(replicas=1, lost_after_s=2.0)
    run_engines.beats[0].clear()
    run_engines.living(0)
    assert (
        pool.members.by_replica[0].state.version is None
        and pool.members.by_replica[0].lost == "no sign of life for 2 s"
    )
    run_engines.beats[0].set()
    run_engines.living(1)
    assert pool.members.by_replica[0].state.version is None and pool.members.serving() == []
    refreshes = run_engines.refreshes()
    assert right(complete(pool, PROMPTS, SAMPLING)) and set(map(tuple, refreshes)) == {(0,)} and fake.count(JOIN) >= 2


def test_refreshes_are_for_the_owner_alone_and_never_within_a_refit(run_engines: RunEngines):
    """They are collective: another thread's, or one in the middle of a refit, waits for ranks that are elsewhere."""
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.open()
    run_engines.living(2)
    fakes[1].fail(UPDATE, "error")
    run_engines.refit(1)
    failed_at(pool, 1, -1e9)  # long ago
    refreshes = run_engines.refreshes()
    assert right(Asked(pool, PROMPTS, SAMPLING).result()) and refreshes == []
    pool.begin_refit(1, ADDRESS, [0], wait_s=5.0)
    until("the update", lambda: pool.members.serving())
    assert right(complete(pool, PROMPTS, SAMPLING)) and refreshes == []
    pool.end_refit()
    assert right(complete(pool, PROMPTS, SAMPLING)) and refreshes == [[1]]


def test_refits_and_requests_from_two_threads(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2)
    for version in range(2, 12):
        asked = Asked(pool, PROMPTS * 4, SAMPLING)
        until("a request", lambda: any(f.running for f in fakes) or not asked._thread.is_alive())  # noqa: B023
        assert run_engines.refit(version) == 2
        groups = asked.result()
        assert all(len(c.tokens) == 8 and c.versions[-1][1] in (version - 1, version) for g in groups for c in g)
    assert all(m.load == m.requests == 0 for m in pool.members.living())


def test_a_refit_is_no_wait_for_a_server(run_engines: RunEngines):
    """A run that was asked to leave lost its rollouts when all servers took weights; a long refit was said to be a
    wait, and ended it.
    """
    fake = run_engines.start()
    asked = under_way(run_engines, fake, wait_s=0.5)
    run_engines.pool.members.hopeless = lambda: "asked to leave"
    fake.fail(UPDATE, "hang")
    run_engines.pool.begin_refit(2, ADDRESS, wait_s=60.0)
    until("an update that takes long", lambda: fake.count(UPDATE) == 2)
    with pytest.raises(AssertionError, match="no answer"):
        asked.result(timeout_s=1.0)
    run_engines.pool.members.by_replica[0].server.hang_up()
    assert run_engines.pool.end_refit() == 0
    with pytest.raises(EngineError, match="asked to leave"):
        asked.result()


def test_servers_are_in_a_refit_from_the_first_pause_on(run_engines: RunEngines, monkeypatch):
    """A request that finds no serving server then would take the pause for the loss of all servers."""
    run_engines.start()
    pool, seen = run_engines.serving(1), []
    (member,) = pool.members.living()
    pause = member.server.pause
    monkeypatch.setattr(member.server, "pause", lambda: (seen.append(pool.members.refitting), pause()))
    assert run_engines.refit(2) == 1
    assert seen == [True] and not pool.members.refitting


def test_a_first_refit_waits_for_a_first_server(run_engines: RunEngines):
    pool = run_engines.open()
    timer = threading.Timer(0.2, run_engines.start)
    timer.start()
    assert pool.begin_refit(1, ADDRESS, wait_s=5.0) == [0] and pool.end_refit() == 1
    assert pool.begin_refit(1, ADDRESS, [1], wait_s=5.0) == [], "there is no such server now"
    assert pool.end_refit() == 0 and right(complete(pool, PROMPTS, SAMPLING))
    timer.join()


def test_spans_of_versions():
    assert spans([(0, 3)], 0) == [(0, 3)]
    assert spans([(0, 3), (5, 4)], 5) == [(0, 3)]
    assert spans([(0, 3), (0, 4), (2, 4), (5, 5)], 9) == [(0, 4), (5, 5)]
    assert spans([(0, 3), (2, 4), (2, 3)], 9) == [(0, 3)]
    begun = Completion(
        tokens=[1, 2], logprobs=[-1.0, -2.0], stop=Stop.ABORTED, model_logprobs=[-1.0, -2.0], versions=[(0, 1), (1, 2)]
    )
    more = Completion(tokens=[3], logprobs=[-3.0], stop=Stop.EOS, model_logprobs=None, versions=[(0, 2)])
    both = joined(begun, more)
    assert (both.tokens.tolist(), both.logprobs.tolist()) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert both.tokens.dtype == np.int32 and both.stop is Stop.EOS and both.model_logprobs is None
    assert both.versions == [(0, 1), (1, 2)]
