"""The peak compute rates of GPUs, and the name of a GPU's board by torch's device name."""

import re

# {board: dense bfloat16 operations per second}. NVL boards are slower than the SXM module of the same name: unknown.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H100-PCIE": 756e12, "H200": 989e12}
_BOARDS = {
    "A100": r"\bA100\b", "H100": r"\bG?H100\b(?!.*(PCIe|NVL))", "H100-PCIE": r"\bH100 PCIe\b",
    "H200": r"\bG?H200\b(?!.*NVL)",
}  # fmt: skip


def board(name: str) -> str | None:
    """Returns the key of PEAK_FLOPS for a device; None if the device is unknown. `name`: torch's name of the device,
    such as `NVIDIA H100 80GB HBM3`."""
    return next((key for key, pattern in _BOARDS.items() if re.search(pattern, name)), None)


def peak_flops(name: str) -> float | None:
    """Returns the peak dense bfloat16 operations per second of the device that torch calls `name`; None if unknown."""
    return PEAK_FLOPS.get(board(name) or "")
