"""Says which of the packages that the kit for one GPU needs this Python has, and whether torch sees a GPU."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
LINE = re.compile(r"([\w.-]+)(?:([=>]=)([\w.]+))?")


def problems(file: Path) -> list[str]:
    """Returns a sentence for each line of a file in pip's form whose package is missing, or is of another version."""
    lines = []
    for line in file.read_text().splitlines():
        requirement = LINE.match(line.partition("#")[0].strip())
        if requirement is None:
            continue
        name, sign, version = requirement.groups()
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is missing ({file.name})")
            continue
        if (sign == "==" and installed != version) or (sign == ">=" and _numbers(installed) < _numbers(version)):
            lines.append(f"{name} is {installed}, {file.name} wants {sign}{version}")
    return lines


def main() -> int:
    """Prints what is missing. Returns 1 when something is."""
    messages = [problem for name in ("machine.txt", "wheels.txt") for problem in problems(HERE / name)]
    for problem in messages:
        print(problem)
    if messages:
        print("see docs/how_to/gpu.md, `On your first GPU`")
        return 1
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {device}")
    return 0 if torch.cuda.is_available() else 1


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


if __name__ == "__main__":
    sys.exit(main())
