"""Servers that die: the budget of new starts, and the waits between them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megatron_rl.engines.server_process import StartError
from megatron_rl.session.restart_policy import LONGEST_WAIT_S, Restarts
from megatron_rl.session.run_server import _keep_alive

DAY_S = 86400.0


def test_hostile_crash_a_day_never_uses_up_the_restarts():
    restarts = Restarts(3, wait_s=10.0, reset_s=3600.0)
    assert [restarts.died(DAY_S) for _ in range(100)] == [0.0] * 100


def test_hostile_crash_loop_waits_longer_and_longer_and_ends():
    restarts = Restarts(3, wait_s=10.0, reset_s=3600.0)
    assert [restarts.died(5.0) for _ in range(4)] == [0.0, 10.0, 20.0, None]
    assert Restarts(0, wait_s=10.0, reset_s=3600.0).died(DAY_S) is None


def test_hostile_crash_loop_under_a_large_budget_waits_five_minutes_at_most():
    restarts = Restarts(10**6, wait_s=10.0, reset_s=3600.0)
    waits = [restarts.died(0.0) for _ in range(5000)]
    assert waits[:7] == [0.0, 10.0, 20.0, 40.0, 80.0, 160.0, LONGEST_WAIT_S] and {*waits[6:]} == {LONGEST_WAIT_S}


class Dying:
    """A server that dies each time after so many seconds of answers; None: it does not start at all."""

    log = Path("engine.log")

    def __init__(self, *lives: float | None) -> None:
        self.lives = [*lives]
        self.starts: list[float] = []

    def serve(self, stop: threading.Event) -> float:
        self.starts.append(time.monotonic())
        healthy_s = self.lives.pop(0)
        if healthy_s is None:
            raise StartError("no such model")
        return healthy_s


def test_hostile_deaths_count_in_a_row_alone(capsys):
    server = Dying(1.0, 1.0, DAY_S, 1.0, 1.0)
    assert _keep_alive(server, Restarts(2, wait_s=0.1), threading.Event(), "judge-0") == 1
    assert len(server.starts) == 5, "the third death began a new row"
    gaps = [b - a for a, b in zip(server.starts, server.starts[1:], strict=False)]
    assert gaps[0] < 0.1 <= gaps[1] and gaps[2] < 0.1 <= gaps[3]
    error = capsys.readouterr().err
    assert "judge-0 died 3 times in a row (engine.restarts = 2;" in error and "see engine.log" in error
    assert error.count("starting it again in 0.1 s (2 of 2)") == 2


def test_hostile_server_that_never_starts_ends_with_its_own_words(capsys):
    server = Dying(None, None, None)
    with pytest.raises(StartError, match="no such model"):
        _keep_alive(server, Restarts(2, wait_s=0.1), threading.Event(), "judge-0")
    assert len(server.starts) == 3 and capsys.readouterr().err.count("no such model") == 2


def test_a_wait_between_two_starts_ends_when_the_server_is_asked_to_leave():
    stop, server = threading.Event(), Dying(None, None)
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    assert _keep_alive(server, Restarts(2, wait_s=600.0), stop, "judge-0") == 0
    assert len(server.starts) == 2
    timer.join()
