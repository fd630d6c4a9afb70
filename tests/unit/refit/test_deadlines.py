"""How long a rank waits for a message of a refit."""

from __future__ import annotations

import itertools
import time

import pytest

from megatron_rl.refit.transport import RECHECK_S, Deadline


def never(asked: list[float]):
    """Returns a condition that is never true, which notes for how long it may block, and sleeps for so long, at most a
    second."""

    def done(seconds: float) -> bool:
        asked.append(seconds)
        time.sleep(min(1.0, seconds))
        return False

    return done


def test_a_wait_looks_twice_a_second_whether_the_refit_has_ended_without_it():
    asked = list[float]()
    deadline = Deadline.start(600.0, 600.0, is_over=lambda: True)
    assert deadline.until(never(asked)) == "the refit ended without it" and asked == [RECHECK_S]


@pytest.mark.parametrize(("total_s", "message_s"), [(600.0, 0.2), (0.2, 600.0)])
def test_a_wait_ends_with_its_message_or_with_the_refit_whichever_is_first(total_s, message_s):
    asked, start = list[float](), time.monotonic()
    said = Deadline.start(total_s, message_s).until(never(asked))
    assert said is not None and said.startswith("no answer within 0.")
    assert sum(asked) < 0.25 and time.monotonic() - start >= 0.2


def test_a_wait_for_one_that_waits_itself_goes_on_until_the_refit_ends():
    asked, beats = list[float](), itertools.count()
    start = time.monotonic()
    deadline = Deadline(start + 0.5, 0.1, pulse=lambda: next(beats))
    assert deadline.until(never(asked)) == "no answer within 0.1 s" and time.monotonic() - start >= 0.5


def test_a_wait_for_what_is_there_takes_no_time():
    assert Deadline.start(0.0, 0.0).until(lambda seconds: True) is None
    assert Deadline.start(-1.0, 5.0).wait_s() == 0.01, "what waits looks at least once"
