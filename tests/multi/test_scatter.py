"""Each rank receives what its replica trains on, once; and any number of ranks trains what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from scatter_worker import SIZE, alone, make_rollouts

pytestmark = pytest.mark.multi


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    worker = Path(__file__).parents[1] / "helpers" / "scatter_worker.py"
    return run_ranks(worker, 4, tmp_path_factory.mktemp("scatter"))


def test_ranks_of_a_replica_hold_its_rollouts_and_no_others(answers):
    held = [answer["numbers"] for answer in answers]
    assert held[0] == held[1] and held[2] == held[3]
    assert sorted(held[0] + held[2]) == list(range(12)) and len(held[0]) == 6
    assert all(answer["same"] for answer in answers)


def test_the_driver_sends_each_replica_its_bytes_once(answers):
    """Tokens and log-probs are 8 bytes a token; the rest is a few dozen bytes a rollout."""
    arrays = [8 * sum(SIZE + i for i in answers[rank]["numbers"]) for rank in (0, 2)]
    [[to, size]] = answers[0]["direct"]
    assert to == 2 and arrays[1] < size < 1.1 * arrays[1]
    assert [len(answer["direct"]) for answer in answers[1:]] == [0, 0, 0]
    shared = [answer["shared"] for answer in answers]
    assert shared[1] == shared[3] == [] and len(shared[0]) == len(shared[2]) == 1 and shared[2] == [size]
    assert arrays[0] < shared[0][0] < 1.1 * arrays[0]


def test_what_the_driver_finds_wrong_is_raised_on_every_rank(answers):
    first, *others = (answer["refused"] for answer in answers)
    assert first.startswith("ValueError: group '7' has no advantages")
    assert all(text.startswith("DriverError") and "group '7' has no advantages" in text for text in others)


def test_log_probs_come_back_to_the_driver_alone(answers):
    assert answers[0]["logprobs"] == alone()["logprobs"]
    assert [len(one) for one in answers[0]["logprobs"]] == [len(r.tokens) for r in make_rollouts()]
    assert [answer["logprobs"] for answer in answers[1:]] == [None] * 3


def test_four_ranks_train_exactly_what_one_does(answers):
    wanted = alone()
    for answer in answers:
        assert answer["table"] == wanted["table"] and answer["metrics"] == wanted["metrics"]
