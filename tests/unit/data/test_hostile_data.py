"""Rows of data that are no problems: each is named as a bad row, and a file that cannot be read is said to be one."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.rows import BadRow, DataError, rows_of, text_at

VALUES = [True, False, None, [], {}, 10**400, -(10**5000), float("inf"), float("nan"), "", " ", "\ud800"]
LINES = [b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"9" * 5000, b"{", b'"x"', b"nul", b"\0" * 9]
FILES = [b"", b"PAR1", b"PAR1" + b"\xff" * 400 + b"PAR1", b"PAR1" + b"\0" * 400 + b"\x10\0\0\0PAR1"]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_hostile_answers_are_no_answers(value):
    """`"answer": true` was the answer "True", and a number of 400 digits an OverflowError."""
    with pytest.raises(DataError):
        text_at({"answer": value}, "answer", "answer", numbers=True)


def test_hostile_numbers_that_are_answers():
    found = [text_at({"a": value}, "answer", "a", numbers=True) for value in (0, 7, -2.5, 10**20)]
    assert found == ["0", "7", "-2.5", "1" + "0" * 20]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_hostile_lines_are_bad_rows(tmp_path, line):
    good = json.dumps({"question": "q", "answer": "a"}).encode()
    (tmp_path / "rows.jsonl").write_bytes(good + b"\n" + line + b"\n" + good)
    kinds = [type(row) for _, row in rows_of(str(tmp_path / "rows.jsonl"), "train", None)]
    assert kinds == [dict, BadRow, dict]


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_hostile_parquet_is_refused(tmp_path, content):
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        [*rows_of(str(tmp_path / "rows.parquet"), "train", None)]


def test_hostile_file_that_cannot_be_opened_is_refused(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def refuse(*args, **settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(DataError, match=r"rows.jsonl cannot be read: Permission denied"):
        [*rows_of(str(tmp_path / "rows.jsonl"), "train", None)]
