"""Seconds of computing checksums over seconds of writing the same files and pushing them to the disk, in one run.

A checkpoint of `--gb` gigabytes in four files is written as a run writes one, summed up, and checked. Both sides take
iterations; a ratio is the median of the rounds. The disk's cache makes writing faster than a cluster's file system is,
so that the ratio is an upper bound of what checksums add to a save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from megatron_rl.run.file_checksums import digests, wrong

FILES = 4
BAR = 4.0  # checksums may cost so many times the writing to this machine's cache


def main() -> int:
    """Prints a line for each round and the medians. Returns 1 with --check when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    block = os.urandom(1 << 20)
    ratios, rates = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as place:
            start = time.perf_counter()
            names = [_write(Path(place), i, block, int(args.gb * 1e9 / FILES)) for i in range(FILES)]
            written = time.perf_counter()
            known = digests(Path(place), names)
            summed = time.perf_counter()
            assert not wrong(Path(place), known)
            checked = time.perf_counter()
        ratios.append((summed - written) / (written - start))
        rates.append(args.gb / (summed - written))
        print(
            f"write {written - start:.2f} s, checksums {summed - written:.2f} s, check {checked - summed:.2f} s: "
            f"ratio {ratios[-1]:.2f}, {rates[-1]:.2f} GB/s",
            flush=True,
        )
    ratio = statistics.median(ratios)
    print(f"checksums / writing = {ratio:.2f} (bar {BAR:g}), {statistics.median(rates):.2f} GB/s")
    return 1 if args.check and ratio > BAR else 0


def _write(place: Path, number: int, block: bytes, size: int) -> str:
    name = f"__{number}_0.distcp"
    with (place / name).open("wb") as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return name


if __name__ == "__main__":
    sys.exit(main())
