"""A private method that contrib or an example overrides is called by the package.

When the package's own method was merged into its caller, such an override had no effect any more, and nothing said so.
"""

from __future__ import annotations

import ast
from collections import defaultdict

from conftest import ROOT

FOLDERS = ("megatron_rl", "examples")
OVERRIDING = ("megatron_rl/contrib/", "examples/")


def uncalled(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Returns (path, name) of private methods of subclasses in OVERRIDING that no file calls but by super()."""
    methods: dict[str, set[str]] = defaultdict(set)
    called: set[str] = set()
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.bases and path.startswith(OVERRIDING):
                functions = [one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                methods[path] |= {name for name in functions if name.startswith("_") and not name.startswith("__")}
            if isinstance(node, ast.Attribute):
                above = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
                called |= set() if above else {node.attr}
    return {(path, name) for path, names in methods.items() for name in names - called}


def test_every_private_method_that_is_overridden_is_called():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert uncalled({str(path.relative_to(ROOT)): path.read_text() for path in files}) == set()


def test_an_override_of_a_method_that_is_gone_is_found():
    base = "class Base:\n    def run(self):\n        return self._kept()\n"
    own = "class Own(Base):\n    def _kept(self): ...\n    def _gone(self):\n        return super()._gone()\n"
    assert uncalled({"megatron_rl/base.py": base, "examples/own.py": own}) == {("examples/own.py", "_gone")}
