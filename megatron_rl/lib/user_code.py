"""Describes errors in messages, with their location if they were raised in user code: rewards, recipes, environments,
and code that they call."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def place_of(error: BaseException) -> str:
    """Returns the location in user code where an error occurred, such as "my_rewards.py:12 in grade".

    The location is the innermost stack frame that was called from this package and belongs neither to this package nor
    to a library. Returns an empty string if there is no such frame.
    """
    frames = traceback.extract_tb(error.__traceback__)
    first = next((place for place, frame in enumerate(frames) if frame.filename.startswith(PACKAGE)), 0)
    in_user = [frame for frame in frames[first:] if not frame.filename.startswith((PACKAGE, "<frozen", *_LIBRARIES))]
    return "".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in in_user[-1:])


def one_line(error: BaseException, limit: int = 300) -> str:
    """Returns the message of an error as one line of at most `limit` characters; without a message, its type."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def told(error: BaseException) -> str:
    """Returns a text about an error: its type, its message, and its location in user code."""
    place = place_of(error)
    return f"{type(error).__name__}: {str(error)[:500]}" + (f" ({place})" if place else "")


def traceback_of(error: BaseException) -> str:
    """Returns the complete traceback of an error as text, including the causes of the error."""
    return "".join(traceback.format_exception(error))
