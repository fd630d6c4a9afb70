"""`make mutants`: which changes are made and what kills one, and that those listed as equivalent are in the code."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import mutants
import yaml
from limits import PROCESS_S
from mutants_places import Finder

SOURCE = b'''
LIMIT = 3
class A:
    size: int = 2
    def f(self, x, *, low=0.5):
        """Text."""
        if x <= low and not self.size:
            raise ValueError("a message" + 1)
        elif x == LIMIT:
            self.seen = -x
        return max(y + 1 for y in x if y)
'''


def test_every_kind_of_change_is_found_with_its_place():
    found = [(m.inside, m.kind, m.old, m.new) for m in Finder("a.py", SOURCE).found]
    assert found == [
        ("", "constant", "3", "(4)"),
        ("A", "default", "2", "(3)"),
        ("A.f", "default", "0.5", "5.0"),
        ("A.f", "condition", "x <= low and not self.size", "False"),
        ("A.f", "boolean", "x <= low and not self.size", "(x <= low or not self.size)"),
        ("A.f", "boundary", "x <= low", "(x < low)"),
        ("A.f", "comparison", "x <= low", "(x > low)"),
        ("A.f", "sign or not", "not self.size", "(self.size)"),
        ("A.f", "removed statement", 'raise ValueError("a message" + 1)', "pass"),
        ("A.f", "condition", "x == LIMIT", "False"),
        ("A.f", "comparison", "x == LIMIT", "(x != LIMIT)"),
        ("A.f", "removed statement", "self.seen = -x", "pass"),
        ("A.f", "sign or not", "-x", "(x)"),
        ("A.f", "return value", "return max(y + 1 for y in x if y)", "return None"),
        ("A.f", "function", "max", "min"),
        ("A.f", "arithmetic", "y + 1", "(y - 1)"),
        ("A.f", "constant", "1", "(2)"),
        ("A.f", "dropped filter", "y", "True"),
    ]


def test_changes_and_notes_leave_python_and_what_is_listed_is_in_the_code(capsys):
    listed = yaml.safe_load(Path(mutants.__file__).with_name("mutants_equivalent.yaml").read_text()) or {}
    chosen = mutants.sample(0, 150, set(listed))
    assert len(chosen) == 150 and "Take out of" not in capsys.readouterr().out
    assert all(isinstance(reason, str) and reason for reason in listed.values())
    for mutant in chosen:
        text = (mutants.ROOT / mutant.file).read_bytes()
        ast.parse(text[: mutant.start] + mutant.new.encode() + text[mutant.end :])
        for at, note in mutant.probes:
            ast.parse(text[:at] + note.format(0).encode() + text[at:])


TESTS = """
import time, core
def test_by_chance(): assert not core.__file__
def test_on_a_slow_machine(): time.sleep(1)
def test_of_the_limit(): assert core.LIMIT == 3
"""
JUDGE = """
import pathlib, sys
sys.path[:0] = [{tools!r}]
import mutants
from mutants_places import Finder
home = pathlib.Path({home!r})
[change] = Finder("core.py", (home / "clean/core.py").read_bytes()).found
for names in sys.argv[1:]:
    mutants.LIMIT_S = 0.5 if "slow" in names else 60
    found = mutants.judge(change, [f"test_core.py::test_{{name}}" for name in names.split(",")], home)
    print(found.end, found.test)
"""


def test_a_change_is_killed_only_by_tests_that_hold_without_it(tmp_path):
    """A test that failed, or a time limit that came, because of the machine's load was taken for one that saw it."""
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean/core.py").write_text("LIMIT = 3\n")
    (tmp_path / "clean/test_core.py").write_text(TESTS)
    command = [sys.executable, "-c", JUDGE.format(tools=str(Path(mutants.__file__).parent), home=str(tmp_path))]
    done = subprocess.run(
        [*command, "by_chance", "by_chance,of_the_limit", "on_a_slow_machine"],
        capture_output=True, text=True, timeout=PROCESS_S, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line]
    assert found == ["survived ", "killed test_core.py::test_of_the_limit", "survived "], done.stderr
