"""`make test-more` runs every target that `make test` leaves out, and says which have failed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tool():
    return runpy.run_path(str(ROOT / "tools/run_targets.py"))


def test_a_failed_target_does_not_stop_the_others_and_is_named(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good, bad = "echo '==== 3 passed, 1 skipped in 1.20s ===='", "echo broken && false && touch never"
    targets = {"good": good, "bad": bad, "last": "touch last", "other": "touch never"}
    assert tool["main"](["good", "bad", "last"], targets) == 1
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert rows == [
        ["good", "passed", "0.0", "3 passed, 1 skipped"],
        ["bad", "failed", "0.0"],
        ["last", "passed", "0.0"],
    ]
    assert (tmp_path / "last").exists() and not (tmp_path / "never").exists()
    assert "broken" in (tmp_path / "runs/test_more/bad.log").read_text()


def test_a_name_that_is_no_target_is_refused(tool):
    with pytest.raises(SystemExit, match="no target layout: give one of docs, "):
        tool["main"](["layout"], tool["TARGETS"])


def test_targets_name_files_and_make_targets_that_are_there(tool):
    made = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = " && ".join(tool["TARGETS"].values())
    for words in re.findall(r"\bmake ([^&]+)", commands):
        assert {word for word in words.split() if "=" not in word and not word.startswith(".venv")} <= made, words
    for path in re.findall(r"\b(?:tests|examples)/\S+", commands):
        assert (ROOT / path).is_file(), path


def test_no_miniature_and_no_test_of_the_matrix_is_left_out(tool):
    commands = " ".join(tool["TARGETS"].values())
    scripts = {path.relative_to(ROOT) for path in (ROOT / "examples/miniatures").glob("*/run.py")}
    assert {str(path) for path in scripts if path.parent.name != "last_letter"} <= set(commands.split())  # the demo
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.matrix" in p.read_text()]
    left = [path.name for path in marked if str(path.relative_to(ROOT)) not in commands]
    assert left == [Path(__file__).name]  # its text has the words too


def test_make_test_runs_every_folder_of_tests_and_test_numbers_names_files_that_are_there():
    """tests/contrib was in no target, and five names of test-numbers were those of files that had been renamed."""
    makefile = (ROOT / "Makefile").read_text()
    [folders] = re.findall(r"--output-sync=line (tests/.*)", makefile)
    assert set(folders.split()) == {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("tests/*/test_*.py")}
    [numbers] = re.findall(r"^NUMBERS = (.*?)\n\n", makefile, re.MULTILINE | re.DOTALL)
    for folder, names in re.findall(r"patsubst %,(tests/\w+/test_%.py),([^)]*)", numbers.replace("\\\n", "")):
        missing = [name for name in names.split() if not list(ROOT.glob(folder.replace("%", name)))]
        assert not missing, f"{folder}: {missing}"
