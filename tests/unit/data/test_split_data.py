"""`megatron-rl data split`: no prompt is in both files, nothing is lost, and what cannot be divided is refused."""

import json
import re

import pyarrow.parquet as pq
import pytest

from megatron_rl.config.schema import SftData
from megatron_rl.data.sft import read_samples
from megatron_rl.main import main


def write(tmp_path, rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["data", "split", f"{tmp_path}/rows.jsonl", "--out", f"{tmp_path}/out"]


def test_a_prompt_is_in_one_file_and_no_row_is_lost(tmp_path):
    rows = [{"prompt": f"p{i % 40}", "response": f"r{i}"} for i in range(100)]
    words = [*write(tmp_path, rows), "--share", "0.1"]
    assert main(words) == 0
    train, held_out = (pq.read_table(tmp_path / f"out/{name}.parquet").to_pylist() for name in ("train", "validation"))
    assert sorted(row["response"] for row in [*train, *held_out]) == sorted(row["response"] for row in rows)
    prompts, kept = {row["prompt"] for row in held_out}, {row["prompt"] for row in train}
    assert len(prompts) == 4 and not prompts & kept
    assert [row for row in rows if row["prompt"] in kept] == train, "in their order"
    assert len(read_samples(SftData(train=f"{tmp_path}/out/train.parquet"))) == len(train)
    assert main([*words[:4], f"{tmp_path}/other", *words[5:], "--seed", "1"]) == 0
    assert {row["prompt"] for row in pq.read_table(tmp_path / "other/validation.parquet").to_pylist()} != prompts


@pytest.mark.parametrize(
    ("role", "text", "asks", "answers"), [("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")]
)
def test_answers_to_one_question_stay_in_one_file(tmp_path, role, text, asks, answers):
    talks = [
        [{role: asks, text: f"q{i // 4}"}, {role: answers, text: f"a{i}"}, {role: asks, text: f"and {i}?"}]
        for i in range(40)
    ]
    assert main([*write(tmp_path, [{"messages": one} for one in talks]), "--share", "0.2"]) == 0
    train, held_out = (
        {row["messages"][0][text] for row in pq.read_table(tmp_path / f"out/{name}.parquet").to_pylist()}
        for name in ("train", "validation")
    )
    assert len(train) == 8 and len(held_out) == 2 and not train & held_out


def test_data_in_the_directory_is_never_replaced_nor_mixed_with_the_parts(tmp_path, capsys):
    words = write(tmp_path, [{"prompt": f"p{i}"} for i in range(4)])
    assert main([*words[:3], "--out", str(tmp_path)]) != 0
    assert "has rows.jsonl: name a directory without data" in capsys.readouterr().err
    assert main(words) == 0 and main(words) != 0
    assert "has train.parquet, validation.parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "1 of 1 rows"),
        ("", "(there is no row)"),
        ('{"prompt": 1}\n{"prompt": "a"}\n', "Could not convert|Expected"),
    ],
)
def test_files_that_are_no_rows_are_refused(tmp_path, capsys, text, says):
    (tmp_path / "rows.jsonl").write_text(text)
    assert main(["data", "split", f"{tmp_path}/rows.jsonl", "--out", f"{tmp_path}/out"]) != 0
    found = capsys.readouterr().err
    assert re.search(says if "|" in says else re.escape(says), found), found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [
        ([{"text": "a"}], [], "has the keys text, and none is known to hold a prompt: name the key with --by"),
        ([{"prompt": "a"}, {"prompt": "a"}], [], "all 2 rows have the same prompt"),
        ([{"prompt": "a"}, {"other": "b"}], [], "it has no prompt"),
        ([{"prompt": "a"}], ["--share", "1.5"], "above 0 and below 1"),
    ],
)
def test_rows_that_cannot_be_divided_are_refused(tmp_path, capsys, rows, words, says):
    try:
        status = main([*write(tmp_path, rows), *words])
    except SystemExit as error:
        status = error.code
    assert status != 0 and says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
