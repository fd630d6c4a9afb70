"""The watch over the processes of a run: what each holds while iterations go by, and what is left of them afterwards.

Every process that belongs to a soak has a word in its environment (MARK), so that it is found whoever its parent is.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

MARK = "MEGATRON_RL_SOAK"
WARM_ITERATIONS = 200  # of a process, before its memory has to be flat; of a short run a fifth
SHARE_WATCHED = 0.5  # of a run's iterations behind the warm ones that a process must have lived for to have a slope
LONGEST_LINE = 1 << 16  # of metrics.jsonl
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one process held at one moment."""

    iteration: int  # iterations that the run had done
    name: str  # of the process: rank 0, server generator-1
    pid: int
    held_kib: int  # anonymous and shared memory; pages of files, which the kernel takes back, do not count
    resident_kib: int
    descriptors: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Slope:
    """How fast a process grew behind its warm iterations."""

    kib: float  # an iteration
    descriptors: float  # in 1,000 iterations
    threads: float  # in 1,000 iterations
    iterations: int  # that it was watched for


class Watch:
    """Takes samples of all processes under a launcher, one in an iteration, and keeps them in a file.

    Memory and descriptors rise and fall with what is under way: few samples would have slopes by chance.
    """

    def __init__(self, file: Path, *, alone: bool) -> None:
        """`alone`: the launcher is the one rank."""
        self._file, self._alone, self._next = file, alone, 0
        self._names: dict[int, str] = {}
        file.parent.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Forgets the processes of the start before."""
        self._names, self._next = {}, 0

    def look(self, launcher: int, iteration: int) -> None:
        """Takes a sample where one is due."""
        if iteration < self._next:
            return
        self._next = iteration + 1
        with self._file.open("a") as file:
            for process in family(launcher):
                with contextlib.suppress(psutil.Error, OSError):
                    measured = sample(process.pid, self._name(process, launcher), iteration)
                    file.write(json.dumps(asdict(measured)) + "\n")

    def named(self, launcher: int, start: str) -> list[psutil.Process]:
        """Returns the living processes whose name starts so, in the order of their starts."""
        processes = []
        for process in family(launcher):
            with contextlib.suppress(psutil.Error):
                if self._name(process, launcher).startswith(start):
                    processes.append(process)
        return processes

    def _name(self, process: psutil.Process, launcher: int) -> str:
        if process.pid not in self._names:
            number = None if self._alone else sum(name.startswith("rank") for name in self._names.values())
            name = ("rank 0" if self._alone else "launcher") if process.pid == launcher else ""
            self._names[process.pid] = name or name_of(process, launcher, number)
        return self._names[process.pid]


def family(launcher: int) -> list[psutil.Process]:
    """Returns a launcher and all under it, in the order of their starts."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(launcher)
        return [root, *sorted(root.children(recursive=True), key=lambda p: (p.create_time(), p.pid))]
    return []


def name_of(process: psutil.Process, launcher: int, ranks: int | None) -> str:
    """Returns what a process under a launcher is; `ranks` of those under it are known already (None: it has
    none)."""
    words = process.cmdline()
    text = " ".join(words)
    if "megatron_rl.rewards.reaper" in text:  # a keeper starts the worker as its child, which has its words
        parent = process.parent()
        inside = parent is not None and "megatron_rl.rewards.reaper" in " ".join(parent.cmdline())
        return "reward worker" if inside else "keeper of a reward worker"
    for kind, mark in (("server", "soaking/servers.py"), ("supervisor", "megatron_rl.main serve")):
        if mark in text:
            return f"{kind} {_served(words, process)}"
    if words[-4:] == psutil.Process(launcher).cmdline()[-4:]:
        return f"rank {ranks}" if ranks is not None and process.ppid() == launcher else "writer of checkpoints"
    for kind, mark in (("resource tracker", "resource_tracker"), ("manager of writers", "spawn_main")):
        if mark in text:
            return kind
    return "other"


def _served(words: Sequence[str], process: psutil.Process) -> str:
    """Returns role-replica of a supervisor, or of the one that a server is under."""
    options = {w.partition("=")[0]: w.partition("=")[2] for w in words if w.startswith("--") and "=" in w}
    if "--role" not in options:
        parent = process.parent()
        return "" if parent is None or "--port" not in words or parent.pid == 1 else _served(parent.cmdline(), parent)
    return f"{options['--role']}-{options['--replica']}"


def sample(pid: int, name: str, iteration: int) -> Sample:
    """Reads what a process holds. Raises OSError when it has ended."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    kib = {key: int(fields[key].split()[0]) for key in ("RssAnon", "RssShmem", "VmRSS")}
    return Sample(
        iteration=iteration, name=name, pid=pid, held_kib=kib["RssAnon"] + kib["RssShmem"], resident_kib=kib["VmRSS"],
        descriptors=len(os.listdir(f"/proc/{pid}/fd")), threads=int(fields["Threads"]),
    )  # fmt: skip


def slopes(samples: Iterable[Sample], iterations: int) -> dict[str, Slope]:
    """Returns how fast the processes grew, by name: of each name the one that lived longest, where it lived long."""
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for reading in samples:
        lives[reading.name, reading.pid].append(reading)
    slope_of: dict[str, Slope] = {}
    warm = min(WARM_ITERATIONS, iterations // 5)
    for (name, _), life in lives.items():
        late = [reading for reading in life if reading.iteration >= life[0].iteration + warm]
        watched = late[-1].iteration - late[0].iteration if late else 0
        short = len(late) < 3 or watched < SHARE_WATCHED * (iterations - warm)
        if short or (name in slope_of and watched <= slope_of[name].iterations):
            continue
        at = np.array([reading.iteration for reading in late], float)
        slope_of[name] = Slope(
            kib=median_slope(at, [reading.held_kib for reading in late]),
            descriptors=1000 * median_slope(at, [reading.descriptors for reading in late]),
            threads=1000 * median_slope(at, [reading.threads for reading in late]),
            iterations=watched,
        )
    return slope_of


def median_slope(at: np.ndarray, values: Sequence[float]) -> float:
    """Returns the median of the slopes between all pairs (Theil and Sen): a step or an outlier does not move it."""
    held = np.asarray(values, float)
    first, second = np.triu_indices(len(at), 1)
    apart = at[second] - at[first]
    return float(np.median((held[second] - held[first])[apart > 0] / apart[apart > 0]))


def read_samples(file: Path) -> list[Sample]:
    return [Sample(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def marked(mark: str) -> list[psutil.Process]:
    """Returns all living processes that were started with the mark."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def gone(mark: str, within_s: float) -> list[psutil.Process]:
    """Waits until all marked processes have ended. Returns those that have not in time."""
    end = time.monotonic() + within_s
    while (survivors := marked(mark)) and time.monotonic() < end:
        time.sleep(POLL_S)
    return survivors


def last_iteration(run: Path) -> int:
    """Returns the number of iterations that metrics.jsonl tells of, by its last whole line."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError), (run / "metrics.jsonl").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LINE))
        return int(json.loads(file.read().split(b"\n")[-2])["iteration"]) + 1
    return 0


def names_in(*folders: Path) -> list[str]:
    return sorted(str(path) for folder in folders if folder.is_dir() for path in folder.iterdir())


def half_written(run: Path) -> list[str]:
    """Returns what looks like a file that was not written to its end, anywhere in a run's directory."""
    allowed = {".metadata"}  # of a distributed checkpoint
    return sorted(str(p) for p in run.rglob("*") if p.name.startswith(".") and p.name not in allowed)


def plain(slope_of: Mapping[str, Slope]) -> dict[str, dict[str, float]]:
    return {name: asdict(slope) for name, slope in slope_of.items()}


def words(process: psutil.Process) -> str:
    """Returns the command line of a process, for a message."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())}"[:200]
    return f"{process.pid}"
