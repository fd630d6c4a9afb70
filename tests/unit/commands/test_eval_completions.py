"""`megatron-rl eval --completions`: order, bad and hostile rows, resume after a kill, and speed."""

from __future__ import annotations

import json
import time

import pytest

from megatron_rl.config.schema import ConfigError, Reward
from megatron_rl.evaluation.completions import grade_file
from megatron_rl.main import main
from megatron_rl.rewards.grading_pool import Graded, GradePool, Outcome


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def same(completions, payloads):
    """A grader that compares texts."""
    return [Graded(Outcome.SCORE, float(c == p["answer"])) for c, p in zip(completions, payloads, strict=True)]


def row(i, answer="1", completion="1"):
    return {"id": i, "answer": answer, "completion": completion}


def test_every_row_has_a_grade_in_its_place(tmp_path):
    rows = write(tmp_path / "c.jsonl", [row(f"r{i}", "1", str(i % 2)) for i in range(600)])
    summary = grade_file(rows, tmp_path / "out", same)
    graded = [json.loads(line) for line in (tmp_path / "out/graded.jsonl").read_text().splitlines()]
    row_of = lambda i: {"id": f"r{i}", "score": float(i % 2), "correct": i % 2 == 1, "outcome": "score"}  # noqa: E731
    assert graded == [row_of(i) for i in range(600)]
    assert (
        summary
        == {"rows": 600, "accuracy": 0.5, "reward": 0.5, "outcomes": {"score": 600}}
        == json.loads((tmp_path / "out/summary.json").read_text())
    )


def test_rows_of_which_none_can_be_graded_are_refused(tmp_path):
    """Rows of another format had accuracy 0, and exit status 0."""
    rows = write(tmp_path / "c.jsonl", [{"row": 1, "response": "2"}] * 3)
    with pytest.raises(ConfigError, match=r"c\.jsonl: no row can be graded\. .*graded\.jsonl says why; delete"):
        grade_file(rows, tmp_path / "out", same)


BAD = [
    ("{not json\n", "not JSON"),
    ('["a"]\n', "not a JSON object"),
    ('{"id": 1, "answer": "2"}\n', "without completion"),
    (row(1, None), "its answer is 'None'"),
    (row(1, "  "), "its answer"),
    (row(1, ["2"]), "its answer"),
    (row(1, "2", 7), "its completion is '7'"),
    (b"\xff\xfe{}\n".decode("latin1"), "not JSON"),
    ("[" * 100_000 + "\n", "not JSON"),
]


@pytest.mark.parametrize(("bad", "why"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_an_outcome_of_its_own(tmp_path, bad, why):
    rows = write(tmp_path / "c.jsonl", [row(0), bad, "\n", row(2, 1)])
    assert grade_file(rows, tmp_path / "out", same)["outcomes"] == {"score": 2, "bad_row": 1}
    graded = [json.loads(line) for line in (tmp_path / "out/graded.jsonl").read_text().splitlines()]
    assert (
        [g["score"] for g in graded] == [1.0, 0.0, 1.0]
        and why in graded[1]["detail"]
        and "c.jsonl:2" in graded[1]["detail"]
    )


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    rows = write(tmp_path / "c.jsonl", [row(i) for i in range(700)])
    grade_file(rows, tmp_path / "whole", same)
    whole = (tmp_path / "whole/graded.jsonl").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/graded.jsonl").write_bytes(whole[: len(whole) // 2 + 5])  # in the middle of a line
    asked = []

    def counting(completions, payloads):
        asked.extend(completions)
        return same(completions, payloads)

    summary = grade_file(rows, tmp_path / "cut", counting)
    assert (tmp_path / "cut/graded.jsonl").read_bytes() == whole and summary["rows"] == 700 and 340 < len(asked) < 360
    asked.clear()
    assert grade_file(rows, tmp_path / "cut", counting)["reward"] == 1.0 and not asked


def test_grades_of_other_rows_are_not_gone_on_with(tmp_path):
    grade_file(write(tmp_path / "a.jsonl", [row("a"), row("b")]), tmp_path / "out", same)
    with pytest.raises(ConfigError, match="is the grade of 'a'.*has 'c'.*another directory"):
        grade_file(write(tmp_path / "b.jsonl", [row("c")]), tmp_path / "out", same)
    with pytest.raises(ConfigError, match="no such row"):
        grade_file(write(tmp_path / "c.jsonl", [row("a")]), tmp_path / "out", same)


def test_no_rows_and_no_file_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="it has no rows"):
        grade_file(write(tmp_path / "a.jsonl", ["\n"]), tmp_path / "out", same)
    with pytest.raises(ConfigError, match="no such file"):
        grade_file(tmp_path / "b.jsonl", tmp_path / "out", same)


HOSTILE = [
    "\\boxed{9^{9^{9^{9^9}}}}",
    "\\boxed{" + "(" * 4000 + ")" * 4000 + "}",
    "\\boxed{" + "\\frac{1}{" * 800 + "2" + "}" * 800 + "}",
    "\\boxed{(((10^{10})!)!)!}",
    "\\boxed{\\int_0^1 " * 200,
    "\ud800\x00\\boxed{",
    "\\boxed{" * 20_000,
    "$" * 50_000,
    "\\boxed{__import__('os').system('touch pwned')}",
]


@pytest.mark.slow
def test_hostile_rows_cost_only_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [row(i, "5", text) for i, text in enumerate(HOSTILE)] + [
        row(100 + i, "5", "so \\boxed{5}") for i in range(40)
    ]
    rows = write(tmp_path / "c.jsonl", rows)
    with GradePool(Reward(workers=1, timeout_s=2.0)) as pool:
        grade_file(rows, tmp_path / "out", pool.grade)
    graded = [json.loads(line) for line in (tmp_path / "out/graded.jsonl").read_text().splitlines()]
    assert all(g["score"] == 0.0 for g in graded[: len(HOSTILE)])
    assert all(g["score"] == 1.0 and g["outcome"] == "score" for g in graded[len(HOSTILE) :])
    assert not (tmp_path / "pwned").exists()


def test_the_program_grades_a_file_with_a_benchmarks_grader(tmp_path, capsys):
    rows = write(tmp_path / "c.jsonl", [{**row(1, "yes", "\\boxed{Yes}"), "choices": ["yes", "no"]}])
    words = ["eval", "--completions", str(rows), "--out", str(tmp_path / "out")]
    assert main([*words, "benchmark=strategyqa"]) == 0
    assert "reward       1.0000" in capsys.readouterr().out
    assert main(["eval", "--completions", str(rows)]) == 2 and "give --out DIR" in capsys.readouterr().err
    assert main(["eval"]) == 2 and "give a config" in capsys.readouterr().err


@pytest.mark.slow
def test_two_thousand_rows_take_less_than_a_minute_of_one_core(tmp_path):
    text = "We add $3$ and $4$: $3+4=7$, then double it. <answer>\\boxed{{{}}}</answer>"
    rows = write(tmp_path / "c.jsonl", [row(i, str(i), text.format(i + i % 2)) for i in range(2000)])
    with GradePool(Reward(workers=1)) as pool:
        pool.grade(["\\boxed{1}"], [{"answer": "1"}])
        start = time.monotonic()
        summary = grade_file(rows, tmp_path / "out", pool.grade)
    assert summary["reward"] == 0.5 and time.monotonic() - start < 60
