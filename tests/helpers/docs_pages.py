"""Reads the pages of README.md and docs/: their blocks of code, and the commands in those."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))  # tests/multi/test_tutorials.py runs them
FENCE = re.compile(r"( *)```(\w*)")
MARK = re.compile(r" *<!-- (not run|not a config): (.{10,}) -->")
ENDS = ("&&", "||", "|", ";", "&", "(", ")")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""  # `not run` or `not a config`, where a comment with a reason stands above it

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Returns the blocks of a language in all pages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def blocks_of(page: Path) -> list[Block]:
    """Returns all blocks of a page, in the page's order."""
    listed: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    place = 0
    while place < len(lines):
        if not (begun := FENCE.match(lines[place])):
            place += 1
            continue
        end = next(i for i in range(place + 1, len(lines)) if FENCE.match(lines[i]))
        text = "".join(line[len(begun[1]) :] + "\n" for line in lines[place + 1 : end])
        mark = MARK.fullmatch(lines[place - 1]) if place else None
        listed.append(Block(page, place + 1, begun[2], text, mark[1] if mark else ""))
        place = end + 1
    return listed


def prose(page: Path) -> list[str]:
    """Returns the lines of a page that lie in no block."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        inside ^= FENCE.match(line) is not None
        lines.append("" if inside or FENCE.match(line) else line)
    return lines


def commands(text: str) -> list[list[str]]:
    """Returns the words of every command in a block: comments, redirections and values of $(...) are left out."""
    listed, pending = [], ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = _words(pending)
        except ValueError:  # a quotation goes on in the next line
            continue
        pending = ""
        listed += _split(words)
    assert not pending, f"a quotation does not end: {pending}"
    return listed


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "VALUE", text), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    return [*lexer]


def _split(words: list[str]) -> list[list[str]]:
    """Splits words where one command ends, and drops redirections and the settings of variables in front."""
    listed: list[list[str]] = [[]]
    skip = False
    for word in words:
        if skip or re.fullmatch(r"[<>]+&?", word):
            skip = not skip
        elif word in ENDS:
            listed.append([])
        elif listed[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            listed[-1].append(word)
    return [command for command in listed if command]
