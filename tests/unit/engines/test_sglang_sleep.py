"""SGLang servers in the trainer's GPUs: which memory they give back and take again, and servers that refuse to."""

from __future__ import annotations

import pytest
from fake_servers import ROLE, engines_in
from fake_sglang import MEMORY, RELEASE, RESUME, FakeSglang

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.sglang.client import SglangServer
from megatron_rl.engines.sglang.settings import Sglang

TOKEN = "t"
ORDERS = ("/pause_generation", "/flush_cache", RELEASE, RESUME, "/continue_generation")


@pytest.fixture
def fake():
    made = FakeSglang(TOKEN)
    yield made
    made.close()


def client(fake, token=TOKEN):
    return SglangServer(fake.url, token, Sglang(colocate=True), 5, ModelFacts(ends=frozenset({7}), vocab=97))


@pytest.mark.parametrize("discard", [True, False])
def test_a_sleeping_server_has_given_all_its_memory_back(fake, discard):
    """Also where weights could be dropped: what becomes of them is decided when SGLang is started."""
    client(fake).sleep(discard=discard)
    assert fake.released == MEMORY and fake.paused and not fake.crashed
    assert fake.seen == [
        ("/pause_generation", {"mode": "abort"}),
        ("/flush_cache", None),
        (RELEASE, {"tags": ["kv_cache", "weights"]}),
    ]


def test_memory_is_released_when_the_last_batch_has_left():
    """SGLang's scheduler ends when it is asked for its memory while it has something to do."""
    fake = FakeSglang(TOKEN, running=3, flushes=2)
    client(fake).sleep(discard=True)
    assert not fake.crashed and fake.released == MEMORY
    assert len(fake.bodies("/flush_cache")) == 3
    fake.close()


def test_a_server_that_wakes_has_all_its_memory_before_it_goes_on(fake):
    server = client(fake)
    server.sleep(discard=False)
    server.wake()
    assert not fake.released and not fake.paused and not fake.crashed
    assert fake.seen[-2:] == [(RESUME, {"tags": ["weights", "kv_cache"]}), ("/continue_generation", {})]


def test_before_a_refit_the_weights_come_back_and_the_cache_after_it(fake):
    server = client(fake)
    server.sleep(discard=True)
    server.pause()
    assert fake.released == {"kv_cache"} and fake.bodies(RESUME) == [{"tags": ["weights"]}]
    server.resume()
    assert fake.paused, "nothing may be written before the cache is there"
    server.wake()
    assert fake.bodies(RESUME)[1:] == [{"tags": ["kv_cache"]}]
    assert not fake.released and not fake.paused and not fake.crashed


def test_a_server_with_its_weights_back_gives_those_alone_again(fake):
    """It took new weights, and sleeps while another role of the iteration trains."""
    server = client(fake)
    server.sleep(discard=True)
    server.pause()
    server.sleep(discard=False)
    assert fake.bodies(RELEASE)[1:] == [{"tags": ["weights"]}]
    assert fake.released == MEMORY and not fake.crashed
    assert len(fake.bodies("/flush_cache")) == 1, "there is no cache to be emptied"


def test_memory_is_neither_released_nor_resumed_twice(fake):
    server = client(fake)
    server.wake()  # it has not slept
    assert not fake.bodies(RESUME)
    for _ in range(2):
        server.sleep(discard=True)
    for _ in range(2):
        server.pause()
    for _ in range(2):
        server.wake()
    assert [len(fake.bodies(path)) for path in (RELEASE, RESUME)] == [1, 2] and not fake.crashed


@pytest.mark.parametrize("path", [order for order in ORDERS if order != "/flush_cache"])
@pytest.mark.parametrize(("status", "error"), [(400, RequestRefused), (500, ServerLost), (401, ConfigError)])
def test_a_server_that_refuses_or_fails_says_so(fake, path, status, error):
    server = client(fake)
    fake.fail(path, status)
    with pytest.raises(error, match=path if status != 401 else "refuses the job's token"):
        server.sleep(discard=True)
        server.wake()


def test_what_failed_is_asked_for_again_and_nothing_else(fake):
    server = client(fake)
    fake.fail(RELEASE, 500)
    with pytest.raises(ServerLost):
        server.sleep(discard=True)
    server.sleep(discard=True)
    fake.fail(RESUME, 500)
    with pytest.raises(ServerLost):
        server.pause()
    assert fake.released == MEMORY
    server.pause()
    server.wake()
    assert not fake.released and not fake.crashed


def test_a_cache_that_is_never_emptied_keeps_the_server_from_sleep(monkeypatch):
    monkeypatch.setattr("megatron_rl.engines.sglang.client.FLUSH_S", 0.0)
    fake = FakeSglang(TOKEN, flushes=10**6)
    with pytest.raises(ServerLost, match="kept the cache of the old weights"):
        client(fake).sleep(discard=True)
    assert not fake.bodies(RELEASE)
    fake.close()


def test_only_who_has_the_token_puts_a_server_to_sleep(fake):
    with pytest.raises(ConfigError, match="refuses the job's token"):
        client(fake, token="other").sleep(discard=True)


@pytest.mark.parametrize("status", [400, 500])
def test_a_pool_leaves_out_a_server_that_cannot_sleep(fake, tmp_path, status):
    """Its supervisor then ends it, and the trainer gets the GPU."""
    with engines_in(tmp_path) as run_engines:
        run_engines.announce(fake.url, 0)
        pool = run_engines.open(connector=lambda listing: client(fake), colocate=True, replicas=1)
        run_engines.living(1)
        [listing] = run_engines.registry.read(ROLE)
        assert pool.sleep([listing.incarnation], discard=False) == [listing.incarnation]
        pool.wake()
        fake.fail(RELEASE, status)
        assert pool.sleep([listing.incarnation], discard=False) == []
        assert "could not be put to sleep" in pool.members.known()
