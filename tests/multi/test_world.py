"""What the first of some ranks decides reaches all of them, its errors too, and no rank waits for ever."""

from pathlib import Path

import pytest
from one_process import OneProcess
from ranks import run_ranks

WORKER = Path(__file__).parents[1] / "helpers" / "world_worker.py"
pytestmark = pytest.mark.multi


@pytest.fixture(scope="module", params=[3, 4])
def ranks(request, tmp_path_factory):
    """What each rank saw."""
    return run_ranks(WORKER, request.param, tmp_path_factory.mktemp(f"world{request.param}"))


@pytest.fixture(params=["all", "set"])
def seen(request, ranks):
    """What each rank of a world saw: of all ranks, or of all but rank 0."""
    return [rank[request.param] for rank in ranks if rank[request.param] is not None]


def test_a_world_counts_its_own_ranks(seen):
    assert [own["place"] for own in seen] == [[rank, len(seen)] for rank in range(len(seen))]


def test_the_leaders_result_is_every_ranks(seen):
    assert [own["value"] for own in seen] == [["value", [0, 3]]] * len(seen)
    assert [own["nested"] for own in seen] == [["value", "inner"]] * len(seen)


def test_an_error_on_the_leader_is_raised_on_every_rank_with_its_traceback(seen, ranks):
    assert seen[0]["error"] == ["ValueError", "the reward broke"]
    leader = len(ranks) - len(seen)
    for kind, text in (own["error"] for own in seen[1:]):
        assert kind == "DriverError" and text.startswith(f"rank {leader} failed:")
        assert "in broken" in text and "the reward broke" in text


def test_what_does_not_travel_is_an_error_and_not_a_hang(seen):
    assert all("does not travel" in own["does not travel"][1] for own in seen)


def test_any_rank_can_be_the_source_of_a_value(seen):
    assert [own["broadcast"] for own in seen] == [7] * len(seen)
    assert [own["of the last"] for own in seen] == [[len(seen) - 1]] * len(seen)


def test_everywhere_is_true_only_where_it_is_true_on_every_rank(seen):
    assert [own["everywhere"] for own in seen] == [[True, False]] * len(seen)


def test_one_process_behaves_alike():
    world = OneProcess()
    assert world.from_leader(lambda: world.from_leader(lambda: 8)) == 8 and world.broadcast("x") == "x"
    with pytest.raises(ZeroDivisionError):
        world.from_leader(lambda: 1 / 0)
