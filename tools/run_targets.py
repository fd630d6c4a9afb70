"""Runs the targets that `make test` leaves out, one after the other, and prints a table of their results.

python tools/run_targets.py             # all of TARGETS, as `make test-more` does
python tools/run_targets.py TARGET ...  # these alone

A target that fails does not stop the others. Each target's output goes to runs/test_more/TARGET.log. The exit status
is 1 when a target failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

LOGS = Path("runs/test_more")
TARGETS = [  # the shortest first
    "docs", "test-task-sets", "test-verifiers", "oracles", "rubric-mini", "ssrl-mini", "pairwise-mini", "poker-mini",
    "python-mini", "search-mini", "demo-agent", "tango-agent-mini", "evolve-mini", "self-play-mini", "gsm8k",
    "demo-vllm", "demo-sglang", "test-sglang", "test-emulated", "test-nemo-run", "test-hosts", "test-families",
    "test-mcore-latest", "test-processors", "fuzz", "mutants", "test-resume", "test-layouts", "test-real-model", "soak",
]  # fmt: skip
COUNTS = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|errors?|deselected).*?) in [\d.]+s", re.MULTILINE)


def main(targets: list[str]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    rows = [("target", "result", "minutes", "tests")]
    for target in targets:
        log, start = LOGS / f"{target}.log", time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} make {target} > {log}", flush=True)
        with log.open("w") as file:
            status = subprocess.run(["make", target], stdout=file, stderr=subprocess.STDOUT).returncode
        counts = "; ".join(COUNTS.findall(log.read_text(errors="replace")))
        rows.append((target, "failed" if status else "passed", f"{(time.monotonic() - start) / 60:.1f}", counts))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    return int(any(row[1] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or TARGETS))
