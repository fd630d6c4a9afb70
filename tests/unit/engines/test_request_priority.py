"""Requests by priority: an evaluation before all iterations, the oldest iteration before later ones, in the queue of a
pool and in its servers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fake_servers import RunEngines, engines_in
from test_server_words import words

from megatron_rl.engines.pool.membership import Limits, Members
from megatron_rl.engines.pool.request_queue import RequestQueue, Waiter
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import EngineError, Sampling
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.training.iteration_engines import GradeTurns
from megatron_rl.types import Outcome


class Queue:
    """A queue before one server, and the names of requests in the order in which they were assigned."""

    def __init__(self, at_once: int) -> None:
        server: Any = SimpleNamespace(url="")
        self.members = Members("generator", Limits(servers=1, at_once=at_once), servers=[server])
        self.queue, self.served = RequestQueue(self.members, SharedGpus()), list[str]()

    async def ask(
        self, name: str, priority: int, sequences: int = 1, kind: type[Waiter] = Waiter
    ) -> asyncio.Task[None]:
        async def wait() -> None:
            await self.queue.wait(kind(sequences, set(), None, lambda: False, priority))
            self.served.append(name)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    async def leave(self, sequences: int = 1) -> None:
        self.queue.leave(self.members.by_replica[0], sequences)
        for _ in range(3):
            await asyncio.sleep(0)


def test_an_evaluation_is_served_first_and_then_the_oldest_iteration():
    async def run() -> list[str]:
        own = Queue(1)
        tasks = [await own.ask("running", 5)]
        for name, priority in (("3a", 3), ("1a", 1), ("3b", 3), ("evaluation", 0), ("2", 2), ("1b", 1)):
            tasks.append(await own.ask(name, priority))
        own.queue.look()
        while len(own.served) < len(tasks):
            await own.leave()
        return own.served

    assert asyncio.run(run()) == ["running", "evaluation", "1a", "1b", "2", "3a", "3b"]


def test_small_requests_of_a_later_iteration_do_not_take_what_a_large_one_of_an_earlier_waits_for():
    async def run() -> list[str]:
        own = Queue(4)
        for place in range(4):
            await own.ask(f"running {place}", 1)
        tasks = [await own.ask("large", 1, 4), *[await own.ask(f"later {i}", 2) for i in range(4)]]
        tasks.append(await own.ask("of the same iteration", 1))
        for _ in range(4):
            await own.leave()
        served = own.served[4:]
        for task in tasks:
            task.cancel()
        return served

    assert asyncio.run(run()) == ["of the same iteration"]


def test_requests_that_nobody_waits_for_leave_the_queue_and_the_others_keep_their_order():
    async def run() -> tuple[list[str], list[bool]]:
        own, over = Queue(1), [False]

        async def abandon() -> None:
            await own.queue.wait(Waiter(1, set(), None, lambda: over[0], 0))

        await own.ask("running", 5)
        left = [asyncio.create_task(abandon()) for _ in range(3)]
        for priority in (9, 2, 8, 7, 3):
            await own.ask(str(priority), priority)
        over[0] = True
        own.queue.look()
        gone = await asyncio.gather(*left, return_exceptions=True)
        for _ in range(5):
            await own.leave()
        return own.served, [isinstance(error, EngineError) for error in gone]

    assert asyncio.run(run()) == (["running", "2", "3", "7", "8", "9"], [True] * 3)


@pytest.mark.parametrize(
    ("loads", "failed_s_ago", "server"),
    [
        ((2, 0), None, 0),  # the server that has the prefix, unless it has a quarter more of what it takes at once
        ((3, 0), None, 1),
        ((3, 1), None, 0),
        ((3, 0), 4.0, 0),  # the other failed just now
        ((3, 0), 6.0, 1),
        ((8, 1), None, 1),  # the first is full
    ],
)
def test_a_request_goes_to_the_server_that_has_its_prefix_unless_another_has_much_less_to_do(
    loads, failed_s_ago, server
):
    async def run() -> int:
        servers: list[Any] = [SimpleNamespace(url=""), SimpleNamespace(url="")]
        members = Members("generator", Limits(servers=2, at_once=8), servers=servers)
        for member, load in zip(members.living(), loads, strict=True):
            member.load = load
        first, second = members.living()
        if failed_s_ago is not None:
            second.failed = time.monotonic() - failed_s_ago
        member, _ = await RequestQueue(members, SharedGpus()).wait(Waiter(1, set(), first, lambda: False))
        return [first, second].index(member)

    assert asyncio.run(run()) == server


def test_a_request_costs_the_logarithm_of_those_that_wait():
    class Counted(Waiter):
        compared = 0

        def __lt__(self, other: Waiter) -> bool:
            Counted.compared += 1
            return super().__lt__(other)

    async def run(count: int) -> None:
        own = Queue(1)
        tasks = [await own.ask(str(place), place % 5, kind=Counted) for place in range(count)]
        for _ in range(count):
            await own.leave()
        assert all(task.done() for task in tasks)

    asyncio.run(run(2000))
    assert Counted.compared < 2 * 2000 * math.log2(2000)


def test_the_requests_of_a_session_have_its_priority(tmp_path):
    run_engines: RunEngines
    with engines_in(tmp_path) as run_engines:
        fake = run_engines.start(0)
        pool = run_engines.serving(1)
        for priority in (0, 7):
            session = pool.session(priority)
            session.ask(0, [1, 2, 3], Sampling(max_tokens=2))
            assert len(dict(session.answers())) == 1
        assert fake.priorities == [0, 7]


@pytest.mark.parametrize(("kind", "word"), [(Vllm, "--scheduling-policy"), (Sglang, "--enable-priority-scheduling")])
def test_servers_schedule_by_priority_where_several_iterations_are_generated_at_once(kind, word, tmp_path):
    assert word in words(kind(), tmp_path, by_priority=True) and word not in words(kind(), tmp_path)


def test_a_grader_grades_for_an_evaluation_first_and_then_for_the_oldest_iteration():
    order, working, allowed = list[str](), threading.Event(), threading.Event()

    def grade(responses, payloads):
        working.set()
        assert allowed.wait(30)
        order.extend(responses)
        if responses == ["fails"]:
            raise RuntimeError("a grader that fails lets the next one in")
        return [Graded(Outcome.SCORE)]

    turns = GradeTurns(grade)

    def call(name, priority):
        try:
            turns.at(priority)([name], [{}])
        except RuntimeError:
            assert name == "fails"

    threads = [threading.Thread(target=call, args=pair) for pair in (("fails", 9), ("4", 4), ("0", 0), ("2", 2))]
    threads[0].start()
    assert working.wait(30)
    for thread in threads[1:]:
        thread.start()
    while len(turns._waiting) < 3:
        threading.Event().wait(0.001)
    allowed.set()
    for thread in threads:
        thread.join(30)
    assert order == ["fails", "0", "2", "4"]
    turns.close()
    with pytest.raises(EngineError, match="no further answers are graded"):
        turns.at(0)(["late"], [{}])
