"""Runs areas of hostile inputs and prints a table: python tests/fuzz/run.py [AREA ...] --seed 7 --count 1000.

An area is a file beside this one with a function `fuzz(seed, count) -> Tally`. Without a name all areas run. The exit
status is 1 when an input led to a defect: a traceback that is not a refusal, a wrong acceptance, a hang.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# without this folder, whose files may be called as modules of the library are
sys.path[:] = [str(HERE.parent / "helpers"), *(path for path in sys.path if Path(path).resolve() != HERE)]

from fuzzing import Tally  # noqa: E402 (the helpers are found by the line above)


def areas() -> list[str]:
    """Returns the names of all areas."""
    return sorted(file.stem for file in HERE.glob("*.py") if file.stem != "run")


def run(area: str, seed: int, count: int) -> Tally:
    """Tries `count` inputs of an area."""
    spec = importlib.util.spec_from_file_location(f"fuzz_{area}", HERE / f"{area}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fuzz(seed, count)


def main() -> int:
    """Prints one line for each area, and the first defects below the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("areas", nargs="*", choices=[*areas(), []], metavar="AREA", help=", ".join(areas()))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: a new one")
    parser.add_argument("--count", type=int, default=1000, help="inputs of each area")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # what is told of every damaged input would hide the table
    print(f"{'area':<16}{'seed':>8}{'inputs':>8}{'defects':>9}{'seconds':>9}  outcomes", flush=True)
    defects: list[str] = []
    failed = 0
    for area in args.areas or areas():
        start = time.monotonic()
        found = run(area, args.seed, args.count)
        outcomes = ", ".join(f"{name} {number}" for name, number in sorted(found.outcomes.items()))
        seconds = time.monotonic() - start
        print(f"{area:<16}{args.seed:>8}{found.inputs:>8}{found.defects:>9}{seconds:>9.1f}  {outcomes}", flush=True)
        failed += found.defects
        defects += [f"{area}, {text}" for text in found.shown]
    print("\n".join(["", *defects]) if defects else "", end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
