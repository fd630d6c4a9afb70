"""Puts HTML sections, styles, scripts and data together into one page that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "page"  # the styles and scripts of pages
STYLES = ("page.css",)


@dataclass(frozen=True, slots=True)
class Block:
    """Data that a page's scripts read: the text of an element that is neither shown nor run.

    `text` must hold no `<`, as what `as_json` and base64 give.
    """

    id: str
    text: str


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str]], *, head: str = "") -> str:
    """Returns an HTML page of (heading, HTML) sections, without scripts. Empty sections are left out."""
    return "".join(page_parts(title, subtitle, sections, head=head))


def page_parts(
    title: str, subtitle: str, sections: Sequence[tuple[str, str]], *, head: str = "",
    styles: Sequence[str] = STYLES, scripts: Sequence[str] = (), data: Iterable[Block] = (),
) -> Iterator[str]:  # fmt: skip
    """Yields the parts of an HTML page in order.

    `styles`, `scripts`: names of files in this package's `page` folder. The page's own policy lets a browser run these
    scripts alone, and load nothing. `data`: what the scripts read; it is yielded as it comes, and may be large.
    """
    shown = [(heading, body) for heading, body in sections if body]
    links = "".join(f'<a href="#{anchor(heading)}">{escape(heading)}</a>' for heading, _ in shown)
    codes = [(FILES / name).read_text(encoding="utf-8") for name in scripts]
    yield (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_policy(codes)}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
    )
    for name in styles:
        yield f"<style>{(FILES / name).read_text(encoding='utf-8')}</style>\n"
    yield (
        f"</head>\n<body>\n<header><h1>{escape(title)}</h1>\n<p>{subtitle}</p>\n{head}\n<nav>{links}</nav>\n</header>\n"
        "<main>\n"
    )
    for heading, body in shown:
        yield f'<section id="{anchor(heading)}"><h2>{escape(heading)}</h2>\n{body}\n</section>\n'
    yield "</main>\n" if shown else "<p>Nothing has been logged yet.</p></main>\n"
    for block in data:
        yield f'<script type="application/octet-stream" id="{escape(block.id)}">{block.text}</script>\n'
    for code in codes:
        yield f"<script>{code}</script>\n"
    yield "</body>\n</html>\n"


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """Writes a page part by part through a temporary neighbour, so that a page is there as a whole or not at all.

    What is no UTF-8, such as half of a pair of surrogates, becomes a question mark.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part.encode("utf-8", "replace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def as_json(value: Any) -> str:
    """Returns a value as JSON that may stand inside a script element: it has no `<`, and is ASCII.

    Raises ValueError for NaN and infinities.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def table(head: Sequence[str], lines: str) -> str:
    """Returns an HTML table. `head`: names of the columns; `lines`: its rows as HTML."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    row = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{row}<tbody>{lines}</tbody></table></div>'


def grid(blocks: Iterable[str]) -> str:
    """Returns HTML that shows the blocks as cards beside each other."""
    inner = "\n".join(f'<div class="card">{block}</div>' for block in blocks)
    return f'<div class="grid">{inner}</div>' if inner else ""


def show(value: Any) -> str:
    """Returns a value as text; floats get four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def anchor(heading: str) -> str:
    """Returns the id of the section with this heading."""
    return "".join(letter for letter in heading.lower().replace(" ", "-") if letter.isalnum() or letter == "-")


def _policy(codes: Sequence[str]) -> str:
    """Returns the page's content security policy: nothing is loaded, and no script runs but the given ones."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(c.encode()).digest()).decode()}'" for c in codes)
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"]
    rules += [f"script-src {hashes}"] if hashes else []
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'
