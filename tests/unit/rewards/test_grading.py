"""Grading in worker processes: order, time-outs, memory, death, and math-verify's verdicts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from limits import PROCESS_S

from megatron_rl.config.schema import Reward
from megatron_rl.contrib.last_letter import grade as grade_letters
from megatron_rl.contrib.last_letter import step_labels
from megatron_rl.rewards import grading_pool
from megatron_rl.rewards.grading_pool import Graded, GradePool, Outcome, RewardFailure, check_failures
from megatron_rl.rewards.math_answer import grade as grade_math
from megatron_rl.rewards.math_answer import grade_released

ROOT = Path(__file__).parents[3]


def pool_of(name: str, **settings) -> GradePool:
    """tests/ is on sys.path here, and therefore in the workers."""
    return GradePool(Reward(target=f"bad_rewards:{name}", **{"timeout_s": 0.7, "memory_mib": 1024} | settings))


@pytest.fixture(scope="module")
def pool():
    with pool_of("reward") as started:
        yield started


def outcomes(pool, responses):
    return [g.outcome for g in pool.grade(responses, [{"answer": "yes"}] * len(responses))]


def gone(pid: int) -> bool:
    """Waits for the process to end. Returns whether it has."""
    status, deadline = Path(f"/proc/{pid}/status"), time.monotonic() + PROCESS_S
    while time.monotonic() < deadline:
        try:
            if "Z (zombie)" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
    return False


def test_scores_come_back_in_order(pool):
    responses = ["yes" if i % 3 else "no" for i in range(200)]
    graded = pool.grade(responses, [{"answer": "yes"}] * 200)
    assert [g.score for g in graded] == [float(r == "yes") for r in responses]
    assert all(g.outcome is Outcome.SCORE for g in graded)


BAD = ["loop", "memory", "exit", "leave", "signal", "deaf", "forged", "raise", "text", "two", "nan", "none"]


def test_a_bad_item_costs_only_itself(pool):
    responses = [r for b in BAD for r in ("yes", b, "no", "print", "fraction", "input")]
    want = {"loop": Outcome.TIMEOUT} | dict.fromkeys(BAD[1:], Outcome.ERROR)
    graded = pool.grade(responses, [{"answer": "yes"}] * len(responses))
    assert [g.outcome for g in graded] == [want.get(r, Outcome.SCORE) for r in responses]
    right = {"yes": 1.0, "print": 1.0, "input": 1.0, "fraction": 0.25}
    assert [g.score for g in graded] == [right.get(r, 0.0) for r in responses]


def test_items_answered_before_a_worker_died_are_not_blamed_for_it():
    """It used to depend on what was seen first, a worker's answers or its death, which item was the error."""
    with pool_of("reward", workers=1) as pool:
        for _ in range(8):
            assert outcomes(pool, ["yes", "no", "exit", "yes"]) == [
                Outcome.SCORE,
                Outcome.SCORE,
                Outcome.ERROR,
                Outcome.SCORE,
            ]


def test_the_detail_says_what_went_wrong(pool):
    graded = pool.grade(["raise", "text", "exit", "loop", "memory", "forged"], [{"answer": ""}] * 6)
    for result, words in zip(
        graded,
        [
            "no such thing",
            "number in reward.range = [0, 1]",
            "status 3",
            "reward.timeout_s = 0.7",
            "reward.memory_mib = 1024",
            "something else than answers",
        ],
        strict=True,
    ):
        assert words in result.detail
    assert graded[3].seconds >= 0.7


def test_a_second_answer_is_not_taken_for_the_next_items():
    """A forked child that returns from the function answers too.

    LazyModule items, also of the next call, used to get its scores.
    """
    right = {"twice": 0.25, "yes": 1.0, "no": 0.0}
    with pool_of("reward", workers=1) as pool:
        for responses in (["twice", "yes", "no"] * 4, *([r] for r in ["twice", "no", "yes"] * 4)):
            for response, result in zip(
                responses, pool.grade(responses, [{"answer": "yes"}] * len(responses)), strict=True
            ):
                assert result.outcome is Outcome.ERROR or result.score == right[response]


def test_items_larger_than_a_pipe_do_not_hang_the_run():
    """The pool used to block in writing to a worker that was stuck in the item before."""
    with pool_of("reward", workers=1) as pool:
        graded = pool.grade(["loop"] + ["x" * 200_000] * 15, [{"answer": "yes"}] * 16)
    assert [g.outcome for g in graded] == [Outcome.TIMEOUT] + [Outcome.SCORE] * 15


def test_memory_a_reward_never_gives_back_does_not_fail_the_items_after_it():
    with pool_of("reward", workers=1, timeout_s=10.0, memory_mib=320) as pool:
        assert outcomes(pool, ["leak", "leak", "yes", "leak", "yes"]) == [
            Outcome.SCORE, Outcome.ERROR, Outcome.SCORE, Outcome.SCORE, Outcome.SCORE,
        ]  # fmt: skip


def test_what_a_stuck_reward_started_is_killed_with_it(tmp_path):
    with pool_of("reward") as pool:
        (result,) = pool.grade(["child"], [{"pid_file": str(tmp_path / "pid")}])
    assert result.outcome is Outcome.TIMEOUT and gone(int((tmp_path / "pid").read_text()))


def test_an_interrupted_call_leaves_nothing_for_the_next_one():
    with pool_of("reward", workers=1) as pool:
        pool.grade(["yes"], [{"answer": "yes"}])
        old = signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                pool.grade(["loop", "loop", "no", "no"], [{"answer": "yes"}] * 4)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert [g.score for g in pool.grade(["yes"], [{"answer": "yes"}])] == [1.0]


def _interrupt(signum, stack):
    raise KeyboardInterrupt


def test_a_worker_killed_between_calls_is_replaced(pool):
    outcomes(pool, ["yes"] * 4)
    victim = pool._workers[0].process
    victim.kill()
    victim.wait()
    assert outcomes(pool, ["yes"] * 40) == [Outcome.SCORE] * 40


def test_a_reward_that_sends_bytes_without_end_is_late(pool):
    """Every byte used to begin the time limit anew."""
    assert outcomes(pool, ["endless", "yes"]) == [Outcome.TIMEOUT, Outcome.SCORE]


def test_the_last_items_do_not_wait_for_a_slow_one(tmp_path):
    """Chunks of one size let a worker hold the last item behind a slow one, while the other worker was idle.

    Every fourth item is tried before the others, so that the slow item is not one of those.
    """
    responses = ["waits" if i == 17 else "writes" if i == 31 else "1" for i in range(32)]
    payload = {"answer": "1", "file": str(tmp_path / "file")}
    with pool_of("reward", workers=2, timeout_s=20.0) as pool:
        graded = pool.grade(responses, [payload] * 32)
    assert [g.score for g in graded] == [1.0] * 32


def test_a_worker_is_replaced_by_one_process(monkeypatch):
    """After a time-out of the last item, the next call used to start a second process, and the first one was lost. A
    late item is graded twice."""
    started, open_process = [], grading_pool._open_process
    monkeypatch.setattr(grading_pool, "_open_process", lambda end: started.append(open_process(end)) or started[-1])
    with pool_of("reward", workers=1) as pool:
        for _ in range(3):
            outcomes(pool, ["yes", "loop"])
        outcomes(pool, ["yes"])
    assert len(started) == 1 + 3 * 2 and all(process.returncode is not None for process in started)


def test_a_pool_closes_silently_at_the_end_of_the_program(tmp_path):
    """The recipe SelfPlay leaves the pool of its `rule` open, and the interpreter starts no threads at its end."""
    code = (
        "from megatron_rl.contrib.proposals import AnswerRule\n"
        "rule = AnswerRule('bad_rewards:reward', 2)\n"
        "print(rule.correct({0: 'yes'}, {0: {'answer': 'yes'}}, 0.0))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{0: True}\n", "")


def test_thousands_of_small_gradings_take_a_second(pool):
    outcomes(pool, ["yes"] * 40)
    start = time.monotonic()
    outcomes(pool, ["yes"] * 4000)
    assert time.monotonic() - start < 10.0


def test_arguments_reach_the_function():
    with pool_of("scaled", args={"scale": 0.5}) as pool:
        assert [g.score for g in pool.grade(["yes", "no"], [{"answer": "yes"}] * 2)] == [0.5, 0.0]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("megatron_rl.rewards.math_answer:grad", "AttributeError"),
        ("no_such_module:grade", "ModuleNotFoundError"),
        ("bad_rewards", "not a function"),
        (":grade", "ValueError"),
        ("bad_rewards:NUMBER", "not a function"),
    ],
)
def test_an_unusable_function_is_refused_with_its_name(target, reason):
    with GradePool(Reward(target=target)) as pool, pytest.raises(RewardFailure, match=f"{target}.*{reason}"):
        pool.grade(["1"], [{"answer": "1"}])


def test_nothing_to_grade_starts_nothing():
    with GradePool(Reward()) as pool:
        assert pool.grade([], []) == [] and pool._workers == []


def test_workers_end_with_the_pool():
    with pool_of("reward") as pool:
        outcomes(pool, ["yes"] * 40)
        processes = [w.process for w in pool._workers]
    assert len(processes) == 2 and all(p.returncode is not None for p in processes)


def test_workers_outlive_the_thread_that_graded_first():
    """They died with it, and the first item of the next call that each one held was graded as an error."""
    found: list[Graded] = []
    with pool_of("reward") as pool:

        def grade() -> None:
            found.extend(pool.grade(["yes"] * 8, [{"answer": "yes"}] * 8))

        for _ in range(3):
            thread = threading.Thread(target=grade)
            thread.start()
            thread.join()
            time.sleep(0.2)  # the end of a thread reaches its children a moment later
            assert all(w.process.poll() is None for w in pool._workers)
    assert [g.outcome for g in found] == [Outcome.SCORE] * 24


def test_workers_end_when_the_run_is_killed(tmp_path):
    """The worker that is stuck in a reward, and never reads its pipe, ends too."""
    code = (
        "import os, sys, threading, time\nfrom megatron_rl.config.schema import Reward\nfrom "
        "megatron_rl.rewards.grading_pool import GradePool\n"
        "pool = GradePool(Reward(target='bad_rewards:reward', timeout_s=600.0))\npool.grade(['yes'] * 40, "
        "[{'answer': 'yes'}] * 40)\n"
        "print(*(w.process.pid for w in pool._workers), flush=True)\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), 9)).start()\npool.grade(['loop'], [{'answer': 'yes'}])\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -9 and len(pids) == 2 and all(gone(pid) for pid in pids)


def test_too_many_failures_stop_the_run():
    good, late = Graded(Outcome.SCORE, 1.0), Graded(Outcome.TIMEOUT, detail="no answer within 5 s")
    check_failures([], 0.0)
    check_failures([good] * 95 + [late] * 5, 0.05)
    with pytest.raises(
        RewardFailure, match=r"6 of 100 gradings failed \(6 time-outs, 0 errors\).*no answer within 5 s"
    ):
        check_failures([good] * 94 + [late] * 6, 0.05)
    check_failures([good] * 15 + [late], 0.05)  # a single failure says little about the rest
    for all_failed, share in (([late], 0.05), ([late] * 2, 0.05), ([good] * 15 + [late], 0.0)):
        with pytest.raises(RewardFailure):
            check_failures(all_failed, share)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"<answer>\boxed{18}</answer>", "18", 1.0),
        (
            r"first \boxed{3}, which is too small by one as the count began at zero, "
            r"so that the answer must be \boxed{4}",
            "4",
            1.0,
        ),
        (r"\boxed{3} and \boxed{4}", r"\{3, 4\}", 1.0),  # boxes close to each other are one answer to math-verify
        (r"\boxed{3}, no: \boxed{4}", "4", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\dfrac{14}{3}}", r"\frac{14}{3}", 1.0),
        (r"\boxed{50\%}", r"50\%", 1.0),
        (r"\boxed{0.5}", r"50\%", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{10\%}", "10", 1.0),
        (r"\boxed{28\%}", "0.28", 1.0),
        (r"$\boxed{28}$ pct", r"28\%", 1.0),
        (r"\boxed{28}", r"28\%", 1.0),
        (r"the share is 50%", r"50\%", 1.0),
        (r"\boxed{20 \%}", "20", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{14{,}916}", "14916", 1.0),
        (r"\boxed{1.5}", r"\frac{3}{2}", 1.0),
        (r"\boxed{-\frac12}", "-0.5", 1.0),
        (r"\boxed{1\frac{1}{2}}", "1.5", 1.0),
        (r"\boxed{3\sqrt{13}}", r"\sqrt{117}", 1.0),
        (r"\boxed{15\text{ cm}}", "15", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{5}", "5.0", 1.0),
        (r"\boxed{(-\infty, 2]}", r"(-\infty,2]", 1.0),
        (r"\boxed{[-2, 7]}", "[-2,7]", 1.0),
        (r"\boxed{\{1, 2, 3\}}", r"\{1,2\}", 0.0),
        (r"\boxed{(2, 1)}", "(1, 2)", 0.0),
        (r"\boxed{[-2, 7)}", "[-2,7]", 0.0),
        (r"\boxed{0.05}", r"50\%", 0.0),
        (r"\boxed{\frac{1}{3}}", "0.33", 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{(1, 2)}", r"(1, 2)", 1.0),
        (r"\boxed{[0, 1)}", r"[0,1)", 1.0),
        (r"\boxed{x^2 + 1}", "1 + x^2", 1.0),
        (r"\boxed{19}", "18", 0.0),
        (r"\boxed{51\%}", "0.5", 0.0),
        (r"\boxed{(0, 1)}", r"[0,1]", 0.0),
        (r"\boxed{1.3 \times 10^{-28}}", r"1.3 \times 10^{-27}", 0.0),  # both are 0 to 6 decimals
        (r"\boxed{0}", r"1.3 \times 10^{-27}", 0.0),
        (r"\boxed{1.3 \cdot 10^{-27}}", r"1.3 \times 10^{-27}", 1.0),
        (r"\boxed{0.00013}", r"1.3 \times 10^{-4}", 1.0),
        (r"\boxed{\frac{\infty!!}{|\pi|}}", "-123456.789", 0.0),  # sympy takes it for equal to any number
        (r"\boxed{-\infty}", r"-\infty", 1.0),
        (r"\boxed{[1, \infty)}", r"[1,\infty)", 1.0),
        (r"\boxed{m(\gamma^{2}-2) \theta}", r"m(\gamma^{2}-1) \theta", 0.0),  # both are read as infinite
        (r"\boxed{m(\gamma^{2}-1) \theta}", r"m(\gamma^{2}-1) \theta", 1.0),
        ("no answer at all", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_math_answers(response, answer, score):
    assert grade_math(response, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{100 dollars}", "100", 0.0),  # read as 100 a d o l^2 r s
        (r"\boxed{100 \text{ dollars}}", "100", 1.0),
        (r"\boxed{\$100}", "100", 1.0),
        (r"\boxed{100 cm}", "100", 1.0),
        (r"\boxed{100 apples}", "100", 1.0),
        (r"\boxed{-2 \le x \le 7}", r"x \in [-2,7]", 0.0),  # an inequality counts for no interval
        (r"\boxed{-2 \le x \le 7}", "[-2,7]", 0.0),
        (r"\boxed{x>2}", r"(2,\infty)", 0.0),
        (r"\boxed{x<1 \text{ or } x>2}", r"(-\infty,1)\cup(2,\infty)", 0.0),
        (r"\boxed{[-2,7]}", r"-2 \le x \le 7", 1.0),  # but an interval counts for an inequality
        (r"\boxed{x \in [-2,7]}", r"-2 \le x \le 7", 1.0),
        (r"\boxed{(2,\infty)}", "x>2", 1.0),
        (r"\boxed{(-2,7)}", r"-2 \le x \le 7", 0.0),
        (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"x<1 \text{ or } x>2", 0.0),
        (r"\boxed{[-2,7]}", r"x \in [-2,7]", 1.0),
        (r"\boxed{x \in [-2,7]}", "[-2,7]", 1.0),
        (r"\boxed{-2 < x < 7}", "[-2,7]", 0.0),
        (r"\boxed{\{1,2\}}", "1,2", 1.0),
        (r"\boxed{x=1 \text{ or } x=2}", "1,2", 1.0),
        (r"\boxed{1 \text{ and } 2}", "1,2", 1.0),
        (r"\boxed{\{1,2\}}", "(1,2)", 1.0),  # math-verify takes a pair and a set for each other
        (r"\boxed{16,3,1}", "16,3,1,1", 1.0),
    ],
)
def test_units_intervals_and_sets_are_graded_as_the_release_of_rl_tango_grades_them(response, answer, score):
    """What compute_score of kaiwenzha/RL-Tango 411ed83, verl/utils/reward_score/math_verify.py, gives with the
    math-verify that is installed here. Its math_metric leaves allow_set_relation_comp off."""
    assert grade_released(response, {"answer": answer}) == score


def test_a_known_answer_that_cannot_be_read_is_an_error_not_a_wrong_answer():
    with pytest.raises(ValueError, match="known answer '' cannot be read"):
        grade_math(r"\boxed{5}", {"answer": ""})


def test_answers_that_would_take_forever_are_wrong_at_once():
    with GradePool(Reward(timeout_s=60.0)) as pool:
        endless, right = pool.grade([r"\boxed{9^{9^{9^9}}}", r"\boxed{5}"], [{"answer": "5"}] * 2)
    assert endless.outcome is Outcome.SCORE and endless.score == 0.0 and right.score == 1.0
    assert endless.seconds < 30.0


def test_the_grammar_runtime_is_the_one_math_verify_is_right_with():
    """omegaconf would bring antlr 4.9.3, with which percent answers are graded wrong."""
    assert importlib.metadata.version("antlr4-python3-runtime").startswith("4.13.")
    core = core_requirements()
    assert "math-verify" in core
    seen, queue = set(), list(core)
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += requirements_of(name)
    assert not seen & {"omegaconf", "hydra-core", "nemo-run"}


def core_requirements() -> list[str]:
    """Returns the names of the packages that the project always needs, without their extras."""
    return [named(need) for need in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]


def requirements_of(name: str) -> list[str]:
    """Returns what an installed distribution needs without extras; nothing for one that is not installed."""
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [named(need) for need in needs if "extra ==" not in need]


def named(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0].lower().replace("_", "-")


def test_grading_does_not_load_torch():
    code = (
        "import sys, megatron_rl.rewards.math_answer, megatron_rl.rewards.grading_worker; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_last_letters():
    payload = {"answer": "b d", "words": ["ab", "cd"]}
    assert grade_letters(r"<answer> \boxed{ b d } </answer>", payload) == 1.0
    assert grade_letters(r"\boxed{bd}", payload) == 1.0
    assert grade_letters(r"\boxed{ b c }", payload) == 0.0 and grade_letters("b d", payload) == 0.0
    assert step_labels(["#1 b", "#2 c", "#3 d"], payload) == [True, False, False]
    assert step_labels(["b", "", "#2 d d"], payload) == [False, False, False]
    assert step_labels(["x b", "#13 d"], payload) == [False, True]
