"""Every benchmark reads rows in its data set's form, locally and through `datasets`. Messages name what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import plugins
from megatron_rl.config.evaluation import sets_of
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, PromptSet, TrainConfig
from megatron_rl.data.benchmarks import benchmark, benchmarks, read_benchmark, source_of
from megatron_rl.data.problems import read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.spec.missing_files import absent_files
from megatron_rl.spec.resolve import resolve
from megatron_rl.texts.text import read_template

PUBLISHED = Path(__file__).parents[3] / "examples/published"
CODE = {"code": "def f(x):\n    return x", "input": "1", "output": "1", "id": "s0"}
STEPS = {
    "id": "gsm8k-0",
    "generator": "x",
    "problem": "P",
    "steps": ["a", "b"],
    "final_answer_correct": False,
    "label": 1,
}
ROWS = {  # a row in each set's form, the end of its question, and its answer
    "math500": ({"problem": "P", "solution": "s", "answer": "\\frac{1}{2}", "unique_id": "x"}, "P", "\\frac{1}{2}"),
    "aime24": ({"ID": "2024-I-1", "Problem": "P", "Solution": "s", "Answer": 204}, "P", "204"),
    "aime25": ({"id": "0", "problem": "P", "answer": "070"}, "P", "070"),
    "aime26": ({"problem_idx": 1, "problem": "P", "answer": 7}, "P", "7"),
    "amc23": ({"id": 0, "question": "P", "answer": 27.0}, "P", "27"),
    "amc24": ({"problem": "P", "answer": "11"}, "P", "11"),
    "amc25": ({"problem": "P", "answer": 12}, "P", "12"),
    "math_beyond": ({"problem": "P", "answer": "\\frac{3}{4}"}, "P", "\\frac{3}{4}"),
    "minerva_math": ({"problem": "P", "solution": "so \\boxed{4.5e-33} \\mathrm{~g}"}, "P", "4.5 \\times 10^{-33}"),
    "olympiadbench": ({"question": "P", "context": None, "final_answer": ["$69$,$84$"]}, "P", "69,84"),
    "gsm8k": ({"question": "P", "answer": "1+1\n#### 1,234"}, "P", "1234"),
    "svamp": ({"Body": "Tom has 3.", "Question": "P", "Answer": "145.0"}, "Tom has 3. P", "145"),
    "boardgameqa": (
        {"example": "P", "label": "disproved", "theory": "t"},
        "Answer with one of these three words.",
        "disproved",
    ),
    "cruxeval": (CODE, "What does f(1) return? Answer with a Python literal.", "1"),
    "cruxeval_input": (CODE, "without the function's name.", "1"),
    "strategyqa": (
        {"question": "P?", "answer": True, "facts": ["F."]},
        'Facts:\nF.\n\nQuestion: P? Answer with "yes" or "no".',
        "yes",
    ),
    "strategyqa_train": (
        {"question": "P?", "answer": True, "facts": ["F.", "G."], "evidence": []},
        'Facts:\nF.\nG.\n\nQuestion: P? Answer with "true" or "false".',
        "true",
    ),
    "tablebench": (
        {"qtype": "FactChecking", "table": '{"columns": ["a", "b"], "data": [[1, 2]]}', "question": "P", "answer": "2"},
        "Table:\na | b\n1 | 2\n\nQuestion: P\nGive the answer alone, as short as possible.",
        "2",
    ),
} | {f"processbench_{name}": (STEPS, "P", "1") for name in ("gsm8k", "math", "olympiadbench", "omnimath")}


IFEVAL = {"key": 1, "prompt": "P", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def test_every_benchmark_has_a_row_here():
    assert {*ROWS, "ifeval"} == set(benchmarks())


def test_ifeval_has_the_instructions_and_their_grader(tmp_path):
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(IFEVAL) + "\n" + json.dumps(IFEVAL) + "\n")
    found = benchmark("ifeval")
    problems = read_benchmark(found, source_of(found, str(tmp_path)))
    assert [p.values["instruction_id_list"] for p in problems] == [["punctuation:no_comma"]] * 2
    assert problems[0].values["question"] == "P" and problems[0].values["kwargs"] == [{}]
    assert plugins.find(found.grader)("yes", problems[0].values)["reward"] == 1.0


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_a_question_and_an_answer(name, tmp_path):
    row, question, answer = ROWS[name]
    found = benchmark(name)
    (tmp_path / f"{found.folder or name}.jsonl").write_text(json.dumps(row) + "\n")
    [problem] = read_benchmark(found, source_of(found, str(tmp_path)))
    assert problem.values["question"].endswith(question) and problem.values["answer"] == answer
    assert "{question}" in read_template(found.template)
    if not found.judged:
        plugins.find(found.grader)
        right = f"<answer>\\boxed{{{answer}}}</answer>"
        assert plugins.find(found.grader)(right, problem.values) == 1.0


def test_a_benchmark_is_read_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"test": datasets.Dataset.from_list([ROWS["gsm8k"][0]])}).save_to_disk(tmp_path / "gsm8k")
    found = benchmark("gsm8k")
    [problem] = read_benchmark(found, source_of(found, str(tmp_path)))
    assert problem.values["answer"] == "1234"


def test_one_file_of_a_data_set_is_read(tmp_path):
    """The hub's StrategyQA has further files whose names begin with train, with other columns."""
    pytest.importorskip("datasets")
    row = ROWS["strategyqa_train"][0]
    (tmp_path / "strategyqa_train").mkdir()
    (tmp_path / "strategyqa_train" / "strategyqa_train.json").write_text(json.dumps([row, row | {"answer": False}]))
    (tmp_path / "strategyqa_train" / "strategyqa_train_paragraphs.json").write_text(json.dumps([{"title": "T"}]))
    found = benchmark("strategyqa_train")
    problems = read_benchmark(found, source_of(found, str(tmp_path)))
    assert [problem.values["answer"] for problem in problems] == ["true", "false"]


def test_all_problems_are_asked_without_the_word_mathematical():
    generators = [found for found in benchmarks().values() if not found.judged and found.name != "ifeval"]
    assert {found.template for found in generators} == {"tango_general"}
    assert read_template("tango_general") == read_template("tango_generator").replace("mathematical ", "")


def test_without_a_folder_a_benchmark_is_on_the_hub():
    assert source_of(benchmark("gsm8k"), None) == PromptSet(path="openai/gsm8k", subset="main", split="test")
    assert source_of(benchmark("processbench_math"), None).split == "math"
    assert source_of(benchmark("strategyqa"), None) == PromptSet(path="ChilleD/StrategyQA", split="test")
    assert source_of(benchmark("strategyqa_train"), None) == PromptSet(
        path="voidful/StrategyQA", split="train", file="strategyqa_train.json"
    )


def test_a_fetched_benchmark_has_the_splits_of_the_hub(tmp_path):
    (tmp_path / "Maxwell-Jia/AIME_2024").mkdir(parents=True)
    (tmp_path / "Maxwell-Jia/AIME_2024/test.jsonl").touch()
    assert source_of(benchmark("aime24"), str(tmp_path)).split == "train"


def test_a_benchmark_that_is_not_there_yet_has_a_place(tmp_path):
    """A config may name a directory that an earlier job fills, or that is on another host."""
    assert source_of(benchmark("gsm8k"), str(tmp_path)).path == str(tmp_path / "gsm8k.jsonl")
    tree = {"recipe": {"target": "grpo", "args": {"updates": 1}}, "roles": {"generator": {"model": {"path": "m/n"}}}}
    sets = {"evaluation": {"sets": ["gsm8k"], "data_dir": str(tmp_path)}, "data": {"path": "d/e"}}
    config = load(TrainConfig, trees=[("t", tree | sets)])
    spec = resolve(config, 1)
    assert [own.name for own in spec.data.held_out] == ["gsm8k"]
    [absent] = [own for own in absent_files(spec) if not own.on_hub]
    assert absent.problem is not None and "gsm8k.jsonl is not there: put it there" in absent.problem


def test_what_is_missing_is_said():
    with pytest.raises(ConfigError, match="'gsm9k' is unknown; known are math500"):
        benchmark("gsm9k")


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("gsm8k", {"answer": "no mark"}, "there is no answer"),
        ("math500", {"problem": ""}, "no text under question or problem"),
        ("boardgameqa", {"label": "maybe"}, "not one of proved"),
        ("tablebench", {"table": "{"}, "the table is not JSON"),
        ("tablebench", {"qtype": "Visualization"}, "none of the 1 rows"),
        ("processbench_math", {"label": 2}, "label is 2: give the first wrong step, 0 to 1"),
        ("processbench_math", {"steps": []}, "steps is"),
        ("processbench_math", {"step_labels": [True]}, "1 step_labels for 2 steps"),
    ],
)
def test_bad_rows_are_named(name, change, why, tmp_path):
    found = benchmark(name)
    (tmp_path / f"{found.folder or name}.jsonl").write_text(json.dumps(ROWS[name][0] | change) + "\n")
    with pytest.raises(DataError, match=why):
        read_benchmark(found, source_of(found, str(tmp_path)))


def test_gold_step_labels_give_the_first_error(tmp_path):
    row = {name: value for name, value in STEPS.items() if name != "label"} | {"step_labels": [True, False]}
    (tmp_path / "processbench.jsonl").write_text(json.dumps(row) + "\n")
    found = benchmark("processbench_gsm8k")
    [problem] = read_benchmark(found, source_of(found, str(tmp_path)))
    assert problem.values["label"] == 1 and problem.values["correct"] is False


@pytest.mark.skipif(
    "MEGATRON_RL_DATA" not in os.environ,
    reason="set MEGATRON_RL_DATA to a folder with gsm8k/, amc23/, ... to read real sets",
)
def test_real_sets_have_their_sizes():
    base = Path(os.environ["MEGATRON_RL_DATA"])
    sizes = {"aime24": 30, "amc23": 40, "gsm8k": 1319, "minerva_math": 272, "olympiadbench": 675, "svamp": 1000}
    there = {name: size for name, size in sizes.items() if (base / name).exists()}
    assert {
        name: len(read_benchmark(benchmark(name), source_of(benchmark(name), str(base)))) for name in there
    } == there


def test_faults_the_evaluation_sets_of_the_tandem_example_can_be_written(tmp_path):
    """The published config named two files that nothing made."""
    for name in ("amc23", "amc24", "amc25", "aime24", "aime25", "aime26"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"problem": f"{name}?", "answer": "7"}) + "\n")
    script = PUBLISHED / "tandem_evaluation_sets.py"
    subprocess.run([sys.executable, script, "--data-dir", tmp_path, "--out", tmp_path / "data/eval"], check=True)
    config = load(TrainConfig, [PUBLISHED / "tandem_evaluated_qwen3_4b.yaml"])
    sets = [
        replace(source, path=str(tmp_path / source.path)) for source in sets_of(config.evaluation.sets) if source.path
    ]
    questions = {source.name: [p.values["question"] for p in read_problems(source)] for source in sets}
    assert questions == {"amc": ["amc23?", "amc24?", "amc25?"], "aime": ["aime24?", "aime25?", "aime26?"]}
