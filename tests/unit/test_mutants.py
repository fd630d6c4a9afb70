"""`make mutants`: which changes are made, that each is Python, and that those listed as equivalent are in the code."""

import ast
import sys
from pathlib import Path

import yaml

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))  # at the end: nothing else takes its modules from there

import mutants  # noqa: E402
from mutants_places import Finder  # noqa: E402

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
    listed = yaml.safe_load((TOOLS / "mutants_equivalent.yaml").read_text()) or {}
    chosen = mutants.sample(0, 150, set(listed))
    assert len(chosen) == 150 and "Take out of" not in capsys.readouterr().out
    assert all(isinstance(reason, str) and reason for reason in listed.values())
    for mutant in chosen:
        text = (mutants.ROOT / mutant.file).read_bytes()
        ast.parse(text[: mutant.start] + mutant.new.encode() + text[mutant.end :])
        for at, note in mutant.probes:
            ast.parse(text[:at] + note.format(0).encode() + text[at:])
