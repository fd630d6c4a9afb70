"""The pool over fake servers that listen on real sockets: dispatch, servers that fail in every way, waiting, and the
registry.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
from fake_servers import ADDRESS, ROLE, TOKEN, Asked, RunEngines, engines_in, expected, failed_at, until
from fake_vllm import CAUSE, GENERATE, JOIN, SAID, FakeVllm, logprob_of

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.pool.dispatch import LOST_UNDER
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.engines.server_registry import Announcement, Listing, ServerRegistry
from megatron_rl.engines.vllm.client import VllmServer
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.types import Stop

SAMPLING = Sampling(max_tokens=6, n=2, seed=3)
PROMPTS = [[i + 1, 7, 9] for i in range(12)]


@pytest.fixture
def run_engines(tmp_path):
    with engines_in(tmp_path) as made:
        yield made


def right(groups, prompts=PROMPTS, sampling=SAMPLING) -> bool:
    return [[c.tokens.tolist() for c in group] for group in groups] == [
        expected(p, sampling, i) for i, p in enumerate(prompts)
    ]


def test_every_prompt_is_answered_n_times_in_order(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    groups = complete(run_engines.serving(2), PROMPTS, SAMPLING)
    assert right(groups) and sum(f.count(GENERATE) for f in fakes) == len(PROMPTS)
    for completion in (c for group in groups for c in group):
        assert completion.stop is Stop.LENGTH and completion.versions == [(0, 1)]
        wanted = [logprob_of(t) for t in completion.tokens]
        assert completion.logprobs.tolist() == completion.model_logprobs.tolist() == wanted
        assert completion.tokens.flags.writeable and completion.tokens.base is None, "of its own, not of the answer"
    assert complete(run_engines.pool, [], SAMPLING) == []


def test_greedy_answers_and_full_contexts(run_engines: RunEngines):
    run_engines.start()
    pool = run_engines.serving(replicas=1)
    [[a, b, c], [full, _, _]] = complete(
        pool, [[5], [5] * 200], Sampling(max_tokens=4, n=3, temperature=0.0, top_p=0.5)
    )
    assert a.tokens.tolist() == b.tokens.tolist() == c.tokens.tolist()
    assert a.logprobs.tolist() == [0.0] * 4 and a.model_logprobs.tolist() == [logprob_of(t) for t in a.tokens]
    assert len(full.tokens) == 0 and full.stop is Stop.LENGTH and full.versions == [(0, 1)]


def test_prompts_that_fill_the_context_are_counted_and_said(run_engines: RunEngines, caplog):
    """Their answers were empty, and nothing said why."""
    run_engines.start()
    pool = run_engines.serving(replicas=1)
    with caplog.at_level(logging.WARNING):
        complete(pool, [[5], [5] * 199], SAMPLING)
        assert "filled the model's context" not in caplog.text
        complete(pool, [[5] * 200, [5], [5] * 200], SAMPLING)
    assert f"{ROLE}: 1 prompt(s) so far filled the model's context, the last one with 200 tokens" in caplog.text
    with caplog.at_level(logging.WARNING):
        complete(pool, [[5] * 200] * 8, SAMPLING)
    assert caplog.text.count("filled the model's context") == 2 and f"{ROLE}: 10 prompt(s) so far" in caplog.text


def test_log_probs_that_nobody_reads_are_not_asked_for_and_could_not_be_trained_on(run_engines: RunEngines):
    run_engines.start()
    groups = complete(run_engines.serving(replicas=1), PROMPTS, replace(SAMPLING, logprobs=False))
    assert right(groups)
    for completion in (c for group in groups for c in group):
        assert completion.model_logprobs is None and len(completion.logprobs) == len(completion.tokens)
        assert np.isnan(completion.logprobs).all()


def test_requests_go_to_the_least_loaded(run_engines: RunEngines):
    fakes = [run_engines.start(0, stall_after=1), run_engines.start(1, stall_after=1)]
    asked = Asked(run_engines.serving(2), PROMPTS, SAMPLING)
    until("half of the requests at each", lambda: [f.running for f in fakes] == [6, 6])
    assert [m.load for m in run_engines.pool.members.living()] == [12, 12]
    for fake in fakes:
        fake.release()
    assert right(asked.result()) and [m.load for m in run_engines.pool.members.living()] == [0, 0]


def test_a_server_that_is_alone_gets_no_more_than_its_max_sequences(run_engines: RunEngines):
    """Requests for all replicas at once went to the one that was left."""
    fake = run_engines.start(0, stall_after=1)
    asked = Asked(run_engines.serving(1, replicas=4, max_sequences=7), PROMPTS, SAMPLING)
    until("a full server", lambda: fake.running == 3)
    fake.release()
    assert right(asked.result()) and fake.most_running == 3


def test_a_replica_killed_in_the_middle_of_a_batch_costs_no_answer(run_engines: RunEngines):
    run_engines.start(0)
    process = run_engines.start_process(1, "--stall-after=2")
    asked = Asked(run_engines.serving(2), PROMPTS, SAMPLING)
    victim = run_engines.pool.members.by_replica[1]
    until("work on it", lambda: victim.requests >= 4)
    process.kill()
    start = time.monotonic()
    assert right(asked.result()) and run_engines.pool.failures >= 4
    assert time.monotonic() - start < 10 and victim not in run_engines.pool.members.living()


def test_a_replica_that_stands_still_is_dropped_with_the_requests_it_holds(run_engines: RunEngines):
    """They waited for their deadline, however long ago the server was known to be lost."""
    run_engines.start(0)
    process = run_engines.start_process(1, "--stall-after=2")
    asked = Asked(run_engines.serving(2, lost_after_s=3.0, request_timeout_s=600.0), PROMPTS, SAMPLING)
    victim = run_engines.pool.members.by_replica[1]
    until("work on it", lambda: victim.requests >= 4)
    process.send_signal(signal.SIGSTOP)
    run_engines.beats[1].clear()
    assert right(asked.result()) and "no sign of life for 3 s" in (victim.lost or "")


def test_a_request_that_hangs_is_sent_elsewhere_after_its_deadline(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2, request_timeout_s=0.5)
    fakes[0].fail(GENERATE, *["hang"] * 3)
    assert right(complete(pool, PROMPTS[:1], SAMPLING), PROMPTS[:1])
    assert [f.count(GENERATE) for f in fakes] == [1, 1] and pool.failures == 1
    assert len(pool.members.living()) == 2, "it says that it is well"


def test_a_failed_request_is_not_sent_to_the_same_server_while_there_is_another(run_engines: RunEngines):
    """The broken server was the least loaded one, so that it got all attempts."""
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2)
    fakes[0].fail(GENERATE, *["error"] * 99)
    assert right(complete(pool, PROMPTS, SAMPLING))
    assert fakes[1].count(GENERATE) == len(PROMPTS)


def test_a_living_server_that_fails_a_request_too_often_ends_the_run_with_its_last_words(run_engines: RunEngines):
    fake = run_engines.start()
    pool = run_engines.serving(replicas=1, attempts=3)
    fake.fail(GENERATE, "error", "garbage", "few")
    with pytest.raises(
        EngineError, match=r"failed 3 times: .*500: Internal Server Error; .*not vLLM's.*; .*: 1 completions, not 2;"
    ) as info:
        complete(pool, PROMPTS[:1], SAMPLING)
    assert "the last words of 0" in str(info.value) and fake.count(GENERATE) == 3
    fake.fail(GENERATE, "error", "shape")
    assert right(complete(pool, PROMPTS[:1], SAMPLING), PROMPTS[:1]), "two failures are borne"


def test_a_request_under_which_server_after_server_dies_ends_the_run(run_engines: RunEngines):
    """It was sent to one that came back for ever, as each loss was the server's fault alone."""
    fakes = [run_engines.start(replica) for replica in range(LOST_UNDER + 1)]
    pool = run_engines.serving(len(fakes), replicas=len(fakes), attempts=1)
    for fake in fakes:
        fake.fail(GENERATE, "error")
        fake.fail("/health", *["error"] * 9999)
    with pytest.raises(
        EngineError, match=rf"(?s){LOST_UNDER} servers were lost .*a prompt of 3 tokens.*the last words of"
    ):
        complete(pool, PROMPTS[:1], SAMPLING)
    assert sum(fake.count(GENERATE) for fake in fakes) == LOST_UNDER and len(pool.members.living()) == 1


@pytest.mark.parametrize("kind", ["error", "garbage", "shape", "few", "nan", "redirect", "hang"])
def test_an_answer_without_sense_is_a_lost_server_not_a_crash(run_engines: RunEngines, kind):
    """KeyError, UnicodeDecodeError and TypeError ended the run; log-probs that are not numbers were trained on."""
    fake = run_engines.start()
    server, another = (VllmServer(fake.url, TOKEN, Vllm(), 5, ModelFacts(vocab=97)) for _ in range(2))
    fake.fail(GENERATE, kind)
    with pytest.raises(ServerLost):
        asyncio.run(server.generate(np.array([1, 2], np.int32), SAMPLING, seed=1, timeout_s=0.4))
    for path, ask in (
        ("/weight_info", server.version),
        ("/v1/models", lambda: asyncio.run(another._room())),
    ):
        if kind in ("garbage", "shape"):
            fake.fail(path, kind)
            with pytest.raises(ServerLost):
                ask()


def test_a_refused_request_is_not_tried_again(run_engines: RunEngines):
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2)
    for fake in fakes:
        fake.fail(GENERATE, "refuse")
    with pytest.raises(RequestRefused, match="400: .*no such token id"):
        complete(pool, PROMPTS[:1], SAMPLING)
    assert sum(f.count(GENERATE) for f in fakes) == 1 and len(pool.members.living()) == 2


def test_a_wrong_token_is_a_matter_of_the_config_and_stays_secret(run_engines: RunEngines):
    fake = run_engines.start()
    pool = run_engines.serving(replicas=1)
    fake.token = "another" * 5
    for ask in (
        lambda: complete(pool, PROMPTS[:1], SAMPLING),
        lambda: run_engines.refit(2),
        lambda: pool.begin_refit(2, ("there", 2, "s"), wait_s=1),
    ):
        with pytest.raises(ConfigError, match="refuses the job's token") as info:
            ask()
        assert TOKEN not in str(info.value) and fake.token not in str(info.value)


def test_a_dead_listing_whose_port_another_run_has_is_never_asked(run_engines: RunEngines):
    """The other run's refusal of the token ended this run."""
    other = FakeVllm("the other run's token")
    run_engines.announce(other.url, 1, beats=False)
    run_engines.start(0)
    run_engines.serving(1)
    assert right(complete(run_engines.pool, PROMPTS, SAMPLING)) and other.seen == []
    other.close()


def test_requests_wait_for_a_server_and_say_so(run_engines: RunEngines, caplog):
    run_engines.start()
    pool = run_engines.serving(replicas=1, wait_s=12.0, lost_after_s=2.0)
    refreshes = run_engines.refreshes()
    run_engines.beats[0].clear()
    run_engines.living(0)

    def come_back() -> None:
        until("a line in the log", lambda: "waiting for a generator engine" in caplog.text)
        run_engines.beats[0].set()

    thread = threading.Thread(target=come_back)
    thread.start()
    with caplog.at_level(logging.WARNING):
        assert right(complete(pool, PROMPTS, SAMPLING))
    thread.join()
    assert refreshes == [[0]] and "generator-0: no sign of life for 2 s" in caplog.text


def test_only_a_wait_for_a_server_is_told_as_one(run_engines: RunEngines):
    """A run's watchdog beats while no server serves, also before a refit. A server that lives and does not answer is no
    such wait."""
    told: list[int] = []
    pool = run_engines.open(replicas=1, request_timeout_s=0.5, attempts=1)
    pool.members.waits = lambda: told.append(1)

    def come() -> None:
        until("a wait that goes on", lambda: len(told) > 2)
        run_engines.start(0).fail(GENERATE, "hang")

    thread = threading.Thread(target=come)
    thread.start()
    assert run_engines.refit(1) == 1
    thread.join()
    told.clear()
    with pytest.raises(EngineError, match="a request failed 1 times"):  # after 25 looks around
        complete(pool, PROMPTS[:1], SAMPLING)
    assert not told
    run_engines.beats[0].clear()
    pool.members.look([], time.monotonic() + 60.0)
    asked = Asked(pool, PROMPTS[:1], SAMPLING)
    until("a wait of a request", lambda: len(told) > 2)
    pool.close()
    with pytest.raises(EngineError, match="closed"):
        asked.result()


def test_waiting_ends_and_nothing_is_sent_for_who_has_gone(run_engines: RunEngines):
    """Requests of a call that had failed still waited for a server, and were sent when one came. A server that another
    job tried to start has told why in its log.
    """
    pool = run_engines.open(replicas=1, wait_s=0.5)
    log = pool.members._roster.directory.parent / "logs/engine_generator_0.log"
    log.parent.mkdir()
    log.write_text(CAUSE)
    for ask in (lambda: complete(pool, PROMPTS, SAMPLING), lambda: run_engines.refit(1)):
        with pytest.raises(
            EngineError,
            match=r"no generator engine for 0.5 s \(engine.wait_s\): no generator engine is in .*; the first error in "
            rf"{log}, last written .*: {re.escape(SAID)} at /vllm/amx_mla.py:303$",
        ):
            ask()
    fake = run_engines.start()
    run_engines.living(1)
    run_engines.refit(1)
    assert right(complete(pool, PROMPTS[:1], SAMPLING), PROMPTS[:1]) and fake.count(GENERATE) == 1


def test_waiting_ends_at_once_when_no_server_will_come(run_engines: RunEngines):
    pool = run_engines.open(replicas=1)
    pool.members.hopeless = lambda: "all have ended"
    for ask in (lambda: complete(pool, PROMPTS, SAMPLING), lambda: run_engines.refit(1)):
        with pytest.raises(EngineError, match="all have ended"):
            ask()


def test_a_stream_that_is_left_takes_its_requests_with_it(run_engines: RunEngines):
    fake = run_engines.start(stall_after=0)
    fake.passing = PROMPTS[1:2]
    pool = run_engines.serving(replicas=1, max_sequences=4)
    session = pool.session()
    for i, prompt in enumerate(PROMPTS):
        session.ask(i, prompt, SAMPLING)
    stream = session.answers()
    until("a request in the place of the one that is answered", lambda: fake.count(GENERATE) == 3)
    i, group = next(stream)
    assert i == 1 and [c.tokens.tolist() for c in group] == expected(PROMPTS[1], SAMPLING, 1)
    stream.close()
    fake.release()
    assert right(complete(pool, [[88]], SAMPLING), [[88]]) and fake.count(GENERATE) == 4


def test_close_does_not_wait_for_requests_under_way(run_engines: RunEngines):
    """It waited for their deadlines."""
    fakes = [run_engines.start(0), run_engines.start(1)]
    pool = run_engines.serving(2, request_timeout_s=600.0, max_sequences=4)
    for fake in fakes:
        fake.fail(GENERATE, *["hang"] * 9)
    asked = Asked(pool, PROMPTS, SAMPLING)
    until("requests that hang", lambda: all(f.count(GENERATE) == 2 for f in fakes))
    start = time.monotonic()
    pool.close()
    with pytest.raises(EngineError, match="the pool of generator engines was closed"):
        asked.result()
    assert time.monotonic() - start < 10
    with pytest.raises(EngineError, match="was closed"):
        complete(pool, PROMPTS, SAMPLING)
    names = (f"requests-{ROLE}", f"refits-{ROLE}", f"registry-{ROLE}")
    assert not [t for t in threading.enumerate() if t.name.startswith(names)]


def test_close_does_not_wait_for_a_refit_under_way(run_engines: RunEngines):
    fake = run_engines.start()
    pool = run_engines.serving(replicas=1)
    fake.fail("/update_weights", "hang")
    pool.begin_refit(2, ADDRESS, wait_s=600.0)
    until("an update that hangs", lambda: fake.count("/update_weights") == 2)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pool_whose_watcher_died_says_so(run_engines: RunEngines):
    """It worked on with what it knew, and waited for ever for what it could not see."""

    def connector(listing: Listing):
        raise LookupError("a bug")

    run_engines.start()
    pool = run_engines.open(connector=connector)
    until("its death", lambda: not pool.members._watcher.is_alive())
    with pytest.raises(EngineError, match="nobody looks at"):
        complete(pool, PROMPTS, SAMPLING)


def test_a_server_that_cannot_join_does_not_stop_the_others(run_engines: RunEngines):
    """A refresh of it waited `engine.wait_s` for it, and then ended the run, while another served."""
    fakes = [run_engines.start(0), run_engines.start(1)]
    fakes[1].fail(JOIN, *["refuse"] * 99)
    pool = run_engines.open(wait_s=60.0)
    run_engines.living(2)
    assert run_engines.refit(1) == 1
    refreshes = run_engines.refreshes()
    for ago, tries in ((1.0, []), (16.0, [[1]])):  # a quarter of engine.wait_s is 15 s
        failed_at(pool, 1, time.monotonic() - ago)
        assert all(right(complete(pool, PROMPTS, SAMPLING)) for _ in range(3))
        assert refreshes == tries, "it is tried again after a while, not all the time"
    assert fakes[1].count(JOIN) == 2 and fakes[1].count(GENERATE) == 0
    assert "it cannot join the trainer" in (pool.members.by_replica[1].state.why or "")


def test_a_first_refit_says_once_why_it_waits(run_engines: RunEngines, caplog):
    """The run waited half an hour for a server that was there, and did not say what was wrong with it."""
    fake = run_engines.start()
    fake.fail(JOIN, *["refuse"] * 999)
    pool = run_engines.open(replicas=1, wait_s=2.0)
    with pytest.raises(
        EngineError, match=r"no generator engine for 2 s .*: generator-0: it cannot join the trainer: .* answered 400"
    ):
        pool.begin_refit(1, ADDRESS, wait_s=5.0)
    assert caplog.text.count("generator-0 cannot join the trainer") == 1 and fake.count(JOIN) > 1


def listing(replica: int = 0, incarnation: str = "a", **other) -> Listing:
    return Listing(
        **{"role": ROLE, "replica": replica, "url": "http://x", "incarnation": incarnation, "log": ""} | other
    )


def test_files_that_are_no_listings_are_left_out(tmp_path):
    registry = ServerRegistry(tmp_path / "r")
    assert registry.read(ROLE) == []
    for each in (listing(2), listing(0), listing(1, role=ROLE + "-x")):
        registry.write(each)
    whole = (tmp_path / "r/generator-0.json").read_text()
    (tmp_path / "r/generator-3.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "r/generator-4.json").write_text(
        whole.replace(': 0, "url"', ': "four", "url"')
    )  # sorting it ended the watcher
    (tmp_path / "r/generator-5.json").write_text("[]")
    (tmp_path / "r/generator-6.json").write_text(whole.replace('"url"', '"address"'))
    assert [each.replica for each in registry.read(ROLE)] == [0, 2]


def test_a_listing_that_cannot_be_read_is_no_reason_to_drop_its_server(run_engines: RunEngines):
    """One failed read, and the server was out until its next refit."""
    fake, pool = FakeVllm(TOKEN), run_engines.open(replicas=1, lost_after_s=600.0)
    own = run_engines.announce(fake.url, beats=False)
    until("a look at it", lambda: pool.members.by_replica)
    run_engines.registry.write(replace(own, beat=1))
    run_engines.living(1)
    run_engines.refit(1)
    file = run_engines.registry.directory / "generator-0.json"
    file.write_text(file.read_text()[:20])
    pool.members.look(run_engines.registry.read(ROLE), time.monotonic())
    assert right(complete(pool, PROMPTS, SAMPLING))
    file.unlink()
    until("its loss", lambda: not pool.members.living())
    assert pool.members.by_replica[0].lost == "it left the server registry"
    fake.close()


def test_slow_looks_are_not_taken_for_silence(run_engines: RunEngines):
    """The others grew too old while the watcher asked a lost server whether it was ready."""
    run_engines.start()
    pool = run_engines.serving(replicas=1, lost_after_s=5.0)
    pool.members.closing.set()
    pool.members._watcher.join()  # the test looks in its place
    member = pool.members.by_replica[0]
    member.seen = read = time.monotonic() - 60
    pool.members.look([replace(member.listing, beat=member.listing.beat + 1)], read)
    pool.members.look([member.listing], read)
    assert member.lost is None and member.seen == read


def test_a_listing_is_removed_by_its_own_incarnation_alone(tmp_path):
    registry, path = ServerRegistry(tmp_path), tmp_path / "generator-0.json"
    first, second = listing(incarnation="first"), listing(incarnation="second")
    registry.write(first)
    registry.write(second)
    registry.remove(first)
    assert registry.read(ROLE) == [second]
    path.write_text("[1]")
    registry.remove(second)
    assert path.exists()
    registry.write(second)
    registry.remove(second)
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_two_hosts_do_not_meet(tmp_path):
    """They were told apart by process ids, which are the same in two containers."""
    registry, draft = ServerRegistry(tmp_path), tmp_path / f".generator-0.{os.getpid()}"
    draft.write_text("half of")
    registry.write(listing())
    assert draft.read_text() == "half of" and registry.read(ROLE) == [listing()]


def test_beats_go_on_after_a_disk_was_full(tmp_path, caplog):
    """The thread that beats ended, and with it a server that lived."""
    registry, own = ServerRegistry(tmp_path / "r"), listing()
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("no directory")

    def is_now(what: str) -> None:  # in one step: a beat between two would make the directory anew
        (tmp_path / "link").symlink_to(tmp_path / what)
        (tmp_path / "link").replace(tmp_path / "r")

    is_now("directory")
    with Announcement(registry, own, lambda: True, beat_s=0.01):
        until("a beat", lambda: registry.read(ROLE)[0].beat > 0)
        is_now("file")
        until("a failure", lambda: "cannot renew its listing" in caplog.text)
        is_now("directory")
        last = registry.read(ROLE)[0].beat
        until("another beat", lambda: registry.read(ROLE)[0].beat > last)
    assert registry.read(ROLE) == [] and asdict(own)["beat"] == 0


def test_what_the_servers_do_is_told_by_name(run_engines: RunEngines):
    run_engines.start(0)
    pool = run_engines.serving(replicas=1)
    complete(pool, PROMPTS, SAMPLING)
    [(name, found)] = pool.members.loads().items()
    assert name.startswith(ROLE) and found == {
        "lives": 1.0, "serves": 1.0, "version": 1.0, "sequences": 0.0, "requests": 0.0,
    }  # fmt: skip
