"""Times work on the device, and measures the rates that other figures are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gpu_kit.findings import NotMeasured
from megatron_rl.devices import hardware


def device_seconds(work: Callable[[], object]) -> float:
    """Returns the seconds between two events around `work` in the device's stream, waits for the host included."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def median_seconds(work: Callable[[], object], *, rounds: int, warm: int = 1) -> float:
    """Returns the median of the device's seconds of `rounds` calls, after `warm` that do not count."""
    for _ in range(warm):
        work()
    return statistics.median(device_seconds(work) for _ in range(rounds))


def wall_seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of the clock until the device has done `work`."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_gib(work: Callable[[], object]) -> float:
    """Returns the most memory in GiB that tensors on the device hold while `work` runs."""
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**30


def copy_rate(size: int, *, rounds: int = 10) -> float:
    """Returns the bytes a second that one copy on the device moves, each byte counted once."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return size / median_seconds(lambda: target.copy_(source), rounds=rounds, warm=3)


def product_rate(size: int, *, rounds: int = 10) -> float:
    """Returns the operations a second of a bfloat16 product of two random square matrices."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=product), rounds=rounds, warm=3)


def peak_flops() -> float:
    """Returns the maker's dense bfloat16 operations a second of this device, from megatron_rl/devices/hardware.py.

    Raises NotMeasured for a device that is not there.
    """
    name = torch.cuda.get_device_name()
    peak = hardware.peak_flops(name)
    if peak is None:
        raise NotMeasured(f"the peak of a device named {name!r} is not known (megatron_rl/devices/hardware.py)")
    return peak
