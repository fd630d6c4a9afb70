"""Messages of refits over TCP, between two ends in one process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import environment
from limits import PROCESS_S

from megatron_rl.config.schema import RefitConfig
from megatron_rl.refit import tcp_transport
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.shared_memory_transport import Slots
from megatron_rl.refit.tcp_transport import HELLO, LENGTH, Tcp, hello
from megatron_rl.refit.transport import Deadline, TransportError
from megatron_rl.refit.transport_choice import RankLocation, RankLocations, Wiring

CPU = torch.device("cpu")


@pytest.fixture
def ends():
    store, _ = RefitStore.host("127.0.0.1")
    with contextlib.ExitStack() as stack:
        made = [Tcp(store.under("tcp"), rank, RefitConfig(message_timeout_s=2.0)) for rank in (0, 1)]
        for end in made:
            stack.callback(end.close)
        yield *made, store


def numbers(size, first=0):
    return (torch.arange(size) + first).to(torch.uint8)


def soon():
    return Deadline.start(10.0, 10.0)


def test_refit_messages_go_over_tcp_between_hosts_and_through_shared_memory_within_one():
    store, _ = RefitStore.host("127.0.0.1")
    trainer, near, far = members = [
        RankLocation(host, name, "cpu") for host, name in (("a", "trainer"), ("a", "near"), ("b", "far"))
    ]
    locations = RankLocations([trainer], {0: near, 1: far})
    with contextlib.ExitStack() as stack:
        wirings = [Wiring(store, locations, member, RefitConfig()) for member in members]
        for wiring in wirings:
            stack.callback(wiring.close)
        assert wirings[0].kinds == ["shared_memory", "tcp"]
        for rank, kind in ((0, Slots), (1, Tcp)):
            (out, to), (into, of) = wirings[0].route(0, rank), wirings[1 + rank].route(0, rank)
            assert type(out) is type(into) is kind
            message = out.buffer(4, CPU)
            message[:] = numbers(4)
            coming = into.receive(of, "a bucket", 4, CPU)
            sending = out.send(to, "a bucket", message)
            assert torch.equal(coming.wait(soon()), numbers(4))
            coming.release()
            sending.wait(soon())


def test_refit_connection_that_fails_at_its_first_words_is_closed_and_the_message_says_why(ends, monkeypatch):
    made, connect = [], socket.create_connection

    def recorded(*args, **settings):
        made.append(connect(*args, **settings))
        return made[-1]

    def gone(*_):
        raise OSError("the network is gone")

    monkeypatch.setattr(socket, "create_connection", recorded)
    monkeypatch.setattr(tcp_transport, "hello", gone)
    with pytest.raises(TransportError, match="the network is gone"):
        ends[0].send(1, "a bucket", numbers(5)).wait(soon())
    assert [connection.fileno() for connection in made] == [-1]


def test_refit_messages_over_tcp_come_in_order_and_with_their_pieces(ends):
    """Messages have more blocks than one call takes, and empty ones.

    The receiver takes three of the sender's pieces as two.
    """
    a, b, _ = ends
    long = numbers(3_000_001, 7)
    target = torch.zeros(2_000_000, dtype=torch.uint8)
    first = b.receive(0, "first", 5 + 1_000_001, CPU, pieces=[target, 1_000_001])
    second = b.receive(0, "second", None, CPU)
    many = b.receive(0, "third", 4003, CPU, pieces=[4000])
    sent = [
        a.send(1, "first", numbers(5), pieces=(long[:10], long[10:1_500_000], long[1_500_000:])),
        a.send(1, "second", numbers(9, 3)),
        a.send(
            1,
            "third",
            numbers(3, 1),
            pieces=[numbers(4000)[i : i + 4] for i in range(0, 4000, 4)] + [numbers(0)],
        ),
    ]
    came = first.wait(soon())
    assert (
        torch.equal(came[:5], numbers(5))
        and torch.equal(target, long[:2_000_000])
        and torch.equal(came[5:], long[2_000_000:])
    )
    assert torch.equal(second.wait(soon()), numbers(9, 3))
    assert torch.equal(many.wait(soon()), torch.cat([numbers(3, 1), numbers(4000)]))
    for message in sent:
        message.wait(soon())
        message.release()


def test_refit_messages_over_tcp_are_not_taken_from_strangers(ends):
    """Strangers say nothing, too little, something else, or what another peer said.

    The peer's messages still get through.
    """
    a, b, store = ends
    host, port, challenge = store.under("tcp").peek("1", tuple[str, int, str])
    another = HELLO.pack(HELLO.unpack(hello(store, challenge, 3))[0], 0)
    said = [b"", b"GET /", HELLO.pack(bytes(32), 0), another, hello(RefitStore(None, b"guessed"), challenge, 0)]
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((host, port))) for _ in said]
        for stranger, words in zip(strangers, said, strict=True):
            stranger.sendall(words)
        for stranger in strangers[2:]:
            assert stranger.recv(1) == b""
        coming = b.receive(0, "a bucket", 4, CPU)
        a.send(1, "a bucket", numbers(4))
        assert torch.equal(coming.wait(soon()), numbers(4))


def test_refit_messages_over_tcp_of_another_size_are_refused(ends):
    a, b, _ = ends
    a.send(1, "a bucket", numbers(4))
    with pytest.raises(TransportError, match="a bucket from 0: 4 bytes came where 6 were expected"):
        b.receive(0, "a bucket", 6, CPU).wait(soon())


def test_refit_messages_over_tcp_fail_at_once_when_the_other_side_goes(ends):
    a, b, _ = ends
    coming = b.receive(0, "a bucket", 4, CPU)
    a.send(1, "a bucket", numbers(4))
    coming.wait(soon())
    late, start = b.receive(0, "another", 4, CPU), time.monotonic()
    a.close()
    with pytest.raises(TransportError, match="another from 0: the other side has closed the connection"):
        late.wait(soon())
    with pytest.raises(TransportError, match="given up before"):
        b.receive(0, "a third", 4, CPU).wait(soon())
    assert time.monotonic() - start < 5
    with pytest.raises(TransportError, match="closed"):
        a.send(1, "a fourth", numbers(4))


def test_refit_messages_over_tcp_that_nobody_takes_are_given_up(ends):
    """The message is larger than the kernel's buffers. After the wait nothing more of its memory is sent."""
    a, b, _ = ends
    sending = a.send(1, "a bucket", torch.zeros(64 << 20, dtype=torch.uint8))
    with pytest.raises(TransportError, match="a bucket to 1: no answer within 0.2 s"):
        sending.wait(Deadline.start(10.0, 0.2))
    with pytest.raises(TransportError, match="closed"):
        b.receive(0, "a bucket", 64 << 20, CPU).wait(soon())


def test_refit_messages_over_tcp_do_not_land_when_their_wait_is_over(ends):
    """Half of the message comes before the wait is over, and that does not change either."""
    a, b, store = ends
    host, port, challenge = store.under("tcp").peek("1", tuple[str, int, str])
    target = torch.zeros(2000, dtype=torch.uint8)
    with socket.create_connection((host, port)) as half:
        coming = b.receive(0, "a bucket", 4, CPU, pieces=[target])
        half.sendall(hello(store, challenge, 0) + LENGTH.pack(4) + bytes([1]) * 1004)
        with pytest.raises(TransportError, match="a bucket from 0: no answer within 0.2 s"):
            coming.wait(Deadline.start(10.0, 0.2))
        before = target.clone()
        with contextlib.suppress(OSError):
            half.sendall(bytes([1]) * 1000)
        time.sleep(0.2)
    assert before.any() and torch.equal(target, before)


def test_refit_messages_over_tcp_to_somebody_who_never_came(ends):
    a, _, _ = ends
    with pytest.raises(TransportError, match="a bucket to 7: it did not come within 2 s"):
        a.send(7, "a bucket", numbers(4)).wait(soon())


def test_refit_messages_over_tcp_leave_nothing_open_when_it_closes(ends):
    """One connection is one that nobody received from; its sender notices the end."""
    _, b, store = ends
    host, port, challenge = store.under("tcp").peek("1", tuple[str, int, str])
    with socket.create_connection((host, port)) as sender:
        sender.settimeout(10.0)
        sender.sendall(hello(store, challenge, 0))
        end = time.monotonic() + 10
        while not b._lanes:
            assert time.monotonic() < end
            time.sleep(0.01)
        b.close()
        assert sender.recv(1) == b""


def test_refit_messages_over_tcp_do_not_land_when_their_wait_was_interrupted(ends):
    a, b, _ = ends
    target = torch.zeros(1000, dtype=torch.uint8)
    first = b.receive(0, "a bucket", 4, CPU)
    a.send(1, "a bucket", numbers(4))
    first.wait(soon())
    coming = b.receive(0, "another", 4, CPU, pieces=[target])

    def gone() -> bool:
        raise TransportError("the refit store is gone")

    with pytest.raises(TransportError, match="the refit store is gone"):
        coming.wait(Deadline.start(10.0, 10.0, gone))
    a.send(1, "another", numbers(4), pieces=[numbers(1000, 1)])
    time.sleep(0.2)
    assert not target.any()


def test_refit_stores_are_closed_to_those_without_the_secret():
    store, address = RefitStore.host("127.0.0.1")
    assert address.secret not in f"{address} {address!r}"
    store.put("setup", {"a": 1})
    other = RefitStore.join(address)
    assert other.get("setup", dict, 5.0) == {"a": 1}
    with pytest.raises(TransportError, match="has another secret: it is another run's"):
        RefitStore.join(address._replace(secret="00"))
    assert not store.has("next", 0.05) and store.peek("next", int) is None
    other.under("epoch1").put("next", 1)
    assert store.has("epoch1/next", 5.0) and store.under("epoch1").peek("next", int) == 1
    other.remove("epoch1/next")
    with pytest.raises(TransportError, match="the refit store got no value of 'epoch1/next' within 0.1 s"):
        store.get("epoch1/next", int, 0.1)


LATE = """
import threading, torch
from megatron_rl.config.schema import RefitConfig
from megatron_rl.refit.transport import Deadline, TransportError
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.tcp_transport import Tcp

hosted, address = RefitStore.host("127.0.0.1")
ends = {}
def open_(rank):
    store = RefitStore.join(address)
    ends[rank] = Tcp(store, rank, RefitConfig())
opening = [threading.Thread(target=open_, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in opening]
[thread.join() for thread in opening]
waits = [ends[1].receive(0, "a bucket", 8, torch.device("cpu"))]
# peer 5 never came, so that its lane asks the store
waits.append(ends[0].send(5, "a bucket", torch.zeros(8, dtype=torch.uint8)))
for wait in waits:
    try:
        wait.wait(Deadline.start(0.2, 0.2))
    except TransportError as error:
        print(error)
for end in ends.values():
    end.close()
"""


def test_refit_messages_that_are_late_do_not_abort_the_process_at_its_end():
    """torch aborts the process when Python exits under a thread that is inside its calls."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], env=environment(), capture_output=True, text=True, timeout=PROCESS_S
    )
    assert done.returncode == 0 and "no answer within 0.2 s" in done.stdout, done.stdout + done.stderr
