"""Looks at pickles before they are loaded, for what would take all memory."""

from __future__ import annotations

import pickle
import pickletools

STORES = ("PUT", "BINPUT", "LONG_BINPUT")  # operations that name an index of the memo


def refuse_bombs(data: bytes) -> None:
    """Raises UnpicklingError for a pickle that is damaged, or whose memo needs more entries than it has bytes.

    Python's unpickler makes room for all entries up to the largest index: 780 bytes took 20 GB. Nothing is loaded.
    """
    try:
        for operation, argument, place in pickletools.genops(data):
            if operation.name in STORES and int(argument or 0) > len(data):
                raise pickle.UnpicklingError(f"it asks for {argument} places of memory at byte {place}")
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from error
