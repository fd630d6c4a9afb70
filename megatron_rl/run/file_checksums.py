"""Computes and compares checksums of files, so that files that were corrupted on a disk or in a transfer are detected
before training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.config.base import ConfigError
from megatron_rl.run.atomic_files import write_text

SUMS = "SHA256SUMS"  # file next to a model's weights, in the format of coreutils' sha256sum
THREADS = 4  # number of threads that read files concurrently
WHOLE_BYTES = 64 << 20  # files up to this size are read completely for a quick digest
_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16  # number and size in bytes of the samples that are read from a larger file


def digest(file: Path) -> str:
    """Returns the SHA-256 of a file's contents."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def quick_digest(file: Path) -> str:
    """Returns a SHA-256 of a file that is fast to compute for large files.

    It is the SHA-256 of the contents if the file has at most 64 MiB, otherwise of the size and 256 samples of 64 KiB,
    including the beginning and the end. The samples keep the start of a run fast: for a model of 671 billion parameters
    in 163 files, 2.6 GB are read. The digest differs for another model, another training of the model, and any change
    of a region longer than the gap between two samples (17 MiB in a file of 4.3 GB). Smaller changes between samples
    are not detected. Modification times are not used because copies change them. `digest` detects every change.
    """
    size = file.stat().st_size
    if size <= WHOLE_BYTES:
        return digest(file)
    hasher = hashlib.sha256(f"{size}\n".encode())
    with file.open("rb") as opened:
        for sample in range(_SAMPLES):
            opened.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            hasher.update(opened.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


def digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns {name: SHA-256} of files in a directory. The files are read by several threads."""
    listed = list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(listed, threads.map(lambda name: digest(directory / name), listed), strict=True))


def wrong(directory: Path, expected: Mapping[str, str], *, part: tuple[int, int] = (0, 1)) -> list[str]:
    """Returns an error message for each file that is missing or whose digest differs from the expected digest.

    `expected`: {name: SHA-256}. `part` = (i, n): check only every n-th file, from index i on, in the order of names.
    """
    checked = dict(list(sorted(expected.items()))[part[0] :: part[1]])
    existing = [name for name in checked if (directory / name).is_file()]
    actual = digests(directory, existing)
    return [
        f"{directory / name} is not what was written: its SHA-256 is {actual.get(name, 'that of no file')[:16]}..., "
        f"not {value[:16]}..."
        for name, value in checked.items()
        if actual.get(name) != value
    ]


def write_sums(directory: Path, pattern: str = "*.safetensors") -> None:
    """Computes the digests of the files of a directory that match a pattern, writes SHA256SUMS, and flushes it to the
    disk."""
    keep(directory, digests(directory, sorted(path.name for path in directory.glob(pattern))))


def keep(directory: Path, sums: Mapping[str, str]) -> None:
    """Writes SHA256SUMS from known digests {file name: SHA-256}, and flushes it to the disk."""
    write_text(directory / SUMS, "".join(f"{value}  {name}\n" for name, value in sums.items()))


def wrong_of(directory: Path) -> list[str]:
    """Checks a directory against SHA256SUMS. Returns an error message for each damaged line of SHA256SUMS or, if no
    line is damaged, for each file that differs from its line. Returns [] if there is no SHA256SUMS."""
    file = directory / SUMS
    if not file.is_file():
        return []
    rows = [line.partition("  ") for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    bad = [f"{file} is damaged" for value, gap, name in rows if len(value) != 64 or not gap or os.sep in name]
    return bad or wrong(directory, {name: value for value, _, name in rows})


def refuse(faults: Sequence[str]) -> None:
    """Raises ConfigError with the first error message if there are any. `faults`: the error messages that `wrong` or
    `wrong_of` returned."""
    if faults:
        raise ConfigError(f"{faults[0]}: the disk or a copy damaged it; take another copy")
