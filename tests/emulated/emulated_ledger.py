"""Counts what a CUDA device would be asked to do: kernels, and places where the host waits for the device."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
# Code whose waits are counted, by the name that a place in it begins with.
WATCHED = {"megatron_rl": str(ROOT / "megatron_rl")}
if importlib.util.find_spec("megatron") is not None:  # not in the environment of an engine
    _core = importlib.util.find_spec("megatron.core")  # it is not imported: it must be after the device is there
    assert _core is not None and _core.submodule_search_locations
    WATCHED["megatron.core"] = _core.submodule_search_locations[0]
ALLOWED = Path(__file__).parent / "allowed_waits.yaml"
GROWTH = ("layers", "micro-batches")


class Ledger:
    """The counts of one process.

    `waits` has (part, what, where) as keys: the part of the case that ran, the kind of wait, and the innermost function
    of this project or of megatron-core that caused it, as `path/of/file.py:function`. `kernels` has (part, operation).
    `unfused` counts the calls of attention for which torch has no fused kernel: all scores would be kept.
    """

    def __init__(self) -> None:
        self.part_now = ""
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.unfused = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what happens in the block under this name."""
        before, self.part_now = self.part_now, name
        try:
            yield
        finally:
            self.part_now = before

    def wait(self, what: str) -> None:
        """Counts one wait of the host, at the place in watched code that caused it. Waits of tests are not counted."""
        where = place()
        if where is not None:
            self.waits[self.part_now, what, where] += 1

    def kernel(self, operation: str) -> None:
        """Counts one kernel."""
        self.kernels[self.part_now, operation] += 1

    def kernels_in(self, part: str) -> int:
        """Returns the number of kernels of a part."""
        return sum(count for (own, _), count in self.kernels.items() if own == part)

    def waits_in(self, part: str) -> int:
        """Returns the number of waits of a part."""
        return sum(count for (own, _, _), count in self.waits.items() if own == part)

    def report(self) -> dict[str, object]:
        """Returns the waits and the kernels as JSON has them."""
        parts = sorted({part for part, _ in self.kernels} | {part for part, _, _ in self.waits})
        return {
            "waits": [[*key, count] for key, count in sorted(self.waits.items())],
            "kernels": {part: self.kernels_in(part) for part in parts},
        }


def place() -> str | None:
    """Returns the innermost function of watched code that runs now, None outside of it.

    Torch computes gradients in a thread of its own, in which no watched code may be running: then it is "autograd".
    """
    frame, inside = sys._getframe(1), False
    while frame is not None:
        file = frame.f_code.co_filename
        for name, directory in WATCHED.items():
            if file.startswith(directory + "/"):
                return f"{name}/{file[len(directory) + 1 :]}:{frame.f_code.co_qualname}"
        inside = inside or "/tests/" in file and "emulated_" not in file.rpartition("/")[2]
        inside = inside or file.endswith("emulated_cases.py")
        frame = frame.f_back
    return None if inside else "autograd"


def allowed() -> list[dict[str, Any]]:
    """Returns the entries of the list of allowed waits, each with `where`, `what`, `parts` and `why`, and with
    `grows_with` where there are more of them with more layers or micro-batches."""
    entries = yaml.safe_load(ALLOWED.read_text())
    for entry in entries:
        assert {*entry} - {"grows_with"} == {"where", "what", "parts", "why"}, f"not an entry: {entry}"
        assert len(entry["why"]) > 20, f"not a reason: {entry}"
        assert {*entry.get("grows_with", [])} <= {*GROWTH}, f"grows_with is of {GROWTH}: {entry}"
    return entries


def unlisted(waits: list[list], entries: list[dict[str, Any]]) -> list[str]:
    """Returns the waits that no entry allows, as sentences. `waits`: those of a report."""
    known = {(part, e["what"], e["where"]) for e in entries for part in e["parts"]}
    return [
        f"{part}: {what}, {count} times, in {where}"
        for part, what, where, count in waits
        if (part, what, where) not in known
    ]


def grown(few: list[list], many: list[list], entries: list[dict[str, Any]], *, by: str) -> list[str]:
    """Returns the waits of which a run with more layers or micro-batches has more, as sentences, but for those whose
    entry says that they grow with them. `few`, `many`: the waits of both runs. `by`: one of GROWTH."""
    marked = {(part, e["what"], e["where"]) for e in entries for part in e["parts"] if by in e.get("grows_with", [])}
    before: Counter[tuple[str, str, str]] = Counter()
    after: Counter[tuple[str, str, str]] = Counter()
    for counts, waits in ((before, few), (after, many)):
        for part, what, where, count in waits:
            counts[part, what, where] += count  # of all ranks
    return [
        f"{part}: {what}, {before[part, what, where]} times and then {count} times with more {by}, in {where}"
        for (part, what, where), count in sorted(after.items())
        if count > before[part, what, where] and (part, what, where) not in marked
    ]
