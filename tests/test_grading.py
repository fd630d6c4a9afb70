"""Grading in worker processes: order, time-outs, memory, death, and math-verify's verdicts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.config import Reward
from megatron_rl.rewards.last_letter import grade as grade_letters
from megatron_rl.rewards.last_letter import step_labels
from megatron_rl.rewards.math_answer import grade as grade_math
from megatron_rl.rewards.pool import Graded, GradePool, Outcome, RewardFailure, check_failures

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    with GradePool(Reward(target="bad_rewards:reward", timeout_s=0.7, memory_mib=1024)) as started:
        yield started


def outcomes(pool, responses):
    return [g.outcome for g in pool.grade(responses, [{"answer": "yes"}] * len(responses))]


def test_scores_come_back_in_order(pool):
    responses = ["yes" if i % 3 else "no" for i in range(200)]
    graded = pool.grade(responses, [{"answer": "yes"}] * 200)
    assert [g.score for g in graded] == [float(r == "yes") for r in responses]
    assert all(g.outcome is Outcome.SCORE for g in graded)


def test_a_bad_item_costs_only_itself(pool):
    bad = ["loop", "memory", "exit", "raise", "text", "two"]
    responses = [r for b in bad for r in ("yes", b, "no", "print")]
    got = outcomes(pool, responses)
    want = {"loop": Outcome.TIMEOUT} | dict.fromkeys(bad[1:], Outcome.ERROR)
    assert got == [want.get(r, Outcome.SCORE) for r in responses]


def test_the_detail_says_what_went_wrong(pool):
    raised, text, exited = pool.grade(["raise", "text", "exit"], [{"answer": ""}] * 3)
    assert "no such thing" in raised.detail and "number in [0, 1]" in text.detail and "status 3" in exited.detail


def test_an_unknown_function_is_refused_with_its_name():
    with GradePool(Reward(target="megatron_rl.rewards.math_answer:grad")) as pool, pytest.raises(RewardFailure, match="math_answer:grad"):
        pool.grade(["1"], [{"answer": "1"}])


def test_nothing_to_grade_is_nothing():
    with GradePool(Reward()) as pool:
        assert pool.grade([], []) == []


def test_workers_end_with_the_pool(pool):
    outcomes(pool, ["yes"] * 40)
    processes = [w.process for w in pool._workers]
    pool.close()
    assert all(p.poll() is not None for p in processes)


def test_workers_end_when_the_run_is_killed(tmp_path):
    code = (
        "import os, sys\nfrom megatron_rl.config import Reward\nfrom megatron_rl.rewards.pool import GradePool\n"
        "pool = GradePool(Reward(target='bad_rewards:reward'))\npool.grade(['yes'], [{'answer': 'yes'}])\n"
        "print(pool._workers[0].process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    pid = int(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT).stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}/status").exists():
        if "Z (zombie)" in Path(f"/proc/{pid}/status").read_text():
            break
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_too_many_failures_stop_the_run():
    good, late = Graded(Outcome.SCORE, 1.0), Graded(Outcome.TIMEOUT, detail="no answer within 5 s")
    check_failures([good] * 95 + [late] * 5, 0.05)
    with pytest.raises(RewardFailure, match=r"6 of 100 gradings failed \(6 time-outs, 0 errors\).*no answer within 5 s"):
        check_failures([good] * 94 + [late] * 6, 0.05)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"<answer>\boxed{18}</answer>", "18", 1.0),
        (r"first \boxed{3}, no: \boxed{4}", "4", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\dfrac{14}{3}}", r"\frac{14}{3}", 1.0),
        (r"\boxed{50\%}", r"50\%", 1.0),
        (r"\boxed{0.5}", r"50\%", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{10\%}", "10", 1.0),
        (r"\boxed{28\%}", "0.28", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{(1, 2)}", r"(1, 2)", 1.0),
        (r"\boxed{[0, 1)}", r"[0,1)", 1.0),
        (r"\boxed{x^2 + 1}", "1 + x^2", 1.0),
        (r"\boxed{19}", "18", 0.0),
        (r"\boxed{51\%}", "0.5", 0.0),
        (r"\boxed{(0, 1)}", r"[0,1]", 0.0),
        ("no answer at all", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_math_answers(response, answer, score):
    assert grade_math(response, {"answer": answer}) == score


def test_the_grammar_runtime_is_the_one_math_verify_is_right_with():
    """omegaconf would bring antlr 4.9.3, with which percent answers are graded wrong."""
    assert importlib.metadata.version("antlr4-python3-runtime").startswith("4.13.")
    wanted = " ".join(importlib.metadata.requires("megatron-rl") or []) if _installed() else (ROOT / "setup.py").read_text()
    core = re.split("extra ==|extras_require", wanted)[0]
    assert "omegaconf" not in core and "hydra" not in core


def _installed() -> bool:
    return bool(list(importlib.metadata.distributions(name="megatron-rl")))


def test_grading_does_not_load_torch():
    code = "import sys, megatron_rl.rewards.math_answer, megatron_rl.rewards.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_last_letters():
    payload = {"answer": "b d", "words": ["ab", "cd"]}
    assert grade_letters(r"<answer> \boxed{ b d } </answer>", payload) == 1.0
    assert grade_letters(r"\boxed{bd}", payload) == 1.0
    assert grade_letters(r"\boxed{ b c }", payload) == 0.0 and grade_letters("b d", payload) == 0.0
    assert step_labels(["#1 b", "#2 c", "#3 d"], payload) == [True, False, False]
    assert step_labels(["b", "", "#2 d d"], payload) == [False, False, False]
