"""Fake servers with real listings, and pools over them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_vllm import FakeVllm, token_at
from limits import PROCESS_S
from ranks import ROOT

from megatron_rl.cluster.host_address import free_port
from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.auth_middleware import TOKEN_FILE
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import Completion, Sampling, complete
from megatron_rl.engines.server_registry import Announcement, Listing, ServerRegistry
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.session.server_connection import connect

ROLE, TOKEN, LOOK_S = "generator", "5ecret" * 8, 0.02
ADDRESS = ("127.0.0.1", 1, "s3")


def until(what: str, condition: Callable[[], Any], timeout_s: float = PROCESS_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)


def expected(
    prompt: list[int], sampling: Sampling, index: int, *, first: int = 0, tokens: int | None = None
) -> list[list[int]]:
    """Returns what the fakes write for the n samples of the prompt with this index when nothing interrupts them."""
    seed = sampling_seeds.stream_key(sampling.seed, index, 0) & (1 << 62) - 1
    places = range(first, sampling.max_tokens if tokens is None else tokens)
    return [[token_at(prompt, seed + j, place) for place in places] for j in range(sampling.n)]


def failed_at(pool: Pool, replica: int, failed_s: float) -> None:
    """Moves the time at which the last weight sync to a server failed."""
    state = pool.members.state
    server = replace(state.servers[replica], failed_s=failed_s)
    pool.members.state = replace(state, servers={**state.servers, replica: server})


def seed_of(sampling: Sampling, index: int) -> int:
    return sampling_seeds.stream_key(sampling.seed, index, 0) & (1 << 62) - 1


class RunEngines:
    """Servers by replica, and at most one pool. Everything ends with it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.registry = directory, ServerRegistry(directory / "engines")
        self._stack = contextlib.ExitStack()
        self.pool: Pool
        self.beats: dict[int, threading.Event] = {}  # cleared: the replica falls silent

    def start(self, replica: int = 0, **options: Any) -> FakeVllm:
        fake = FakeVllm(TOKEN, **options)
        self._stack.callback(fake.close)
        self.announce(fake.url, replica)
        return fake

    def start_process(self, replica: int, *words: str) -> subprocess.Popen[bytes]:
        """A fake that may be killed or stopped, once it answers."""
        (self.directory / "token").write_text(TOKEN)
        environment = os.environ | {TOKEN_FILE: str(self.directory / "token"), "PYTHONPATH": str(ROOT)}
        port = free_port("127.0.0.1")
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/helpers/fake_vllm.py"), "--host=127.0.0.1", f"--port={port}", *words],
            env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip

        def end() -> None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

        self._stack.callback(end)
        url = f"http://127.0.0.1:{port}"
        client = connect(Vllm(), TOKEN, 5.0)(Listing(role=ROLE, replica=replica, url=url, incarnation="", log=""))
        until("the fake server's answer", client.ready)
        client.close()
        self.announce(url, replica)
        return process

    def start_process_at(self, port: str) -> subprocess.Popen[bytes]:
        """One at the port of another that has ended; nobody announces it."""
        environment = os.environ | {TOKEN_FILE: str(self.directory / "token"), "PYTHONPATH": str(ROOT)}
        words = [sys.executable, str(ROOT / "tests/helpers/fake_vllm.py"), "--host=127.0.0.1", f"--port={port}"]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def announce(self, url: str, replica: int = 0, *, beats: bool = True) -> Listing:
        """Lists a server as a supervisor does, until the run_engines ends."""
        log = self.directory / f"engine_{replica}.log"
        log.write_text(f"hello\nthe last words of {replica}\n")
        listing = Listing(role=ROLE, replica=replica, url=url, incarnation=uuid.uuid4().hex, log=str(log))
        self.beats[replica] = alive = threading.Event()
        alive.set()
        if beats:
            self._stack.enter_context(Announcement(self.registry, listing, alive.is_set, beat_s=LOOK_S))
        else:
            self.registry.write(listing)
        return listing

    def open(self, *, connector: Any = None, fixed: bool = False, **settings: Any) -> Pool:
        """A pool that the caller's thread owns."""
        vllm = Vllm(
            **{"replicas": 2, "wait_s": 60.0, "request_timeout_s": 60.0, "lost_after_s": 30.0, "max_sequences": 32}
            | settings
        )
        client = connector or connect(vllm, TOKEN, 20.0)
        self.pool = Pool(ROLE, vllm, self.registry, client, fixed=fixed, look_s=LOOK_S)
        self._stack.callback(self.pool.close)
        return self.pool

    def living(self, count: int) -> None:
        until(f"{count} living servers", lambda: len(self.pool.members.living()) == count)

    def serving(self, count: int = 1, version: int = 1, **settings: Any) -> Pool:
        """A pool whose `count` servers have been refitted."""
        pool = self.open(**settings)
        self.living(count)
        assert self.refit(version) == count
        return pool

    def refit(self, version: int) -> int:
        self.pool.begin_refit(version, ADDRESS, wait_s=5.0)
        return self.pool.end_refit()

    def refreshes(self) -> list[list[int]]:
        """Lets the pool refresh servers -> the replicas of every refresh, as they come."""
        calls: list[list[int]] = []

        def refresh(replicas: list[int]) -> None:
            calls.append(replicas)
            if self.pool.begin_refit(self.pool.version, ADDRESS, replicas, wait_s=5.0):
                self.pool.end_refit()

        self.pool.refresh = refresh
        return calls

    def close(self) -> None:
        self._stack.close()


class Asked:
    """Answers to prompts, waited for on a thread of its own."""

    def __init__(self, pool: Pool, prompts: list[list[int]], sampling: Sampling) -> None:
        self._ask = functools.partial(complete, pool, prompts, sampling)
        self._found: list[list[Completion]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._ask()
        except Exception as error:  # for the test to look at
            self._error = error

    def result(self, timeout_s: float = PROCESS_S) -> list[list[Completion]]:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "no answer"
        if self._error is not None:
            raise self._error
        return self._found


@contextlib.contextmanager
def engines_in(directory: Path) -> Iterator[RunEngines]:
    run_engines = RunEngines(directory)
    try:
        yield run_engines
    finally:
        run_engines.close()
