"""A run records when each role's ranks and engines work: once an iteration, in a line of timeline.jsonl."""

import json

import pytest

from megatron_rl.messages.commands import Command
from megatron_rl.session import run_timeline
from megatron_rl.session.run_timeline import Interval, Timeline, merged
from megatron_rl.training.iteration import Iteration

RANKS = {"generator": range(2), "verifier": range(2, 3)}


@pytest.fixture
def clock(monkeypatch):
    """The time of time.monotonic(), which the tests set."""
    now = [100.0]
    monkeypatch.setattr(run_timeline.time, "monotonic", lambda: now[0])
    return now


def command(name, begun, ended, *, iteration=0, role="", collective=True):
    """A command of ranks: {rank: when its turn came}, {rank: when it answered}."""
    ran = Command(name, [*begun], collective, role, iteration)
    ran.begun, ran.ended = begun, ended
    return ran


def of_iteration(number):
    return Iteration(cycle=0, index=number, roles=("generator",), number=number)


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]


def test_a_line_has_the_intervals_and_the_busy_seconds_of_an_iteration(tmp_path, clock):
    timeline = Timeline(tmp_path / "timeline.jsonl", RANKS, {"student": "generator"})
    every = {0: 100.0, 1: 100.0, 2: 100.0}
    timeline.ran(command("refit/generator", {0: 90.0}, {0: 95.0}, role="generator"))  # before the first iteration
    timeline.ran(command("begin", every, every))
    timeline.ran(command("generate/student", {0: 101.0, 1: 101.0}, {0: 102.0, 1: 105.0}, collective=False))
    # rank 0 waits inside the command from 103 on; it runs from 106 on, when the turn came on rank 1
    timeline.ran(command("train", {0: 103.0, 1: 106.0}, {0: 109.0, 1: 109.0}, role="generator"))
    timeline.ran(command("train", {2: 107.0}, {2: 108.0}, role="verifier", iteration=1))
    timeline.generated(2, "judge", 99.0, 104.0)
    clock[0] = 110.0
    timeline.write(of_iteration(0))
    # the refit after iteration 0 runs when iteration 1 has begun
    timeline.ran(command("refit/generator", {0: 110.0, 1: 110.0}, {0: 111.0, 1: 111.0}, role="generator", iteration=1))
    timeline.ran(command("save", every, dict.fromkeys(range(3), 112.0), iteration=1))
    clock[0] = 112.0
    timeline.write(of_iteration(1))
    first, second = lines(tmp_path)
    assert {key: first[key] for key in ("iteration", "began", "ended")} == {"iteration": 0, "began": 0.0, "ended": 10.0}
    assert first["sets"] == [
        {"ranks": "0-1", "roles": ["generator"], "busy": (1 + 4 + 3 + 3) / 2},
        {"ranks": "2", "roles": ["verifier"], "busy": 1.0},
    ]
    assert first["intervals"] == [
        [0, "generator", "generating", 1.0, 5.0], [0, "generator", "training", 6.0, 9.0],
        [1, "verifier", "training", 7.0, 8.0], [2, "judge", "generating", 0.0, 4.0],
    ]  # fmt: skip
    assert second["began"] == 10.0
    assert second["intervals"] == [[0, "generator", "syncing", 10.0, 11.0], [1, "", "saving", 0.0, 12.0]]


def test_shared_ranks_are_one_set(tmp_path, clock):
    timeline = Timeline(tmp_path / "timeline.jsonl", {"generator": range(2), "verifier": range(2)}, {})
    timeline.ran(command("begin", {0: 100.0, 1: 100.0}, {0: 100.0, 1: 100.0}))
    timeline.ran(command("score", {0: 100.0, 1: 101.0}, {0: 102.0, 1: 102.0}, role="verifier"))
    clock[0] = 104.0
    timeline.write(of_iteration(0))
    [line] = lines(tmp_path)
    assert line["sets"] == [{"ranks": "0-1", "roles": ["generator", "verifier"], "busy": 1.0}]
    assert line["intervals"] == [[0, "verifier", "scoring", 1.0, 2.0]]


def test_many_rounds_of_an_engine_are_few_intervals():
    rounds = [Interval(0, "a", "generating", i / 10, i / 10 + 0.05) for i in range(1000)]
    other = Interval(0, "a", "training", 2.0, 3.0)
    assert merged([*rounds, other], 0.06) == [Interval(0, "a", "generating", 0.0, rounds[-1].ended), other]
    assert len(merged(rounds, 0.04)) == 1000
    nested = [Interval(0, "a", "generating", 0.0, 9.0), Interval(0, "a", "generating", 1.0, 2.0)]
    assert merged(nested, 0.0) == nested[:1]
