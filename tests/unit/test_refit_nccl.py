"""What a refit does so that NCCL's ways end neither a process nor a refit, with a group that behaves like NCCL's."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.schema import ConfigError, RefitConfig
from megatron_rl.refit.process_group_transport import ERROR_HANDLING, PointToPoint
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.transport import Deadline, TransportError
from megatron_rl.refit.transport_choice import RankLocation, RankLocations, Wiring

SETTINGS = RefitConfig(timeout_s=3600.0, message_timeout_s=0.3)


class Group:
    """A group whose first message to a peer waits until the peer has come, which is NCCL's way."""

    made: list[Group] = []

    def __init__(self, store, rank, size, options) -> None:
        self.options, self.handling, self.come = options, os.environ.get(ERROR_HANDLING), threading.Event()
        self.aborted = False
        Group.made.append(self)

    def send(self, tensors, peer, tag):
        self.come.wait()
        return SimpleNamespace(is_completed=lambda: True, exception=lambda: None)

    recv = send

    def abort(self) -> None:
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


def test_a_late_message_does_not_end_the_process(nccl, store, monkeypatch):
    """torch's watchdog ended it after `message_timeout_s`, before the refit could leave the engine out."""
    monkeypatch.setenv(ERROR_HANDLING, "3")
    PointToPoint(store, 0, 2, backend="nccl", settings=SETTINGS).close()
    (group,) = Group.made
    assert group.handling == "0" and os.environ[ERROR_HANDLING] == "3"
    assert group.options._timeout > timedelta(seconds=SETTINGS.timeout_s)


def test_a_peer_that_does_not_connect_is_left_out_in_time(nccl, store):
    """The call that starts the first message waited for it without end."""
    transport = PointToPoint(store, 0, 2, backend="nccl", settings=SETTINGS)
    found: list[str] = []

    def send() -> None:
        handle = transport.send(1, "bucket 0", torch.zeros(8, dtype=torch.uint8), size_known=True)
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
    transport = PointToPoint(store, 0, 2, backend="nccl", settings=RefitConfig(message_timeout_s=60.0))
    handle = transport.receive(1, "bucket 0", 8, torch.device("cpu"))
    Group.made[0].come.set()
    assert len(handle.wait(Deadline.start(60.0, 60.0))) == 8
    transport.close()


def test_a_message_that_failed_or_never_ends_is_an_error_of_the_transport(nccl, store, monkeypatch):
    transport = PointToPoint(store, 0, 2, backend="nccl", settings=SETTINGS)
    group, failed = Group.made[0], RuntimeError("the peer is gone\nand much else")
    for works, said in (
        (SimpleNamespace(is_completed=lambda: True, exception=lambda: failed), "bucket 0 to 1: the peer is gone"),
        (
            SimpleNamespace(is_completed=lambda: False, exception=lambda: failed),
            "bucket 0 to 1: no answer within 0.3 s",
        ),
    ):
        monkeypatch.setattr(group, "send", lambda *_, works=works: works)
        handle = transport.send(1, "bucket 0", torch.zeros(8, dtype=torch.uint8), size_known=True)
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
