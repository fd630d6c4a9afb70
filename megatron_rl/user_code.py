"""Says where the code of a user raised an error: rewards, recipes, environments and what they call."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def place_of(error: BaseException) -> str:
    """Returns file, line and function of the innermost frame of an error in code that this package called, and that is
    no library's, such as "my_rewards.py:12 in grade"; empty where there is no such frame."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((place for place, one in enumerate(frames) if one.filename.startswith(PACKAGE)), 0)
    own = [one for one in frames[first:] if not one.filename.startswith((PACKAGE, "<frozen", *_LIBRARIES))]
    return "".join(f"{one.filename}:{one.lineno} in {one.name}" for one in own[-1:])


def told(error: BaseException) -> str:
    """Returns an error as one text: its kind, its message, and where the code of a user raised it."""
    place = place_of(error)
    return f"{type(error).__name__}: {str(error)[:500]}" + (f" ({place})" if place else "")


def traceback_of(error: BaseException) -> str:
    """Returns the whole traceback of an error, with those of its causes."""
    return "".join(traceback.format_exception(error))
