"""Code of users that raises, exits or kills its process: the run ends soon, and says where it happened."""

from __future__ import annotations

import json
import re
import sys

import pytest

from megatron_rl.config.schema import Reward
from megatron_rl.environments.validation import failed
from megatron_rl.lib.user_code import place_of, told
from megatron_rl.rewards import grading_pool
from megatron_rl.rewards.grading_pool import GradePool, RewardFailure, check_failures
from megatron_rl.types import Outcome

MODULE = """
import json, os, signal, sys, time

def exits(response, payload):
    sys.exit(f"no judge for {response}")

def ends(response, payload):
    os._exit(3)

def killed(response, payload):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(response, payload):
    time.sleep(60)

def together(completions, **columns):
    os._exit(3)

def broken(response, payload):
    return deeper(response)

def deeper(text):
    return json.loads(text)

async def waits(response, payload):
    return deeper(response)
"""


@pytest.fixture
def starts(monkeypatch):
    """Returns a list that has an entry for each process that a pool has started."""
    found, start = [], grading_pool._open_process
    monkeypatch.setattr(grading_pool, "_open_process", lambda end: found.append(end) or start(end))
    return found


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    (tmp_path / "leaving_rewards.py").write_text("import sys\n\nsys.exit('no key')\n")
    return tmp_path


def problems(count):
    return [{"question": "q", "answer": str(number)} for number in range(count)]


@pytest.mark.parametrize("name", ["ends", "killed", "hangs", "together"])
def test_a_reward_that_ends_or_hangs_its_workers_stops_the_run_soon(name, here, starts):
    """Each of the gradings of an iteration, thousands, cost a worker or a time-out before the run was stopped."""
    with GradePool(Reward(target=f"odd_rewards:{name}", workers=2, timeout_s=0.2)) as pool:
        with pytest.raises(RewardFailure, match=r"8 of 8 gradings, which were tried before the others, failed"):
            pool.grade(["1"] * 300, problems(300))
        assert len(starts) < 60


def test_a_share_of_1_lets_all_gradings_fail(here):
    with GradePool(Reward(target="odd_rewards:ends", workers=2, max_failure_share=1.0)) as pool:
        assert len(pool.grade(["1"] * 9, [{}] * 9)) == 9


def test_sys_exit_fails_its_grading_alone(here, starts):
    """It ended the worker, which was often killed meanwhile: then the grading was tried again, and said status -9."""
    with GradePool(Reward(target="odd_rewards:exits", workers=1)) as pool:
        graded = pool.grade(["a", "b"], problems(2))
        assert len(starts) == 1
    assert [one.outcome for one in graded] == [Outcome.ERROR] * 2 and not graded[0].cut_off
    place = f"{here}/odd_rewards.py:5 in exits"
    assert [one.detail for one in graded] == [f"SystemExit: no judge for {text} ({place})" for text in "ab"]
    with (
        GradePool(Reward(target="leaving_rewards:grade", workers=1)) as pool,
        pytest.raises(RewardFailure, match=r"SystemExit: no key \(.*leaving_rewards.py:3 in <module>\)") as raised,
    ):
        pool.grade(["a"], problems(1))
    assert "sys.exit('no key')" in raised.value.__notes__[0]


@pytest.mark.parametrize("name", ["broken", "waits"])
def test_an_error_names_the_line_of_the_users_code_and_keeps_its_traceback(name, here):
    with GradePool(Reward(target=f"odd_rewards:{name}", workers=1)) as pool:
        [graded] = pool.grade(["{"], problems(1))
    assert graded.detail.startswith("JSONDecodeError: Expecting property name")
    assert graded.detail.endswith(f"({here}/odd_rewards.py:23 in deeper)"), "not a line of the json library"
    with pytest.raises(RewardFailure, match="odd_rewards.py:23 in deeper") as raised:
        check_failures([graded], 0.0)
    [trace] = raised.value.__notes__
    assert f"line 2{'0' if name == 'broken' else '6'}, in {name}" in trace and "json/decoder.py" in trace


def test_the_place_of_an_error(here):
    def own():
        json.loads("{")

    def raised(function, *given):
        with pytest.raises(ValueError) as caught:
            function(*given)
        return caught.value

    line = own.__code__.co_firstlineno + 1
    assert place_of(raised(own)) == f"{__file__}:{line} in own"
    assert re.search(r"\(.*test_user_code.py:\d+ in own\)$", failed(raised(own)).why)
    assert told(ValueError("x")) == "ValueError: x"
