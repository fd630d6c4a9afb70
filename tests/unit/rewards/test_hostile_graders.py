"""What a model writes ends no run: costly answers are refused from their text, and a grading that is cut off does not
speak against a reward that grades the problems' own answers well."""

from __future__ import annotations

import time

import pytest

from megatron_rl.config.schema import Reward
from megatron_rl.rewards.grading_pool import GradePool, RewardFailure, check_failures
from megatron_rl.rewards.math_answer import grade
from megatron_rl.rewards.math_cost_limit import too_costly
from megatron_rl.types import Outcome

COSTLY = [
    "100!!", "10^{10000000}", "a" * 10_000, "ab" * 50, "a_{1}" * 150, "9^{9^{9}}", "7^{7^{7^7}}", "2^{2^{2^{2^{2}}}}",
    "((10!)!)", r"\left(1000!\right)!", r"\binom{1000000000}{500000000}", r"\dbinom {99999} 3", "10000000!",
    "1e100000000", "9" * 5000, "{" * 500 + "1" + "}" * 500, "(" * 300 + "1" + ")" * 300,
    r"\sqrt{" * 99 + "2" + "}" * 99,
    "|1|" * 40, r"\{" * 20 + "1" + r"\}" * 20, r"\prod_{i=1}^{9999} (i+x)", r"\binom{x}{9999}", r"\Gamma(99999999)",
    r"\begin{vmatrix}" + " & ".join(f"x_{i}" for i in range(49)) + r"\end{vmatrix}", r"\sum_{i=1}^{9999} i!",
    "+".join(["x"] * 3000), "(x+1)^{9999}", "(x+y+z)**{500}", r"(\sqrt{2}+\sqrt{3})^{1000}", "10**-99999999",
]  # fmt: skip
FAIR = [
    "5", r"\frac{1}{2}", "2^{2024}", "2024!", "10^{-6}", r"\sqrt{2+\sqrt{3}}", r"(x+1)^2", r"\binom{2024}{1012}",
    "x^{2^{n}}", r"e^{x^{2}}", "2^{2^{3}}", r"\{1,2,3\}", "(-1)^{2023}", r"\left(\frac{1}{2}\right)^{2024}",
    "1,234,567",
    r"\text{the set of all positive even whole numbers that are not divisible by three or by five}", "3.14159265358979",
    ",".join(map(str, range(100))), r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "(a+b)(c+d)", "n!", "3^{x^{y}}",
]  # fmt: skip


@pytest.mark.parametrize("answer", COSTLY)
def test_hostile_answer_is_refused_from_its_text(answer):
    """Each of these took sympy minutes or all memory."""
    assert too_costly(answer)
    start = time.process_time()
    assert grade(f"So the answer is \\boxed{{{answer}}}.", {"answer": "5"}) == 0.0
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("answer", FAIR)
def test_hostile_limits_leave_fair_answers_alone(answer):
    assert not too_costly(answer)


def test_hostile_thought_does_not_cost_the_answer():
    """A response may speak of huge numbers and still end with a correct answer, which is graded by its last box."""
    thought = r"Since $10^{10000000}$ and 100!! are large, $9^{9^{9}}$ is no answer. "
    assert grade(thought + r"\boxed{\frac{1}{2}}", {"answer": "0.5"}) == 1.0
    assert grade(thought + r"\boxed{3}", {"answer": "0.5"}) == 0.0
    assert grade(thought, {"answer": "0.5"}) == 0.0


@pytest.mark.parametrize("known", ["10^{10000000}", "100!!"])
def test_hostile_known_answer_is_compared_as_text(known):
    assert grade(rf"\boxed{{{known}}}", {"answer": known.replace("{", "{ ")}) == 1.0
    assert grade(r"\boxed{5}", {"answer": known}) == 0.0


def pool_of(**settings) -> GradePool:
    reward = {"target": "bad_rewards:reward", "timeout_s": 0.5, "memory_mib": 1024, "answer_format": "{answer}"}
    return GradePool(Reward(**(reward | settings)))


@pytest.mark.parametrize("text", ["loop", "memory", "exit", "signal"])
def test_hostile_text_that_cuts_its_grading_off_costs_itself_alone_and_is_counted(text):
    payloads = [{"answer": "yes"}] * 3
    with pool_of() as pool:
        graded = pool.grade([text, "yes", "no"], payloads)
        assert [(one.outcome, one.score) for one in graded] == [(Outcome.SCORE, s) for s in (0.0, 1.0, 0.0)]
        assert graded[0].by_response and graded[0].detail
        check_failures(graded, 0.05)
        with pytest.raises(RewardFailure, match="1 of 3 gradings failed .0 time-outs, 0 errors, 1 cut off"):
            check_failures(graded, 0.0)
    with pool_of(cut_off="drop") as pool:
        graded = pool.grade([text, "yes", "no"], payloads)
        assert graded[0].outcome is not Outcome.SCORE and graded[0].by_response


@pytest.mark.parametrize("payload", [{"answer": "loop"}, {"answer": "raise"}, {}])
def test_hostile_text_speaks_against_a_reward_that_cannot_grade_the_known_answer(payload):
    with pool_of() as pool:
        (late,) = pool.grade(["loop"], [payload])
    assert late.outcome is Outcome.TIMEOUT and not late.by_response
    with pytest.raises(RewardFailure):
        check_failures([late], 0.05)


def test_hostile_exception_of_a_reward_stays_its_failure():
    with pool_of() as pool:
        (raised,) = pool.grade(["raise"], [{"answer": "yes"}])
    assert raised.outcome is Outcome.ERROR and not raised.by_response


def test_hostile_moment_in_which_no_worker_starts_is_waited_for(tmp_path, monkeypatch):
    """A worker that was killed could not be started again at once, for want of memory or a file: the run ended."""
    monkeypatch.setattr("megatron_rl.rewards.grading_pool.START_PAUSE_S", 0.0)
    (tmp_path / "moody_rewards.py").write_text(
        "import os, sys, time\n"
        f"count = len(os.listdir({str(tmp_path)!r}))\n"
        f"open({str(tmp_path)!r} + f'/start{{count}}', 'w').close()\n"
        "if 4 <= count <= 5:\n    sys.exit(3) if count == 4 else missing\n"
        "def grade(response, payload):\n    return time.sleep(600) if response == 'loop' else 1.0\n"
    )
    (tmp_path / "one").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with GradePool(Reward(target="moody_rewards:grade", workers=1, timeout_s=0.5)) as pool:
        assert [one.outcome for one in pool.grade(["a", "loop", "b"], [{}] * 3)] == [
            Outcome.SCORE, Outcome.TIMEOUT, Outcome.SCORE,
        ]  # fmt: skip
        for name in ("two", "three"):
            (tmp_path / name).touch()
    with (
        GradePool(Reward(target="nothing_here:grade", workers=1)) as pool,
        pytest.raises(RewardFailure, match="cannot be"),
    ):
        pool.grade(["a"], [{}])


def test_hostile_want_of_processes_is_waited_for(monkeypatch):
    tried = []

    def refuse(*args, **settings):
        tried.append(args)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("megatron_rl.rewards.grading_pool.START_PAUSE_S", 0.0)
    monkeypatch.setattr("megatron_rl.rewards.grading_pool.subprocess.Popen", refuse)
    with pool_of() as pool, pytest.raises(RewardFailure, match="no reward worker can be started here"):
        pool.grade(["yes"], [{"answer": "yes"}])
    assert len(tried) == 4


def test_hostile_kill_of_the_first_worker_while_it_starts_is_no_word_about_the_reward(tmp_path, monkeypatch):
    """Somebody killed it, or the kernel for want of memory, and the run ended with "importing ends the process"."""
    (tmp_path / "killed_rewards.py").write_text(
        "import os, signal\n"
        f"if not os.path.exists({str(tmp_path / 'once')!r}):\n"
        f"    open({str(tmp_path / 'once')!r}, 'w').close()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def grade(response, payload):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with GradePool(Reward(target="killed_rewards:grade", workers=1, timeout_s=5.0)) as pool:
        assert [one.outcome for one in pool.grade(["a"], [{}])] == [Outcome.SCORE]


@pytest.mark.parametrize(("kills", "outcome"), [(1, Outcome.SCORE), (3, Outcome.SCORE), (4, Outcome.ERROR)])
def test_hostile_kill_of_a_worker_at_work_costs_no_sample(tmp_path, monkeypatch, kills, outcome):
    """What it graded is graded once more. A second kill, by the kernel for want of memory say, fails the grading, and a
    failed grading is repeated once."""
    (tmp_path / "struck_rewards.py").write_text(
        "import os, pathlib, signal\n"
        f"marks = pathlib.Path({str(tmp_path)!r})\n"
        "def grade(response, payload):\n"
        f"    made = len(list(marks.glob('kill_*')))\n"
        f"    if response == 'b' and made < {kills}:\n"
        "        (marks / f'kill_{made}').touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with GradePool(Reward(target="struck_rewards:grade", workers=1, timeout_s=5.0)) as pool:
        found = [one.outcome for one in pool.grade(["a", "b", "c"], [{}] * 3)]
    assert found == [Outcome.SCORE, outcome, Outcome.SCORE] and len(list(tmp_path.glob("kill_*"))) == kills
