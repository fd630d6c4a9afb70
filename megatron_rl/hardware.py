"""Knows the peak rate of GPUs by the names that torch has for them."""

import re

A100, HOPPER = 312e12, 989e12  # dense bfloat16 operations a second
# Boards that are slower than the module of that name are not in the table.
_BOARDS = ((r"\bA100\b", A100), (r"\bG?H100\b(?!.*(PCIe|NVL))", HOPPER), (r"\bG?H200\b(?!.*NVL)", HOPPER))


def peak_flops(name: str) -> float | None:
    """Returns the dense bfloat16 operations a second of a device, by torch's name of it (`NVIDIA H100 80GB HBM3`).

    Returns None for a device whose peak is not known here.
    """
    return next((peak for board, peak in _BOARDS if re.search(board, name)), None)
