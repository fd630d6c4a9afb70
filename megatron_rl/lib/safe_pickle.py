"""Checks pickles before they are loaded, to prevent excessive memory use."""

from __future__ import annotations

import pickle
import pickletools

STORES = ("PUT", "BINPUT", "LONG_BINPUT")  # opcodes with an explicit memo index


def refuse_bombs(data: bytes) -> None:
    """Raises UnpicklingError if a pickle is damaged, or uses a memo index larger than the pickle's size in bytes.

    Python's unpickler allocates all memo entries up to the largest index: a pickle of 780 bytes allocated 20 GB. This
    function does not load the pickle.
    """
    try:
        for operation, argument, place in pickletools.genops(data):
            if operation.name in STORES and int(argument or 0) > len(data):
                raise pickle.UnpicklingError(f"it asks for {argument} places of memory at byte {place}")
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from error
