"""What a refit does so that NCCL's ways end neither a process nor a refit, with a group that behaves like NCCL's."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.schema import ConfigError, RefitConfig
from megatron_rl.refit import nccl_transport
from megatron_rl.refit.nccl_transport import QUIET, Nccl
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.transport import Deadline, TransportError
from megatron_rl.refit.transport_choice import RankLocation, RankLocations, Wiring

SETTINGS = RefitConfig(timeout_s=3600.0, message_timeout_s=0.3)


CURRENT = threading.local()  # `stream`: the thread's current CUDA stream


class Group:
    """A group whose first message to a peer waits until the peer has come, which is NCCL's way."""

    made: list[Group] = []

    def __init__(self, store, rank, size, options) -> None:
        self.options, self.come, self.aborts = options, threading.Event(), threading.Event()
        self.environment = {name: os.environ.get(name) for name in QUIET}
        self.aborted, self.streams = False, list[str | None]()
        self.aborts.set()
        Group.made.append(self)

    def send(self, tensors, peer, tag):
        self.streams.append(getattr(CURRENT, "stream", None))
        self.come.wait()
        return SimpleNamespace(is_completed=lambda: True, exception=lambda: None)

    recv = send

    def abort(self) -> None:
        self.aborts.wait()
        self.aborted = True
        self.come.set()


class Options:
    _timeout = timedelta(minutes=10)


Group.Options = Options


@pytest.fixture
def nccl(monkeypatch):
    """Puts the group in the place of NCCL's."""
    Group.made.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)


@pytest.fixture
def store():
    return RefitStore.host("127.0.0.1")[0]


def announce(store: RefitStore) -> None:
    """Announces that rank 1 is about to connect to rank 0, as rank 1 does."""
    store.under("connecting").put("1-0", True)


def test_a_late_message_does_not_end_the_process(nccl, store, monkeypatch):
    """torch's watchdog ended it after `message_timeout_s`, before the refit could leave the engine out."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    Nccl(store, 0, 2, SETTINGS).close()
    (group,) = Group.made
    assert group.environment == dict.fromkeys(QUIET, "0")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    assert group.options._timeout > timedelta(seconds=SETTINGS.timeout_s)


def test_a_peer_that_does_not_connect_is_left_out_in_time(nccl, store):
    """The call that starts the first message waited for it without end."""
    announce(store)
    transport = Nccl(store, 0, 2, SETTINGS)
    found: list[str] = []

    def send() -> None:
        handle = transport.send(1, "bucket 0", torch.zeros(8, dtype=torch.uint8))
        try:
            handle.wait(Deadline.start(60.0, SETTINGS.message_timeout_s))
        except TransportError as error:
            found.append(str(error))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(30.0)
    assert found == ["bucket 0 to 1: no answer within 0.3 s"]
    transport.close()
    assert Group.made[0].aborted


def test_a_message_that_is_started_late_still_comes(nccl, store):
    transport = Nccl(store, 0, 2, RefitConfig(message_timeout_s=60.0))
    handle = transport.receive(1, "bucket 0", 8, torch.device("cpu"))
    Group.made[0].come.set()
    announce(store)
    assert len(handle.wait(Deadline.start(60.0, 60.0))) == 8
    assert store.under("connecting").peek("0-1", bool) is True
    transport.close()


def test_nccl_is_not_called_for_a_peer_that_never_comes(nccl, store):
    """NCCL's wait for the peer had no end: every engine that died before its first message left a thread behind."""
    before = {*threading.enumerate()}
    transport = Nccl(store, 0, 2, SETTINGS)
    handle = transport.receive(1, "bucket 0", 8, torch.device("cpu"))
    with pytest.raises(TransportError, match=r"bucket 0 from 1: no answer within 0\.3 s"):
        handle.wait(Deadline.start(60.0, SETTINGS.message_timeout_s))
    transport.close()
    end = time.monotonic() + 30.0
    while left := [t for t in threading.enumerate() if t not in before and "_work" in t.name]:
        assert time.monotonic() < end, left
        time.sleep(0.01)
    assert not Group.made[0].streams


def test_nccl_is_not_called_for_messages_that_wait_when_the_group_is_closed(nccl, store):
    """Behind the message of a peer that never came, a message of a peer that had come was started after the abort."""
    store.under("connecting").put("2-0", True)
    transport = Nccl(store, 0, 3, SETTINGS)
    handles = [transport.receive(peer, "bucket 0", 8, torch.device("cpu")) for peer in (1, 2)]
    transport.close()
    for handle in handles:
        with pytest.raises(TransportError, match="the group was closed before rank"):
            handle.wait(Deadline.start(60.0, 60.0))
    assert not Group.made[0].streams


def test_an_abort_that_never_returns_does_not_hold_the_trainer(nccl, store, monkeypatch, caplog):
    """NCCL's abort may wait for the abort of a peer that is dead; torch waits for it as long as for a message."""
    monkeypatch.setattr(nccl_transport, "ABORT_S", 0.1)
    transport = Nccl(store, 0, 2, SETTINGS)
    (group,) = Group.made
    group.aborts.clear()
    closing = threading.Thread(target=transport.close, daemon=True)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive() and not group.aborted
    assert "NCCL has not aborted the group of a refit within 0 s and is left behind" in caplog.text
    group.aborts.set()


def test_an_abort_that_fails_is_logged(nccl, store, monkeypatch, caplog):
    transport = Nccl(store, 0, 2, SETTINGS)

    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled\nand much else")

    monkeypatch.setattr(Group.made[0], "abort", fail)
    transport.close()
    assert "NCCL could not abort the group of a refit: NCCL error: unhandled" in caplog.text


def test_a_message_is_started_on_the_stream_of_its_sender(nccl, store, monkeypatch):
    """The thread that starts messages has the default stream: NCCL did not wait for the sender's work on another."""

    @contextlib.contextmanager
    def stream(chosen):
        before, CURRENT.stream = getattr(CURRENT, "stream", None), chosen and chosen.name
        yield
        CURRENT.stream = before

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(name=CURRENT.stream, device=device)
    )
    announce(store)
    transport = Nccl(store, 0, 2, RefitConfig(message_timeout_s=60.0))
    (group,) = Group.made
    group.come.set()
    message = SimpleNamespace(is_cuda=True, device=gpu)
    for name in ("the sender's", "another of the sender's"):
        with stream(SimpleNamespace(name=name)):
            transport.send(1, "bucket 0", message).wait(Deadline.start(60.0, 60.0))
    assert group.streams == ["the sender's", "another of the sender's"]
    transport.close()


def test_a_message_that_failed_or_never_ends_is_an_error_of_the_transport(nccl, store, monkeypatch):
    announce(store)
    transport = Nccl(store, 0, 2, SETTINGS)
    group, failed = Group.made[0], RuntimeError("the peer is gone\nand much else")
    for works, said in (
        (SimpleNamespace(is_completed=lambda: True, exception=lambda: failed), "bucket 0 to 1: the peer is gone"),
        (
            SimpleNamespace(is_completed=lambda: False, exception=lambda: failed),
            "bucket 0 to 1: no answer within 0.3 s",
        ),
    ):
        monkeypatch.setattr(group, "send", lambda *_, works=works: works)
        handle = transport.send(1, "bucket 0", torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(TransportError) as error:
            handle.wait(Deadline.start(60.0, SETTINGS.message_timeout_s))
        assert str(error.value) == said
    transport.close()


def make_locations(trainer: str, engine: str) -> RankLocations:
    return RankLocations([RankLocation("a", "t", "GPU-0", trainer)], {0: RankLocation("a", "e", "GPU-1", engine)})


def test_different_versions_of_nccl_are_not_connected(store, caplog):
    """NCCL refuses to connect them, in the middle of a run's first refit."""
    locations = make_locations("2.27.7", "2.28.9")
    wiring = Wiring(store, locations, locations.trainer[0], SETTINGS)
    assert wiring.kinds == ["tcp"]
    assert "trainer and engine have NCCL 2.27.7 and 2.28.9, which cannot be connected: weights go over" in caplog.text
    wiring.close()
    with pytest.raises(ConfigError, match="refit.transport = nccl: trainer and engine have NCCL 2.27.7 and 2.28.9"):
        Wiring(store, locations, locations.trainer[0], RefitConfig(transport="nccl"))


def test_equal_versions_of_nccl_are_connected(nccl, store, caplog):
    locations = make_locations("2.28.9", "2.28.9")
    wiring = Wiring(store, locations, locations.trainer[0], SETTINGS)
    assert wiring.kinds == ["nccl"] and not caplog.text
    wiring.close()


def test_a_process_and_another_on_its_gpu_need_no_nccl(store, caplog):
    locations = RankLocations(
        [RankLocation("a", "t", "GPU-0", "2.27.7")], {0: RankLocation("a", "e", "GPU-0", "2.28.9")}
    )
    assert Wiring(store, locations, locations.trainer[0], SETTINGS).kinds == ["cuda_ipc"] and not caplog.text
