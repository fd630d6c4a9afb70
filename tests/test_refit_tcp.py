"""Messages of refits over TCP, between two ends in one process."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
import torch

from megatron_rl.config import Refit
from megatron_rl.refit.base import Deadline, TransportError
from megatron_rl.refit.board import Board
from megatron_rl.refit.slots import Slots
from megatron_rl.refit.tcp import HELLO, LENGTH, Tcp
from megatron_rl.refit.wiring import Seat, Seating, Wiring

CPU = torch.device("cpu")


@pytest.fixture
def ends():
    board, _ = Board.host("127.0.0.1")
    with contextlib.ExitStack() as stack:
        made = [Tcp(board.under("tcp"), rank, Refit(message_timeout_s=2.0)) for rank in (0, 1)]
        for end in made:
            stack.callback(end.close)
        yield *made, board


def numbers(size, first=0):
    return (torch.arange(size) + first).to(torch.uint8)


def soon():
    return Deadline.start(10.0, 10.0)


def test_refit_messages_go_over_tcp_between_hosts_and_through_shared_memory_within_one():
    board, _ = Board.host("127.0.0.1")
    trainer, near, far = seats = [Seat(host, name, "cpu") for host, name in (("a", "trainer"), ("a", "near"), ("b", "far"))]
    seating = Seating([trainer], {0: near, 1: far})
    with contextlib.ExitStack() as stack:
        wirings = [Wiring(board, seating, seat, Refit()) for seat in seats]
        for wiring in wirings:
            stack.callback(wiring.close)
        assert wirings[0].kinds == ["shared_memory", "tcp"]
        for rank, kind in ((0, Slots), (1, Tcp)):
            (out, to), (into, of) = wirings[0].route(0, rank), wirings[1 + rank].route(0, rank)
            assert type(out) is type(into) is kind
            message = out.buffer(4, CPU)
            message[:] = numbers(4)
            coming = into.receive(of, "a bucket", 4, CPU)
            sending = out.send(to, "a bucket", message, told=True)
            assert torch.equal(coming.wait(soon()), numbers(4))
            coming.release()
            sending.wait(soon())


def test_refit_messages_over_tcp_come_in_order_and_with_their_pieces(ends):
    """Of more blocks than a call takes, empty ones too; what the sender gives in three pieces the receiver takes in two."""
    a, b, _ = ends
    long = numbers(3_000_001, 7)
    target = torch.zeros(2_000_000, dtype=torch.uint8)
    first = b.receive(0, "first", 5 + 1_000_001, CPU, pieces=[target, 1_000_001])
    second = b.receive(0, "second", None, CPU)
    many = b.receive(0, "third", 4003, CPU, pieces=[4000])
    sent = [
        a.send(1, "first", numbers(5), told=True, pieces=(long[:10], long[10:1_500_000], long[1_500_000:])),
        a.send(1, "second", numbers(9, 3), told=False),
        a.send(1, "third", numbers(3, 1), told=True, pieces=[numbers(4000)[i : i + 4] for i in range(0, 4000, 4)] + [numbers(0)]),
    ]
    came = first.wait(soon())
    assert torch.equal(came[:5], numbers(5)) and torch.equal(target, long[:2_000_000]) and torch.equal(came[5:], long[2_000_000:])
    assert torch.equal(second.wait(soon()), numbers(9, 3))
    assert torch.equal(many.wait(soon()), torch.cat([numbers(3, 1), numbers(4000)]))
    for message in sent:
        message.wait(soon())
        message.release()


def test_refit_messages_over_tcp_are_not_taken_from_strangers(ends):
    """Of those that say nothing, too little, or something else; the peer's get through beside them."""
    a, b, board = ends
    host, port, _ = board.under("tcp").peek("1")
    strangers = [socket.create_connection((host, port)) for _ in range(3)]
    strangers[1].sendall(b"GET /")
    strangers[2].sendall(HELLO.pack(bytes(16), 0) + LENGTH.pack(4) + b"evil")
    with contextlib.ExitStack() as stack:
        for stranger in strangers:
            stack.enter_context(stranger)
        with contextlib.suppress(ConnectionResetError):  # also an answer
            assert strangers[2].recv(1) == b""
        coming = b.receive(0, "a bucket", 4, CPU)
        a.send(1, "a bucket", numbers(4), told=True)
        assert torch.equal(coming.wait(soon()), numbers(4))


def test_refit_messages_over_tcp_of_another_size_are_refused(ends):
    a, b, _ = ends
    a.send(1, "a bucket", numbers(4), told=True)
    with pytest.raises(TransportError, match="a bucket from 0: 4 bytes came where 6 were awaited"):
        b.receive(0, "a bucket", 6, CPU).wait(soon())


def test_refit_messages_over_tcp_fail_at_once_when_the_other_side_goes(ends):
    a, b, _ = ends
    coming = b.receive(0, "a bucket", 4, CPU)
    a.send(1, "a bucket", numbers(4), told=True)
    coming.wait(soon())
    late, start = b.receive(0, "another", 4, CPU), time.monotonic()
    a.close()
    with pytest.raises(TransportError, match="another from 0: the other side has closed the connection"):
        late.wait(soon())
    with pytest.raises(TransportError, match="given up before"):
        b.receive(0, "a third", 4, CPU).wait(soon())
    assert time.monotonic() - start < 5
    with pytest.raises(TransportError, match="closed"):
        a.send(1, "a fourth", numbers(4), told=True)


def test_refit_messages_over_tcp_that_nobody_takes_are_given_up(ends):
    """More than lies in the kernel's buffers; after the wait nothing more of its memory is sent."""
    a, b, _ = ends
    sending = a.send(1, "a bucket", torch.zeros(64 << 20, dtype=torch.uint8), told=True)
    with pytest.raises(TransportError, match="a bucket to 1: no answer within 0.2 s"):
        sending.wait(Deadline.start(10.0, 0.2))
    with pytest.raises(TransportError, match="closed"):
        b.receive(0, "a bucket", 64 << 20, CPU).wait(soon())


def test_refit_messages_over_tcp_do_not_land_when_their_wait_is_over(ends):
    """Nor what comes half before that."""
    a, b, board = ends
    host, port, secret = board.under("tcp").peek("1")
    target = torch.zeros(2000, dtype=torch.uint8)
    with socket.create_connection((host, port)) as half:
        coming = b.receive(0, "a bucket", 4, CPU, pieces=[target])
        half.sendall(HELLO.pack(bytes.fromhex(secret), 0) + LENGTH.pack(4) + bytes([1]) * 1004)
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
        a.send(7, "a bucket", numbers(4), told=True).wait(soon())
