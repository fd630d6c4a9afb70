"""What a pool does when it looks at its servers: requests that wait, and servers without the current weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fake_servers import ROLE, Asked, RunEngines, engines_in, until
from limits import PROCESS_S
from one_process import CommandsAtOnce

from megatron_rl.engines.pool.membership import Limits, Member, Members
from megatron_rl.engines.pool.request_queue import RequestQueue, Waiter
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.pool.states import Alive, Gone
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.session.colocated_servers import ColocatedServers


@pytest.fixture
def run_engines(tmp_path):
    with engines_in(tmp_path) as made:
        yield made


def test_a_request_that_a_server_failed_stays_in_the_queue_until_a_server_is_back():
    async def served() -> tuple[Member, int]:
        members = Members(ROLE, Limits(servers=1, at_once=4), servers=[SimpleNamespace(url="")])
        queue, [member] = RequestQueue(members, SharedGpus()), members.living()
        members.post(Gone(0, "", "away"))
        waiter = Waiter(sequences=1, failed={member}, prefer=None, over=lambda: False)
        waiting = asyncio.create_task(queue.wait(waiter))
        await asyncio.sleep(0)
        queue.look()
        members.post(Alive(0, "", 0))
        queue.look()
        assert (await asyncio.wait_for(waiting, 5.0)) == (member, 0)
        return member.load, member.requests

    assert asyncio.run(served()) == (1, 1)


@pytest.mark.parametrize("slept", [False, True])
def test_servers_that_work_are_not_put_to_sleep_for_one_that_comes_back(run_engines: RunEngines, slept: bool):
    first, second = run_engines.start(0), run_engines.start(1)
    pool = run_engines.serving(2, colocate=True, replicas=2)
    servers = ColocatedServers(CommandsAtOnce(), {ROLE: pool}, [], discarding=[], start_timeout_s=5.0)
    if slept:
        servers.sleep([])
        servers.wake()
    first.seen.clear()
    calls = run_engines.refreshes()
    run_engines.beats[1].clear()
    run_engines.announce(second.url, 1)  # another incarnation
    until("the new server", lambda: len(pool.members.living()) == 2 and len(pool.members.serving()) == 1)
    [[answer]] = complete(pool, [[1, 2, 3]], Sampling(max_tokens=4))
    assert answer.versions == [(0, 1)] and calls == [] and "/sleep" not in first.seen


def test_a_request_that_reaches_a_sleeping_server_is_answered_as_soon_as_the_server_wakes(run_engines: RunEngines):
    """The fake server answered only after the timeout of the request."""
    fake = run_engines.start()
    pool = run_engines.serving(1, colocate=True, replicas=1, request_timeout_s=10 * PROCESS_S)
    pool.sleep([], discard=False)
    asked = Asked(pool, [[1, 2, 3]], Sampling(max_tokens=4))
    until("the request", lambda: fake.running)
    pool.wake()
    assert asked.result()[0][0].versions == [(0, 1)] and not fake.crashed
