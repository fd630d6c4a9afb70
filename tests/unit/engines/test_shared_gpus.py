"""Servers of two roles in the same GPUs: the requests of one role at a time are under way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fake_servers import ADDRESS, LOOK_S, ROLE, TOKEN, Asked, RunEngines, engines_in, until

from megatron_rl.engines.pool.membership import Limits, Members
from megatron_rl.engines.pool.request_queue import RequestQueue, Waiter
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.session.server_connection import connect

G, V = "generator", "verifier"
SAMPLING = Sampling(max_tokens=6, seed=3)
PROMPTS = [[n + 1, 2, 3] for n in range(6)]


def test_one_role_at_a_time_and_those_that_were_refused_are_told_in_their_order():
    shared, looked = SharedGpus(), []
    for role in (G, V, "judge"):
        shared.add(role, lambda role=role: looked.append(role))
    assert shared.enter(G) and shared.enter(G)
    assert not shared.enter("judge") and not shared.enter(V) and not shared.enter("judge")
    shared.leave()
    assert looked == [] and not shared.enter(V), "one of the generator's is still under way"
    shared.leave()
    assert looked == ["judge", V]
    assert shared.enter("judge") and not shared.enter(G)
    shared.leave()
    assert looked == ["judge", V, V, G], "who entered is not told again"


class _Both:
    """Two fake servers for each of two roles, and pools of them over the same GPUs, with weights."""

    def __init__(self, tmp_path, stack):
        self.shared = SharedGpus()
        self.fakes, self.pools = {}, {}
        for name in (G, V):
            (tmp_path / name).mkdir()
            run_engines: RunEngines = stack.enter_context(engines_in(tmp_path / name))
            self.fakes[name] = [run_engines.start(replica) for replica in range(2)]
            given = Vllm(replicas=2, colocate=True, wait_s=60.0, request_timeout_s=60.0, max_sequences=32)
            pool = Pool(
                name,
                given,
                run_engines.registry,
                connect(given, TOKEN, 20.0),
                look_s=LOOK_S,
                listed=ROLE,
                shared=self.shared,
            )
            stack.callback(pool.close)
            until("two living servers", lambda pool=pool: len(pool.members.living()) == 2)
            pool.begin_refit(1, ADDRESS, wait_s=5.0)
            assert pool.end_refit() == 2
            self.pools[name] = pool

    def asked(self, name):
        return sum(len(fake.prompts) for fake in self.fakes[name])

    def running(self, name):
        return sum(fake.running for fake in self.fakes[name])


@pytest.fixture
def both(tmp_path):
    with contextlib.ExitStack() as stack:
        yield _Both(tmp_path, stack)


def test_a_role_waits_until_the_others_last_answer_and_is_then_spread_over_all_its_servers(both):
    for fake in both.fakes[G]:
        fake.stall_after = 2
    solving = Asked(both.pools[G], PROMPTS, SAMPLING)
    until("all of the first role's requests", lambda: both.running(G) == 6)
    verifying = Asked(both.pools[V], PROMPTS, SAMPLING)
    both.fakes[G][0].release()
    until("the answers of one server", lambda: both.running(G) == 3)
    assert both.asked(V) == 0, "the other server's GPUs are not free, and these would take all of the second role's"
    for fake in both.fakes[V]:
        fake.stall_after = 2
    both.fakes[G][1].release()
    assert len(solving.result()) == 6
    until("all of the second role's requests", lambda: both.running(V) == 6)
    assert [fake.running for fake in both.fakes[V]] == [3, 3]
    later = Asked(both.pools[G], PROMPTS[:1], Sampling(max_tokens=4, seed=4))
    for fake in both.fakes[V]:
        fake.release()
    assert len(verifying.result()) == 6 and len(later.result()) == 1


def test_roles_that_answer_each_other_in_many_episodes_never_work_together(both):
    """Each of 12 threads asks one role and then the other, three times, as episodes of two roles do."""
    together, problems, writing, lock = [], [], dict.fromkeys((G, V), 0), threading.Lock()
    for name, other in ((G, V), (V, G)):
        for fake in both.fakes[name]:
            write = fake.generate

            def generate(frame, fault, write=write, name=name, other=other):
                with lock:
                    writing[name] += 1
                    together.append(writing[other])
                time.sleep(0.02)
                with lock:
                    writing[name] -= 1
                return write(frame, fault)

            fake.generate = generate

    def episode(number):
        try:
            for iteration in range(3):
                for name in (G, V):
                    sampling = Sampling(max_tokens=3 + (number + iteration) % 3, seed=number)
                    assert len(complete(both.pools[name], [[number + 1, iteration + 1]], sampling)) == 1
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=episode, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not problems and len(together) == 72 and set(together) == {0}


def test_a_failed_request_leaves_the_gpus_to_the_other_role(both):
    for fake in both.fakes[G]:
        fake.fail("/megatron_rl/generate", *["error"] * 20)
    with pytest.raises(EngineError, match="a request failed"):
        complete(both.pools[G], PROMPTS[:1], SAMPLING)
    assert len(complete(both.pools[V], PROMPTS, SAMPLING)) == 6


def test_a_request_that_is_cancelled_with_a_place_gives_it_back():
    """A place is taken before the request's task goes on, and may be cancelled between the two."""
    shared = SharedGpus()
    shared.add(G, lambda: None)
    shared.add(V, lambda: None)
    server: Any = SimpleNamespace(url="")
    members = Members(G, Limits(servers=1, at_once=4), servers=[server])

    async def cancelled() -> None:
        line = RequestQueue(members, shared)
        assert shared.enter(V)
        task = asyncio.create_task(line.wait(Waiter(2, set(), None, lambda: False)))
        await asyncio.sleep(0)
        shared.leave()
        line.look()
        assert members.by_replica[0].load == 2 and not shared.enter(V)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert members.by_replica[0].load == members.by_replica[0].requests == 0 and shared.enter(V)
