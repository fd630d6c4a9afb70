"""The names of classes, modules and settings in messages, docstrings and docs are names that exist."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_pages import ROOT
from test_docs_commands import SETTINGS, is_setting

from megatron_rl.config.other_names import TRL, VERL

# products, data sets, methods, units, people, classes of other projects, and what only a string names
OF_OTHERS = {*Path(__file__).with_name("words_of_others.txt").read_text(encoding="utf-8").split()}
CLASS = re.compile(r"(?<![\w./:-])([A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+)\b|`([A-Z][a-z]\w+)(?:\(|`|\.)")
DOTTED = re.compile(r"(?<![\w./:@'\"\[<=-])([a-z]\w*(?:\.[A-Za-z_]\w*)+)(?![\w(/*=-])")
# the last word of file names
FILES = re.compile(
    "cfg|css|hosts|html|jinja|js|json|jsonl|lock|md|out|parquet|pt|py|safetensors|sbatch|sh|toml|txt|yaml|yml"
)
# pages with the settings of other projects and with the project's past
ELSEWHERE = ("fidelity.md", "log.md")
SECTIONS = {name.split(".")[0] for settings in SETTINGS.values() for name in settings} | {
    name.split(".")[2] for name in SETTINGS["train"] if name.startswith("roles.NAME.")
}
FOLDERS = {path.name for path in (ROOT / "megatron_rl").iterdir() if path.is_dir()}


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / path for path in listed if path and (ROOT / path).is_file()]


def named(tree: ast.AST) -> Iterator[str]:
    """Yields the names of everything that a file defines, imports, reads or writes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from f"{node.name}.{node.asname or ''}".split(".")


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each string: docstrings and messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.fixture(scope="module")
def names() -> set[str]:
    """The names in all code of the repository, and in the code that its pages show."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in tracked("*.py")]
    pages = "\n".join(path.read_text(encoding="utf-8") for path in tracked("docs/*.md", "README.md"))
    shown = re.findall(r"^ *(?:class|def) (\w+)", pages, re.MULTILINE)
    return {*dir(builtins), *shown, *(name for tree in trees for name in named(tree))}


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """(place, text) of each string of the package and of each page."""
    pages = [path for path in tracked("*.md") if path.name not in ELSEWHERE]
    return [
        *(
            (f"{path.relative_to(ROOT)}:{line}", text)
            for path in tracked("megatron_rl/*.py")
            for line, text in strings(ast.parse(path.read_text(encoding="utf-8")))
        ),
        *((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in pages),
    ]


def gone_classes(text: str, names: set[str]) -> list[str]:
    return [word for pair in CLASS.findall(text) for word in pair if word and word not in names | OF_OTHERS]


@functools.cache
def is_a_setting(word: str) -> bool:
    places = (word, f"roles.NAME.{word}")
    return any(is_setting(command, place) for command in SETTINGS for place in places)


def gone_dotted(text: str, names: set[str]) -> list[str]:
    """Returns the words such as `loss.clip_low` that begin like a setting or a module, and are neither of them."""
    return [word for word in DOTTED.findall(text.replace("\\_", "_")) if not _exists(word, names)]


def _exists(word: str, names: set[str]) -> bool:
    first, *_, last = word.split(".")
    if first not in SECTIONS | FOLDERS or FILES.fullmatch(last) or word in {*VERL, *TRL}:
        return True
    if word.startswith("megatron.core"):
        return True
    if first in SECTIONS and is_a_setting(word):
        return True
    if word.startswith("evaluation.sets.") or last in _defined_in_module(word):
        return True
    return first not in FOLDERS - {"config"} and last in names  # the field of an object


@functools.cache
def _defined_in_module(word: str) -> set[str]:
    """Returns the names in the module of the package that the word begins with."""
    parts = word.split(".")
    for count in range(len(parts) - 1, 0, -1):
        path = ROOT.joinpath("megatron_rl", *parts[:count])
        module = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
        if module is not None:
            return {*named(ast.parse(module.read_text(encoding="utf-8"))), *(file.stem for file in path.glob("*"))}
    return set()


def test_classes_that_texts_name_exist(names, texts):
    gone = {f"{place}: {word}" for place, text in texts for word in gone_classes(text, names)}
    assert not gone, "\n".join(sorted(gone))


def test_settings_and_modules_that_texts_name_exist(names, texts):
    gone = {f"{place}: {word}" for place, text in texts for word in gone_dotted(text, names)}
    assert not gone, "\n".join(sorted(gone))


def test_a_name_that_is_gone_is_seen(names):
    assert gone_classes("an error tells of `Over`, and EvaluationGone is no class", names) == ["Over", "EvaluationGone"]
    assert gone_classes("`PolicyLoss` and ConfigError", names) == []
    assert gone_dotted("set loss.clip_lower or data.problems.asked_for, see loop.md", names) == [
        "loss.clip_lower", "data.problems.asked_for"
    ]  # fmt: skip
    assert gone_dotted("set roles.solver.loss.clip_low, data.path and loss.clip_low", names) == []
