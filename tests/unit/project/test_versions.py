"""Versions that `make setup` installs: constraints.txt, and requirements.txt with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")


def pins(file):
    return {name_of(name): version for name, version in PIN.findall((ROOT / file).read_text())}


def test_both_files_have_the_same_versions():
    assert len(pins("constraints.txt")) > 100 and pins("requirements.txt") == pins("constraints.txt")


def test_every_version_has_hashes_and_no_index_is_named():
    text = (ROOT / "requirements.txt").read_text()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert entries and all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text and "--index" not in text and "--find-links" not in text


def test_the_project_and_its_tests_need_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {name_of(need) for need in [*project["dependencies"], *project["optional-dependencies"]["dev"]]}
    assert needed - {"torch", "megatron-rl"} <= pins("requirements.txt").keys()
