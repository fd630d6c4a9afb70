"""Gives memory that this process has freed back to the system."""

from __future__ import annotations

import ctypes
import platform


def return_free_pages() -> None:
    """Returns whole pages that malloc keeps for later, also those between pages in use. Without glibc nothing happens.

    Turns allocate and free blocks of many sizes, so that free pages lie between used ones. By itself malloc returns
    those at the end of its heap alone, and a process grows by the others.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
