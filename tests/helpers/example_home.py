"""A directory to start the examples from, with the files that some of them name."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
CORPORA = ("runs/search_mini/task/corpus.jsonl", "data/wiki-18.jsonl")  # that examples search
DOCUMENT = '{"title": "Paris", "text": "Paris is a town.", "contents": "Paris\\nIt is a town."}\n'


def make_home(directory: Path) -> Path:
    """Makes `directory` a place where every example passes its checks, and returns it."""
    (directory / "examples").symlink_to(EXAMPLES)
    for corpus in CORPORA:
        path = directory / corpus
        path.parent.mkdir(parents=True)
        path.write_text(DOCUMENT)
    return directory
