"""A directory to start the examples from, where paths in them are found."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def make_home(directory: Path) -> Path:
    """Makes `directory` such a place, and returns it."""
    (directory / "examples").symlink_to(EXAMPLES)
    return directory
