"""The site of docs/: it builds, its links lead somewhere, and what its pages quote is in the source."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
import subprocess
import sys

import pytest
from docs_pages import PAGES, ROOT, blocks, prose
from limits import RUN_S

from megatron_rl.commands.settings import SCHEMAS
from megatron_rl.config.describe import settings_of
from megatron_rl.config.evaluation import Reward
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.training.preflight import check_reward
from megatron_rl.types import Prompt

DOCS = ROOT / "docs"
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None]
VALUE = "\0"  # stands for a value in a message of the source


def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "tools/docs/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row.strip().strip("|"))) + 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    """Wrapping a page's lines anew had joined rows of tables and items of lists."""
    lines = prose(page)
    for i, rule in enumerate(lines):
        if i and re.fullmatch(r" *\|[-:| ]+\| *", rule):
            rows = itertools.takewhile(str.strip, lines[i + 1 :])
            wrong = [row for row in rows if not row.lstrip().startswith("|") or cells(row) != cells(rule)]
            assert not wrong, wrong
    assert not [line for line in lines if re.search(r"[.;] - (?=[`*])", line) and "|" not in line]


@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path):
    """Strict counts the warnings that are logged, so that --quiet would let every one pass."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPOSITORY_URL": "https://example.org/repository"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site/reference/recipes.html").read_text()
    assert "https://example.org/repository/blob/main/megatron_rl/recipes/grpo.py" in page
    assert "roles.NAME.loss.clip_low" in (tmp_path / "site/reference/settings.html").read_text()
    assert "class" in (tmp_path / "site/reference/api/recipes.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_of_the_checkout_lead_to_files(page):
    found = [target for line in prose(page) for target in re.findall(r"\]\(([^)\s]+)\)", line)]
    local = [target.partition("#")[0] for target in found if "://" not in target]
    assert not [target for target in local if target and not (page.parent / target).exists()]


def test_anchors_of_links_are_headings():
    for page in PAGES:
        for line in prose(page):
            for target, anchor in re.findall(r"\]\(([\w/.]*\.md)?#([^)\s]+)\)", line):
                if anchor.startswith("megatron_rl"):
                    continue  # of a docstring
                headings = [text for text in prose(page.parent / target if target else page) if text.startswith("#")]
                slugs = {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", h.lstrip("# ").lower())) for h in headings}
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_links_that_leave_docs_are_addresses_in_the_site():
    text = "[a](../megatron_rl/types.py#L3) [b](../examples) [c](concepts.md)\n```\n[d](../x)\n```\n[e](../none.py)\n"
    made, missing = hooks().with_repository_links(text, DOCS, "https://host/repo/")
    assert missing == ["../none.py"]
    assert made.splitlines()[0] == (
        "[a](https://host/repo/blob/main/megatron_rl/types.py#L3) [b](https://host/repo/tree/main/examples) "
        "[c](concepts.md)"
    )
    assert "[d](../x)" in made
    assert (ROOT / "examples").as_uri() in hooks().with_repository_links(text, DOCS, "")[0]
    inner, missing = hooks().with_repository_links(
        "[a](../settings.md) [b](../../../Makefile)", DOCS / "reference/api", "https://h/r"
    )
    assert inner == "[a](../settings.md) [b](https://h/r/blob/main/Makefile)" and not missing


@pytest.mark.parametrize("command", SCHEMAS)
def test_the_tables_of_settings_hold_every_setting(command):
    table = hooks().settings_table(SCHEMAS[command])
    assert table.count("\n") == len(settings_of(SCHEMAS[command])) + 1
    assert table in (DOCS / "reference/settings.md").read_text(), "run: python tools/docs/hooks.py"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.fixture(scope="module")
def messages():
    """Every text in the package's source, with VALUE in the place of what is put into it."""
    found = []
    for path in (ROOT / "megatron_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(
                    str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values
                ))  # fmt: skip
    return "\n".join(found)


def quoted():
    """Returns the messages that docs/how_to/troubleshooting.md quotes."""
    return re.findall(r"^\| `([^`]+)` \|", (DOCS / "how_to/troubleshooting.md").read_text(), re.MULTILINE)


def test_many_errors_are_explained():
    assert len(quoted()) >= 40 and len(set(quoted())) == len(quoted())


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_source(message, messages):
    """Its fixed words stand in one text of the source, in this order."""
    pattern = "[^\n]*".join(re.escape(part) for part in message.split("..."))
    assert re.search(pattern, messages), "the message has changed: mend docs/how_to/troubleshooting.md"


def test_the_reward_that_a_page_shows_passes_the_preflight(tmp_path, monkeypatch):
    [code] = [block.text for block in blocks("python") if block.page.name == "writing_a_reward.md"]
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    prompts = [Prompt(id="0", tokens=[1], payload={"answer": "72"})]
    with GradePool(Reward(target="my_rewards:grade")) as pool:
        assert check_reward(pool.grade, prompts, "-1", "The answer is {answer}.") == {
            "preflight/reward_correct": 1.0,
            "preflight/reward_wrong": 0.0,
        }


def test_the_index_of_examples_names_every_published_config_and_every_miniature():
    index = (ROOT / "examples/README.md").read_text().partition("## I want to ...")[2].partition("## Studies")[0]
    configs = {path.name for path in (ROOT / "examples/published").glob("*.yaml")}
    miniatures = {path.parent.name for path in (ROOT / "examples/miniatures").glob("*/run.py")}
    assert set(re.findall(r"`(\w[\w.]*\.yaml)`", index)) == configs
    assert miniatures <= set(re.findall(r"^\| (\w+) \|", index, re.MULTILINE))


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r"^ *- (?:[^#\n]*: )?([\w/]+\.md)$", nav, re.MULTILINE))
    assert named == {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
