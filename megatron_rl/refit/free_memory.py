"""Gives freed memory back to the operating system."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Returns the free pages of all of glibc's arenas to the system; where there is another C library, nothing happens.

    glibc gives each of a process's threads one of up to eight arenas a core, and returns only what is free at an
    arena's end. A server that dies and comes back is asked by many threads, so that one arena after the other grows to
    its own peak, though the objects are gone. It takes milliseconds, and 0.2 s where 100 MiB are free.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
