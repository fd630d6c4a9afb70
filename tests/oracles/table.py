"""Compares numbers of other people's code, written anew, with those in tests/oracles, and ours with both, in one table.

    python tests/oracles/table.py [FOLDER]

FOLDER holds what trl_losses.py, trl_run.py and verl_functions.py in tests/oracles have just written. Fails when these
numbers differ from those in tests/oracles. Without FOLDER, prints the tables of docs/reference/methods.md.
tests/helpers must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracles
import oracles_released
import oracles_rewards
import oracles_verl
from ranks import ROOT, run_ranks
from safetensors.torch import load_file

SAME = 1e-9  # float64, on whatever CPU
SAME_WEIGHTS = 1e-6  # float32, absolute


def unlike(new: Any, kept: Any, place: str = "", *, bar: float = SAME) -> Iterator[str]:
    """Names the places where two JSON values differ: numbers by more than the bar, all else at all."""
    if isinstance(new, dict) and isinstance(kept, dict) and new.keys() == kept.keys():
        for key in new:
            yield from unlike(new[key], kept[key], f"{place}/{key}", bar=bar)
    elif isinstance(new, list) and isinstance(kept, list) and len(new) == len(kept):
        for i, (a, b) in enumerate(zip(new, kept, strict=True)):
            yield from unlike(a, b, f"{place}/{i}", bar=bar)
    elif isinstance(new, float) and isinstance(kept, float):
        if not abs(new - kept) <= bar * max(1.0, abs(kept)):
            yield f"{place}: {new}, and {kept} in tests/oracles"
    elif new != kept:
        yield f"{place}: {str(new)[:60]}, and {str(kept)[:60]} in tests/oracles"


def changes(folder: Path) -> Iterator[str]:
    """Names what is different from tests/oracles in what was written anew."""
    names = (
        "trl_losses.json",
        "trl_gold.json",
        "trl_preferences.json",
        "trl_rewards.json",
        "verl_ppo.json",
        "ifeval.json",
        "released.json",
    )
    files = dict.fromkeys(names, SAME)
    for name, bar in (files | {f"{run}/record.json": 1e-5 for run in ("trl_run", "trl_dpo_run")}).items():
        new, kept = (json.loads((base / name).read_text()) for base in (folder, oracles.FOLDER))
        if name == "released.json":  # rows whose checkouts were not given are left out
            kept = {section: own for section, own in kept.items() if section in new}
        yield from unlike(new, kept, name, bar=bar)
    for name in ("trl_run/model/model", "trl_run/after_1", "trl_run/after_2", "trl_dpo_run/after"):
        path = f"{name}.safetensors"
        new, kept = (load_file(base / path) for base in (folder, oracles.FOLDER))
        for key in kept:
            apart = (new[key] - kept[key]).abs().max().item()
            if not apart <= SAME_WEIGHTS:
                yield f"{path}: {key} differs by {apart:.1e}"


def replayed() -> str:
    """The table's rows of the run, replayed here on two ranks; a row holds differences of loss and weights."""
    with tempfile.TemporaryDirectory() as out:
        worker = ROOT / "tests/helpers/oracles_worker.py"
        answer = run_ranks(worker, 2, Path(out), str(oracles.FOLDER / "trl_run"))[0]
    rows = []
    for name, found in answer.items():
        layout, steps = name.split("/")
        what = f"GRPOTrainer's weights after {steps} optimizer steps"
        apart = f"{found['loss']:.0e} | {found['weights']:.0e}"
        rows.append(f"| run_{layout}_{steps} | {what} | | {layout} 2 | weights, over how far they went | {apart} |")
    return "\n".join(rows)


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:2] == ["-h"]:
        print(__doc__)
        sys.exit(2)
    if len(sys.argv) == 1:
        tables = (module.table(measured=False) for module in (oracles, oracles_rewards, oracles_verl, oracles_released))
        print(*tables, sep="\n\n")
        return
    found = list(changes(Path(sys.argv[1])))
    versions = oracles.trl()["versions"]
    print(f"TRL {versions['trl']}; largest difference relative to TRL's largest number, bar {oracles.BAR:.0e}")
    print(oracles.table(measured=True))
    print(oracles_rewards.table(measured=True))
    print(replayed())
    print(f"verl {oracles_verl.verl()['versions']['verl']}; largest difference relative to verl's largest number")
    print(oracles_verl.table(measured=True))
    print("rewards, labels and pass@k; largest difference from the released code")
    print(oracles_released.table(measured=True))
    rows = oracles.ifeval()["rows"]
    print(f"IFEval: {sum(len(row['strict']) + len(row['loose']) for row in rows)} verdicts of the public checkers")
    if found:
        sys.exit("\n".join(["these numbers are not those in tests/oracles:", *found[:20]]))
    print("TRL's, verl's, IFEval's and released numbers are those in tests/oracles")


if __name__ == "__main__":
    main()
