"""The peak compute rates of GPUs, by torch's device names."""

import re

A100, HOPPER = 312e12, 989e12  # dense bfloat16 operations per second
# The table lacks boards (PCIe, NVL) that are slower than the SXM module of the same name.
_BOARDS = ((r"\bA100\b", A100), (r"\bG?H100\b(?!.*(PCIe|NVL))", HOPPER), (r"\bG?H200\b(?!.*NVL)", HOPPER))


def peak_flops(name: str) -> float | None:
    """Returns the peak dense bfloat16 operations per second of a device. `name`: torch's name of the device, such as
    `NVIDIA H100 80GB HBM3`.

    Returns None if the peak rate of the device is unknown.
    """
    return next((peak for board, peak in _BOARDS if re.search(board, name)), None)
