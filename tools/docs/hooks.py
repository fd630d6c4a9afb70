"""Prepares the pages of docs/ for the site: links that leave docs/ get the repository's address. mkdocs calls the
functions whose names begin with `on_`.

python tools/docs/hooks.py writes the tables of docs/reference/settings.md again, after a change of the settings.
"""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import Any

from megatron_rl.commands.settings import SCHEMAS
from megatron_rl.config.describe import settings_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BRANCH = "main"  # of the repository that links lead to
LINK = re.compile(r"\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"\s*(```|~~~)")
SETTINGS = DOCS / "reference/settings.md"
TABLE = re.compile(r"<!-- settings: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.megatron_rl")  # mkdocs --strict counts warnings below `mkdocs`


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns the page as it is to be rendered. A link to a file that does not exist is a warning, on which a strict
    build fails."""
    file = Path(page.file.abs_src_path)
    text, missing = with_repository_links(markdown, file.parent, config.repo_url or "")
    for target in missing:
        _log.warning("%s links to %s, which does not exist", file.name, target)
    return text


def with_repository_links(markdown: str, folder: Path, repository: str) -> tuple[str, list[str]]:
    """Returns a page's text in which links that leave docs/ are addresses, and the targets that do not exist.

    `folder`: where the page lies. `repository`: the address of the repository; where it is empty, links lead to the
    files of this checkout. Blocks of code are left as they are.
    """
    missing: list[str] = []

    def address(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.is_relative_to(ROOT) or not target.exists():
            missing.append(link[1])
            return link[0]
        if not repository:
            return f"]({target.as_uri()}{link[2] or ''})"
        kind = "tree" if target.is_dir() else "blob"
        return f"]({repository.rstrip('/')}/{kind}/{BRANCH}/{target.relative_to(ROOT).as_posix()}{link[2] or ''})"

    lines, in_code = [], False
    for line in markdown.splitlines(keepends=True):
        in_code ^= FENCE.match(line) is not None
        lines.append(line if in_code else LINK.sub(address, line))
    return "".join(lines), missing


def with_settings_tables(markdown: str) -> str:
    """Returns the text of settings.md with the tables of the settings that exist now."""

    def table(marker: re.Match[str]) -> str:
        return f"<!-- settings: {marker[1]} -->\n\n{settings_table(SCHEMAS[marker[1]])}\n\n<!-- end -->"

    return TABLE.sub(table, markdown)


def settings_table(schema: type) -> str:
    """Returns all settings of a command's schema as a table in Markdown: name, default, meaning."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for text, comment in settings_of(schema):
        name, equals, value = text.partition(" = ")
        default = f"`{value.replace('|', chr(92) + '|')}`" if equals else ""
        rows.append(f"| `{name}` | {default} | {_cell(comment)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Returns a plain text so that Markdown and HTML leave it as it is."""
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", html.escape(text, quote=False))


if __name__ == "__main__":
    SETTINGS.write_text(with_settings_tables(SETTINGS.read_text(encoding="utf-8")), encoding="utf-8")
