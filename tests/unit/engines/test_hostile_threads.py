"""The driver's threads do not grow with servers and requests, and one server's trouble is not the others'."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_servers import TOKEN, Asked, expected, until
from fake_vllm import GENERATE, FakeVllm
from ranks import ROOT

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.http import Http, ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.pool.dispatch import LOOKERS
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.server_pool import ServerEngine, given
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.engines.vllm.client import VllmServer
from megatron_rl.engines.vllm.settings import Vllm

SERVERS, EACH = 64, 8
SAMPLING = Sampling(max_tokens=4, seed=3)


def threads() -> int:
    """Returns the number of threads of this process, those that Python does not know among them."""
    return len(os.listdir("/proc/self/task"))


def engine_of(urls: list[str], **limits: float) -> ServerEngine:
    servers = [VllmServer(url, TOKEN, Vllm(), 5, ModelFacts(vocab=97)) for url in urls]
    own = {"servers": len(urls), "at_once": EACH, "attempts": 3, "request_timeout_s": 120.0} | limits
    return given("judge", servers, Limits(**own))


@contextlib.contextmanager
def many(wanted: int) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process with SERVERS servers, which are silent until `wanted` requests are there; and their URLs."""
    words = [sys.executable, str(ROOT / "tests/helpers/many_fakes.py"), TOKEN, str(SERVERS), str(wanted)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/helpers'}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        assert child.stdin and child.stdout
        try:
            yield child, json.loads(child.stdout.readline())
        finally:
            child.kill()


def test_hostile_number_of_servers_needs_no_thread_for_each_request():
    """64 replicas could have 20,480 threads: one for every sequence that they may be asked for."""
    prompts = [[1 + i % 90, 2 + i // 90] for i in range(SERVERS * EACH)]
    with many(len(prompts)) as (child, urls):
        before = threads()
        engine = engine_of(urls)
        asked = Asked(engine, prompts, SAMPLING)
        assert child.stdin and child.stdout
        assert int(child.stdout.readline()) == len(prompts), (
            "all requests are under way at once, none waits for another"
        )
        assert threads() - before <= 3, "one that asks, one for the requests, and one to spare"
        assert [m.load for m in engine.members.living()] == [EACH] * SERVERS
        child.stdin.write("go\n")
        child.stdin.flush()
        found = asked.result(60.0)
        assert [[c.tokens.tolist() for c in group] for group in found] == [
            expected(prompt, SAMPLING, i) for i, prompt in enumerate(prompts)
        ]
        assert [m.load for m in engine.members.living()] == [0] * SERVERS
        engine.close()
        until("the threads' end", lambda: threads() <= before)


def test_hostile_death_of_all_servers_at_once_needs_few_threads():
    prompts = [[1 + i % 90, 2 + i // 90] for i in range(SERVERS * EACH)]
    with many(len(prompts)) as (child, urls):
        before = threads()
        engine = engine_of(urls)
        asked = Asked(engine, prompts, SAMPLING)
        assert child.stdout and int(child.stdout.readline()) == len(prompts)
        child.kill()
        with pytest.raises(EngineError, match="failed 3 times"):
            asked.result(60.0)
        assert threads() - before <= 3 + LOOKERS
        engine.close()
    until("the threads' end", lambda: threads() <= before)


def test_hostile_drip_of_one_server_delays_nobody_else():
    """Every request has its own deadline on the loop that all of them share."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def play(made: socket.socket) -> None:
            with made, contextlib.suppress(OSError):
                made.recv(65536)
                made.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.02):
                    made.sendall(b" ")

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=play, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        fake = FakeVllm(TOKEN)
        engine = engine_of([f"http://127.0.0.1:{listening.getsockname()[1]}", fake.url], request_timeout_s=1.0)
        engine.members.by_replica[0].server._context = 200  # type: ignore[attr-defined]
        start, times = time.monotonic(), []
        session = engine.session()
        for i in range(8):
            session.ask(i, [1, 2, i + 1], SAMPLING)
        for _ in session.answers():
            times.append(time.monotonic() - start)
        assert len(times) == 8 and fake.count(GENERATE) == 8 and engine.failures == 4
        assert times[3] < 0.9 and 0.9 < times[4] <= times[7] < 5.0, times
        engine.close()
        fake.close()
        stop.set()


def test_the_longest_waiting_request_gets_the_next_place():
    fake = FakeVllm(TOKEN)
    engine = engine_of([fake.url], at_once=1)
    complete(engine, [[1, 2, i + 1] for i in range(20)], SAMPLING)
    assert fake.prompts == [(1, 2, i + 1) for i in range(20)] and fake.most_running == 1
    engine.close()
    fake.close()


def test_a_client_hangs_up_on_requests_of_any_loop_and_thread():
    fake = FakeVllm(TOKEN)
    server = VllmServer(fake.url, TOKEN, Vllm(), 60, ModelFacts(vocab=97))
    fake.fail("/weight_info", "hang", "hang")
    failures: list[str] = []

    def hold() -> None:
        try:
            server.version()
        except ServerLost as error:
            failures.append(str(error))

    async def hold_too() -> None:
        with pytest.raises(ServerLost, match="broken off"):
            await server._http.ask("GET", "/weight_info", timeout_s=60.0)

    async def both() -> None:
        thread = threading.Thread(target=hold)
        thread.start()
        task = asyncio.ensure_future(hold_too())
        while fake.count("/weight_info") < 2:
            await asyncio.sleep(0.01)
        server.hang_up()
        await task
        await asyncio.to_thread(thread.join)

    asyncio.run(both())
    assert len(failures) == 1 and "broken off" in failures[0]
    assert server.version() == -1, "later requests make new connections"
    server.close()
    with pytest.raises(ServerLost, match="was closed"):
        server.version()
    fake.close()


def test_an_idle_connection_is_closed_and_not_left_to_the_server(monkeypatch):
    monkeypatch.setattr("megatron_rl.engines.http.KEPT_S", 0.1)
    fake = FakeVllm(TOKEN)
    http = Http(fake.url, {})

    async def twice() -> None:
        await http.ask("GET", "/health")
        [(session, _)] = http._sessions.values()
        assert len(session.connector._conns) == 1
        await asyncio.sleep(0.5)
        assert not session.connector._conns
        await http.ask("GET", "/health")

    asyncio.run(twice())
    fake.close()


@pytest.mark.parametrize("url", ["ftp://a", "http://", "a:80", "http://a:x", "http://[::1", "http://a b/"])
def test_hostile_urls_are_refused_with_the_cure(url):
    with pytest.raises(ConfigError, match="give http://HOST:PORT"):
        Http(url, {})


def test_hostile_line_break_in_a_header_is_refused():
    """An API key of two lines would be a header more."""
    with pytest.raises(ConfigError, match="has a line break"):
        Http("http://127.0.0.1:1", {"Authorization": "Bearer a\r\nX: b"}).call("GET", "/")


ANSWERS = {
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}": {},
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\ncontent-length: 2\r\n\r\n{}": {},
    b"HTTP/1.0 200 OK\r\n\r\n[1]": [1],
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2;x=y\r\n[1\r\n1\r\n]\r\n0\r\nA: b\r\n\r\n": [1],
    b"HTTP/1.1 204 No\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}": "Duplicate Content-Length",
    b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n{}": "Invalid character in Content-Length",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}": "received 2 of 9 bytes",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n": "payload is not completed",
    b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\n{}": {},
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 9000 + b"\r\n": "Too many headers",
    b"HTTP/2 200 OK\r\n\r\n": "Bad status line",
    b"SSH-2.0-OpenSSH\r\n\r\n": "Bad status line",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 200: "disconnected",
    # a parser by patterns needs a time for these that grows with the square of the white space
    b"HTTP/1.1 200 OK\r\nA:" + b" " * 20_000 + b"\0\r\n\r\n": "Invalid HTTP header",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b" " * 40_000 + b"\n\r\n": "Invalid character in",
    b"": "disconnected",
}


@pytest.mark.parametrize("said", ANSWERS, ids=lambda said: repr(said[:60]))
def test_hostile_answers_byte_by_byte(said):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def play() -> None:
            with contextlib.suppress(OSError):
                while True:  # a GET that nobody answered is asked once more
                    made, _ = listening.accept()
                    with made:
                        made.recv(4096)
                        made.sendall(said)

        threading.Thread(target=play, daemon=True).start()
        http, wanted = Http(f"http://127.0.0.1:{listening.getsockname()[1]}/a%20b/", {}), ANSWERS[said]
        if isinstance(wanted, str):
            with pytest.raises(ServerLost, match=wanted):
                http.call("GET", "/c", timeout_s=5.0)
        else:
            assert http.call("GET", "/c", timeout_s=5.0) == wanted


@pytest.mark.parametrize("at_once", [True, False])
def test_hostile_answer_that_nobody_asked_for_is_not_taken_for_the_next_one(at_once):
    asked_again = threading.Event()
    right, stray = (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[%d]" % number for number in (1, 2))

    def play(listening: socket.socket) -> None:
        with listening.accept()[0] as made:
            made.recv(4096)
            made.sendall(right + stray if at_once else right)
            asked_again.wait(10.0)
            made.sendall(stray)
            with listening.accept()[0] as other:
                other.recv(4096)
                other.sendall(right)

    async def ask_twice(http: Http) -> None:
        assert await http.ask("GET", "/", timeout_s=5.0) == [1]
        [(session, _)] = http._sessions.values()
        kept = [protocol for waiting in session.connector._conns.values() for protocol, _ in waiting]
        assert len(kept) == (not at_once)
        asked_again.set()
        while any(not protocol.should_close for protocol in kept):
            await asyncio.sleep(0.01)
        assert await http.ask("GET", "/", timeout_s=5.0) == [1]
        http.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=play, args=(listening,), daemon=True)
        thread.start()
        asyncio.run(ask_twice(Http(f"http://127.0.0.1:{listening.getsockname()[1]}", {})))
        thread.join()


def test_requests_hold_no_thread_of_a_session_that_is_left(tmp_path: Path):
    """What is called off leaves the line, also where no place comes free."""
    fake = FakeVllm(TOKEN, stall_after=0)
    engine = engine_of([fake.url], at_once=1)
    session = engine.session()
    for i in range(50):
        session.ask(i, [1, 2, i + 1], SAMPLING)
    end = time.monotonic() + 10
    while fake.running < 1 and time.monotonic() < end:
        time.sleep(0.01)
    session.close()
    while engine._dispatcher._queue._first and time.monotonic() < end:
        time.sleep(0.01)
    assert not engine._dispatcher._queue._first and fake.count(GENERATE) == 1
    fake.release()
    assert np.array_equal(complete(engine, [[9]], SAMPLING)[0][0].tokens, expected([9], SAMPLING, 0)[0])
    engine.close()
    fake.close()
