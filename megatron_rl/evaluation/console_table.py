"""Tables of reports for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import markup
from rich.box import SIMPLE_HEAD
from rich.table import Table


def console_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, left_columns: int = 1) -> Table:
    """Returns a table for the terminal. Its first `left_columns` columns are aligned to the left, the others to the
    right."""
    shown = Table(box=SIMPLE_HEAD, title=title, title_justify="left", show_edge=False)
    for place, head in enumerate(heads):
        shown.add_column(markup.escape(head), justify="left" if place < left_columns else "right")
    for row in rows:
        shown.add_row(*map(markup.escape, row))
    return shown
