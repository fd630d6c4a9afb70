"""NIXL between two processes, over TCP: messages of growing size, and senders that are stopped, killed or closed.

The tests of refits over every transport have NIXL, too (test_refit.py, `make test-more ONLY=nixl`).
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import pytest
import torch

from megatron_rl.config.schema import ConfigError
from megatron_rl.refit.nixl_transport import RegisteredMemory
from megatron_rl.refit.transport import Deadline, TransportError

MISSING = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL: make test-more ONLY=nixl")
NIXL = [pytest.param("nixl", marks=MISSING)]
CPU = torch.device("cpu")
pytestmark = pytest.mark.multi


def send(pipe: Connection) -> None:
    """Publishes a message for each size that it is told; 0: ends the agent and frees all memory."""
    os.environ["UCX_TLS"] = "tcp"
    memory, slots = RegisteredMemory(), []
    while True:
        size = pipe.recv()
        if not size:
            memory.stop()
            slots.clear()
            pipe.send(None)
            continue
        slots.append(memory.allocate(size, CPU))
        address, message = slots[-1]
        message.copy_(torch.arange(size) % 251)
        pipe.send(memory.publish(address, message))


@pytest.fixture
def sender():
    """A process with `send`, and the end of its pipe."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=send, args=(there,), daemon=True)
    process.start()
    yield process, here
    process.kill()
    process.join()


def published(pipe: Connection, size: int) -> object:
    pipe.send(size)
    return pipe.recv()


@pytest.mark.parametrize("transport", NIXL)
def test_messages_are_read_from_slots_of_growing_size(transport, sender, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    reader = RegisteredMemory()
    for size in (10, 1 << 20, 3, 40 << 20):
        found = reader.open(published(sender[1], size), CPU, Deadline.start(30.0, 20.0))[:size]
        assert torch.equal(found, (torch.arange(size) % 251).to(torch.uint8))
    assert not reader._unfinished
    reader.stop()


@MISSING
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "closed"])
def test_a_read_from_a_sender_that_is_gone_ends_in_time_nixl(how, sender, monkeypatch):
    """A sender that has closed its transport lives on, although its memory is gone."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    process, pipe = sender
    reader = RegisteredMemory()
    reader.open(published(pipe, 1 << 20), CPU, Deadline.start(30.0, 20.0))
    late = published(pipe, 40 << 20)
    if how == "closed":
        assert published(pipe, 0) is None
    else:
        os.kill(process.pid, getattr(signal, how))
    start = time.monotonic()
    with pytest.raises(TransportError, match="NIXL|no answer within 2.0 s"):
        reader.open(late, CPU, Deadline.start(30.0, 2.0))
    assert time.monotonic() - start < 10
    assert how != "closed" or process.is_alive()
    reader.stop()


def test_without_nixl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"refit.transport = nixl: .*install NIXL in the environments of the trainer"):
        RegisteredMemory()
