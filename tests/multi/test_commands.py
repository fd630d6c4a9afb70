"""What the driver posts runs on the ranks that it names, in order; errors reach it, and nothing waits for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from one_process import OneProcess
from ranks import run_ranks

from megatron_rl.messages.commands import Commands, ranges
from megatron_rl.messages.world import World

WORKER = Path(__file__).parents[1] / "helpers" / "commands_worker.py"
pytestmark = pytest.mark.multi


@pytest.fixture(scope="module", params=[2, 3])
def rules(request, tmp_path_factory):
    """What each rank saw in commands_worker.rules."""
    return run_ranks(WORKER, request.param, tmp_path_factory.mktemp(f"rules{request.param}"), "rules")


def of(rules, case):
    return [rank[case] for rank in rules]


def test_the_drivers_result_is_every_ranks(rules):
    assert of(rules, "value") == [["value", [0, 3]]] * len(rules)


def test_an_error_of_the_driver_is_raised_on_every_rank_and_it_can_drive_again(rules):
    (kind, text), *others = of(rules, "error")
    assert (kind, text) == ("ValueError", "the reward broke")
    for kind, text in others:
        assert kind == "DriverError" and text.startswith("the driver failed:")
        assert "in broken" in text and "the reward broke" in text
    assert of(rules, "still alive") == [["value", "still alive"]] * len(rules)


def test_every_rank_works_when_the_driver_calls_each(rules):
    expected = [[[r, (r + k) * 10] for r in range(len(rules))] for k in (1, 5)]
    assert of(rules, "each") == [["value", expected]] * len(rules)
    assert [asked[:2] for asked in of(rules, "asked")] == [[r + 1, r + 5] for r in range(len(rules))]
    last = len(rules) - 1
    assert of(rules, "some") == [["value", [[last - 1, 70], [last, 80]]]] * len(rules)


def test_threads_of_the_driver_put_the_ranks_to_work_one_after_the_other(rules):
    expected = [[[r, k * 10] for r in range(len(rules))] for k in range(20)]
    assert of(rules, "threads") == [["value", expected]] * len(rules)


def test_a_followers_error_names_its_rank_on_every_rank(rules):
    last = len(rules) - 1
    for kind, text in of(rules, "fails on the last"):
        assert kind in ("FollowerError", "DriverError")
        assert "negative: -1" in text and f"rank {last} failed in 'ask'" in text
    assert rules[0]["fails on all"] == ["ValueError", "negative: -1"], "the first rank's error is raised as it is"


def test_what_cannot_travel_is_an_error_and_not_a_hang(rules):
    for case in ("result", "argument", "driver's result"):
        assert all("does not travel" in text for _, text in of(rules, f"{case} does not travel"))


def test_a_wrong_call_is_refused_and_the_ranks_go_on(rules):
    assert all("no handler 'nobody' is served; known: ask, drives" in text for _, text in of(rules, "nobody"))
    assert all(f"1 arguments for {len(rules)} ranks: give one per rank" in text for _, text in of(rules, "too few"))


def test_only_the_driver_posts_commands_and_starts_no_other_driver(rules):
    """A checkpoint that asked the driver inside a handler hung for two hours."""
    for case, message in (
        ("posts inside a handler", "'ask' inside a running handler: only the driver posts commands"),
        ("drive inside a handler", "drive inside drive: the ranks have one driver"),
        ("drive inside drive", "drive inside drive: the ranks have one driver"),
        ("posts outside of drive", "'ask' outside of drive, where the ranks do not listen"),
    ):
        assert all(message in text for _, text in of(rules, case)), case


def test_ranks_talk_to_one_another_in_a_collective_handler(rules):
    assert of(rules, "together") == [["value", 7]] * len(rules), "the result of the first rank"


def test_the_driver_hands_its_own_rank_what_does_not_travel(rules):
    assert of(rules, "bulk") == [["value", True]] * len(rules)


def test_many_commands_to_nested_and_disjoint_sets_run_in_order(tmp_path):
    ranks = run_ranks(WORKER, 4, tmp_path, "sets")
    assert all(rank["right"] and rank["in order"] and rank["count"] > 50 for rank in ranks)


def test_a_set_whose_rank_naps_delays_no_other_set_and_is_named(tmp_path):
    first, *others = run_ranks(WORKER, 4, tmp_path, "naps")
    assert first["answers"] == [[[0, k * 10], [1, k * 10]] for k in range(3)]
    assert first["longest"] == "nap on ranks 2-3 has no answer of 3" and first["seconds"] >= 0
    assert first["results"] == [2, [1, 10]] and first["nothing runs"] and others == [first] * 3
    assert first["times"] == {
        "iterations": [0, 1, 2, 5, 5], "names": ["ask"] * 3 + ["nap", "ask"], "behind the nap": True, "each": True,
        "waited": True,
    }, "a command begins when its ranks are free, and not when it is posted"  # fmt: skip


def test_a_rank_that_dies_ends_its_command_at_once_and_another_set_still_answers(tmp_path):
    (kind, seen), other, (waiting, _), last = run_ranks(WORKER, 4, tmp_path, "death")
    assert kind == "value" and other == ["value", seen] and last == "ended" and waiting == "RuntimeError"
    name, text = seen["error"]
    assert name == "FollowerError" and "(verifier)" in text and "in 'die'" in text and "rank " in text
    assert seen["seconds"] < 20.0 and seen["answers"] == [[0, 40], [1, 40]]
    assert seen["again"][0] == "FollowerError" and seen["again"][1].startswith("rank 3 has ended: ")


def test_a_rank_that_stands_still_is_named_while_the_driver_waits_to_send_to_it(tmp_path):
    """The driver waits in a message and holds the lock that the watch takes, too."""
    first, _ = run_ranks(WORKER, 2, tmp_path, "frozen")
    assert first == {"answers": [[1, 10 * k] for k in range(4)], "seen": ["ask is not received by rank 1"]}


def test_the_first_ranks_error_is_preferred_to_those_that_repeat_it(tmp_path):
    (kind, text), leader, *followers = run_ranks(WORKER, 4, tmp_path, "leader")
    assert kind == "FollowerError" and text.startswith("rank 1 (verifier) failed in 'fails':")
    assert text.rstrip().endswith("ValueError: the reward broke")
    assert leader == ["ValueError", "the reward broke"] and [own[0] for own in followers] == ["DriverError"] * 2


def test_one_process_behaves_alike():
    commands = Commands(OneProcess())
    commands.serve("double", lambda x: 2 * x)
    commands.serve("posts", lambda x: commands.each("double", [x]))
    commands.serve("drives", lambda _: commands.drive(lambda: "never"))
    assert commands.drive(lambda: commands.each("double", [4])) == [8]
    assert commands.drive(lambda: commands.together("double", 4, None).result()) == 8
    with pytest.raises(ZeroDivisionError):
        commands.drive(lambda: 1 / 0)
    for function in (lambda: commands.each("posts", [1]), lambda: commands.together("posts", 1, 1).result()):
        with pytest.raises(RuntimeError, match="'double' inside a running handler: only the driver posts commands"):
            commands.drive(function)
    for function in (lambda: commands.each("drives", [1]), lambda: commands.drive(lambda: "never")):
        with pytest.raises(RuntimeError, match="drive inside drive"):
            commands.drive(function)
    with pytest.raises(RuntimeError, match="'double' outside of drive"):
        commands.each("double", [1])
    assert commands.drive(lambda: "again") == "again"


def test_a_thread_that_outlives_the_driver_gets_an_error_and_does_not_wait_for_ever():
    commands, begun, released, errors = Commands(OneProcess()), threading.Event(), threading.Event(), []

    def slow(_):
        begun.set()
        assert released.wait(30)

    def post():
        for _ in range(2):  # while the command runs, and then after the end of the driver
            try:
                commands.each("slow", [None])
            except RuntimeError as error:
                errors.append(str(error))
        released.set()

    commands.serve("slow", slow)
    thread = threading.Thread(target=post)

    def driver():
        thread.start()
        assert begun.wait(30)

    commands.drive(driver)
    thread.join(30)
    assert errors == ["'slow': the driver has ended", "'slow' outside of drive, where the ranks do not listen"]


@pytest.fixture
def alone():
    """Commands of one rank that torch.distributed knows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Commands(World())
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

    def drive():
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda number: alone.each("work", [number]), range(2)))

    assert alone.drive(drive) == [[0], [1]] and not together.is_set()


def test_ranks_are_named_as_ranges():
    assert [ranges(ranks) for ranks in ([], [3], [0, 1], range(4), [0, 1, 2, 6, 8, 9])] == [
        "", "3", "0-1", "0-3", "0-2, 6, 8-9",
    ]  # fmt: skip
