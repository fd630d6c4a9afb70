"""Renders the HTML templates in report/page/ to self-contained pages."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_rl.run.atomic_files import replacing

FILES = Path(__file__).parent / "page"  # templates, styles and scripts
STYLES = ("page.css",)
WATCH = "watch.js"  # script that polls the page's server and reloads the page when the run has advanced
MAX_CHARACTERS = 6000  # maximum length of a sample's text; longer texts are truncated
# Characters that are invisible or that change the direction of writing.
_HIDDEN = re.compile(
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff"
    "\\U000e0000-\\U000e007f]"
)


def write_page(
    path: Path, template: str, values: Mapping[str, Any], *, styles: Sequence[str] = STYLES,
    scripts: Sequence[str] = (), data: Iterable[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Renders page/TEMPLATE with `values` and writes the page atomically.

    All values are escaped. Characters that cannot be encoded as UTF-8, such as lone surrogates, become question marks.

    `styles`, `scripts`: names of files in page/, which are included in the page. The page's content security policy
    allows a browser to run only these scripts, and to load nothing.
    `data`: blocks of data for the scripts as pairs (id, text). The page contains each text in an HTML element that is
    neither shown nor executed. A text must not contain `<`; results of `as_json` and base64 never do. The blocks are
    written one at a time, because they may be large.
    """
    codes = [(FILES / name).read_text(encoding="utf-8") for name in scripts]
    frame = {"styles": [(FILES / name).read_text(encoding="utf-8") for name in styles], "scripts": codes, "data": data}
    frame |= {"policy": _policy(codes, connects=WATCH in scripts), "headings": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        for part in templates().get_template(template).generate({**values, **frame}):
            file.write(part.encode("utf-8", "replace"))


def templates() -> Environment:
    """Returns the jinja2 environment of the templates in page/. The environment escapes all values, and raises an error
    for an undefined name."""
    anchor = lambda heading: re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))  # noqa: E731
    environment = Environment(
        loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, extensions=["jinja2.ext.do"],
    )  # fmt: skip
    short = lambda value, most=MAX_CHARACTERS: shortened(str(value), most)  # noqa: E731
    environment.filters |= {"anchor": anchor, "shown": show, "visible": visible, "short": short}
    return environment


def as_json(value: Any) -> str:
    """Returns a value as JSON that is safe inside a script element: ASCII without `<`.

    Raises ValueError for NaN and infinities.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def show(value: Any) -> str:
    """Returns a value as text. Floats have four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shortened(text: str, most: int) -> str:
    """Returns a text truncated to `most` characters, with a note about the number of omitted characters."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def visible(text: str) -> str:
    """Returns a text in which control characters, invisible characters and characters that change the direction of
    writing are replaced by visible ones."""

    def told(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 32 else f"‹U+{code:04X}›"

    return text if text.isprintable() else _HIDDEN.sub(told, text)


def _policy(codes: Sequence[str], *, connects: bool) -> str:
    """Returns the content security policy of a page that loads nothing and runs only the given scripts. `connects`:
    whether the scripts may send requests to the server of the page."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(c.encode()).digest()).decode()}'" for c in codes)
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"]
    rules += ["connect-src 'self'"] if connects else []
    return "; ".join([*rules, f"script-src {hashes}"] if hashes else rules)
