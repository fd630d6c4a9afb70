"""What rank 0 decides reaches every rank, its errors too, and nothing ever waits for a rank that has left."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from one_process import OneProcess
from ranks import run_ranks

from megatron_rl.messages.world import World

WORKER = Path(__file__).parents[1] / "helpers" / "world_worker.py"


@pytest.fixture(scope="module", params=[2, 3])
def answers(request, tmp_path_factory):
    """[ranks][cases] of world_worker.cases."""
    return run_ranks(WORKER, request.param, tmp_path_factory.mktemp(f"world{request.param}"))


def test_the_drivers_result_is_every_ranks(answers):
    assert [a[0] for a in answers] == [["value", [0, 3]]] * len(answers)
    assert [a[10] for a in answers] == [7] * len(answers)


def test_an_error_on_the_driver_is_raised_on_every_rank_with_its_traceback(answers):
    kind, text = answers[0][1]
    assert (kind, text) == ("ValueError", "the reward broke")
    for kind, text in (a[1] for a in answers[1:]):
        assert kind == "DriverError" and "in broken" in text and "the reward broke" in text


def test_every_rank_works_when_the_driver_calls_all(answers):
    expected = [[[r, (r + k) * 10] for r in range(len(answers))] for k in (1, 5)]
    assert [a[2] for a in answers] == [["value", expected]] * len(answers)
    assert [a[12] for a in answers] == [["value", [[r, r * 10] for r in range(len(answers))]]] * len(answers)
    assert [a[11][:2] for a in answers] == [[r + 1, r + 5] for r in range(len(answers))]


def test_threads_of_the_driver_put_the_ranks_to_work_one_after_the_other(answers):
    expected = [[[r, k * 10] for r in range(len(answers))] for k in range(20)]
    assert [a[13] for a in answers] == [["value", expected]] * len(answers)


def test_a_followers_error_names_its_rank_on_every_rank(answers):
    last = len(answers) - 1
    for kind, text in (a[3] for a in answers):
        assert kind in ("FollowerError", "DriverError")
        assert "negative: -1" in text and f"rank {last} failed in 'ask'" in text
    assert all("negative: -1" in a[4][1] for a in answers)


def test_what_cannot_travel_is_an_error_and_not_a_hang(answers):
    assert all("does not travel" in a[5][1] and "does not travel" in a[8][1] for a in answers)


def test_a_wrong_call_is_refused_and_the_world_goes_on(answers):
    assert all("no handler 'nobody'" in a[6][1] for a in answers)
    assert all(f"1 arguments for {len(answers)} ranks" in a[7][1] for a in answers)
    assert [a[9] for a in answers] == [["value", "still alive"]] * len(answers)


def test_from_driver_inside_a_handler_is_an_error_that_says_what_to_use(answers):
    """A checkpoint that asked the driver in the world that carried the command hung for two hours."""
    assert all(
        "inside a running handler" in text and "use work.from_driver" in text for _, text in (a[14] for a in answers)
    )
    world = OneProcess()
    world.serve("wrong", lambda _: world.from_driver(lambda: "never"))
    world.serve("calls", lambda _: world.call_all("wrong", [0]))
    with pytest.raises(RuntimeError, match=r"use work\.from_driver"):
        world.from_driver(lambda: world.call_all("wrong", [0]))
    with pytest.raises(RuntimeError, match=r"call_all of 'wrong' inside a running handler: use work\.from_driver"):
        world.from_driver(lambda: world.call_all("calls", [0]))


def test_a_handler_asks_the_driver_and_calls_all_ranks_through_work(answers):
    asked = [[r, 70] for r in range(len(answers))]
    assert [a[15] for a in answers] == [["value", [[asked, 1]] * len(answers)]] * len(answers)
    assert [a[16] for a in answers] == [["value", [asked, 1]]] * len(answers), "the result of rank 0 alone"
    assert [a[18] for a in answers] == [[[r, 50] for r in range(len(answers))]] * len(answers), "outside a handler too"


def test_work_on_the_driver_alone_is_an_error_and_not_a_hang(answers):
    """The driver sent its result to ranks that waited for a command in the other world."""
    assert all("work.from_driver outside a handler" in a[19][1] for a in answers)
    world = OneProcess()
    with pytest.raises(RuntimeError, match="use call_all"):
        world.from_driver(lambda: world.work.from_driver(lambda: "never"))
    assert world.work.from_driver(lambda: "all ranks call it") == "all ranks call it"


def test_the_driver_hands_its_handler_what_does_not_travel(answers):
    assert [a[17] for a in answers] == [["value", True]] * len(answers)


def test_every_rank_raises_its_own_error_of_a_collective_handler(answers):
    (kind, text), *others = [a[20] for a in answers]
    assert (kind, text) == ("ValueError", "on rank 0")
    assert all(kind == "DriverError" and "on rank 0" in text for kind, text in others)


def test_one_process_behaves_alike():
    world = OneProcess()
    world.serve("double", lambda x: 2 * x)
    assert world.from_driver(lambda: world.call_all("double", [4])) == [8] and world.broadcast("x") == "x"
    with pytest.raises(ZeroDivisionError):
        world.from_driver(lambda: 1 / 0)


@pytest.fixture
def alone():
    """A world of one rank that torch.distributed knows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World()
    dist.destroy_process_group()


def test_threads_of_a_single_rank_put_it_to_work_one_after_the_other(alone):
    """The embedded engines of two roles wrote at the same time, and would have captured CUDA graphs so."""
    inside, together = threading.Semaphore(1), threading.Event()

    def work(number):
        if not inside.acquire(blocking=False):
            together.set()
            return number
        together.wait(0.2)  # the other thread has come by then
        inside.release()
        return number

    alone.serve("work", work)
    with ThreadPoolExecutor(2) as pool:
        found = alone.from_driver(lambda: list(pool.map(lambda number: alone.call_all("work", [number]), range(2))))
    assert found == [[0], [1]] and not together.is_set()
