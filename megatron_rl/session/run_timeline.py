"""Records when each role of a run generates, scores, trains and syncs, in timeline.jsonl of the run directory."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.messages.commands import Command, ranges
from megatron_rl.run import json_lines
from megatron_rl.run.work_intervals import GENERATING, SAVING, SCORING, SYNCING, TRAINING, Interval
from megatron_rl.training.iteration import Iteration

PHASE_OF = {  # by the first part of a command's name, such as generate/solver
    "generate": GENERATING, "score": SCORING, "score_top": SCORING, "train": TRAINING, "refit": SYNCING,
    "save": SAVING, "written": SAVING, "keep_best": SAVING,
}  # fmt: skip
FINEST = 200  # intervals of one phase are merged if the gap between them is below 1/FINEST of the line's time


class Timeline:
    """Records the time of each role on the driver (rank 0), and writes one line for each iteration. Thread-safe.

    A line has the intervals that ended since the last line, and for each set of ranks the seconds in which a rank of
    it ran commands (the mean over its ranks). What happens before the first iteration is not recorded. Methods
    take times of time.monotonic(); in the file, times count from the begin of the first iteration.
    """

    def __init__(self, path: Path, ranks: Mapping[str, Sequence[int]], owner_of: Mapping[str, str]) -> None:
        """`ranks`: {role: its ranks} of the roles that have a model on ranks. `owner_of`: {role: the role whose policy
        it uses}, under whose name the work of the role is recorded."""
        self._path, self._owner_of = path, owner_of
        self._ranks = {role: held for role, held in ranks.items() if owner_of.get(role, role) == role}
        self._lock = threading.Lock()
        self._start: float | None = None  # when the first iteration began
        self._written = 0.0  # when the last line was written
        self._busy = defaultdict[int, float](float)  # {rank: seconds since the last line}
        self._intervals = list[Interval]()
        self._trained = dict[str, int]()  # {role: iteration of its last update}

    def ran(self, command: Command) -> None:
        """Records a command that all its ranks have answered. See Commands.completed."""
        kind, _, name = command.name.partition("/")
        role, phase, began = command.about or name, PHASE_OF.get(kind), command.began
        with self._lock:
            if self._start is None and kind == "begin":
                self._start = self._written = began
            if self._start is None:
                return
            busy, turns = self._busy, command.begun
            for rank, ended in command.ended.items():
                turn = turns[rank] if turns[rank] > began else began  # no `max`: there may be thousands of ranks
                if ended > turn:
                    busy[rank] += ended - turn
            if phase is None:
                return
            iteration = command.iteration
            if phase == TRAINING:
                self._trained[role] = iteration
            elif phase == SYNCING:
                iteration = self._trained.get(role, iteration)
            role = self._owner_of.get(role, role)
            self._intervals.append(Interval(iteration, role, phase, began, max(command.ended.values())))

    def generated(self, iteration: int, role: str, began: float, ended: float) -> None:
        """Records a generation by servers or by an endpoint."""
        with self._lock:
            self._intervals.append(Interval(iteration, self._owner_of.get(role, role), GENERATING, began, ended))

    def write(self, iteration: Iteration) -> None:
        """Writes the line of an iteration that is complete. Raises json_lines.DiskError if it cannot be written."""
        with self._lock:
            start, began, now = self._start or 0.0, self._written, time.monotonic()
            intervals, self._intervals, busy_s = self._intervals, [], dict(self._busy)
            self._busy.clear()
            self._written = now
        sets = dict[str, tuple[list[str], float]]()
        for role, ranks in self._ranks.items():
            seconds = sum(busy_s.get(rank, 0.0) for rank in ranks) / len(ranks)
            sets.setdefault(ranges(ranks), ([], seconds))[0].append(role)
        line = {
            "iteration": iteration.number, "began": round(began - start, 3), "ended": round(now - start, 3),
            "sets": [{"ranks": ranks, "roles": roles, "busy": round(s, 3)} for ranks, (roles, s) in sets.items()],
            "intervals": [
                [*named, round(max(0.0, first - start), 3), round(last - start, 3)]
                for *named, first, last in merged(intervals, (now - began) / FINEST) if last > start
            ],
        }  # fmt: skip
        json_lines.append(self._path, json.dumps(line, separators=(",", ":")).encode())


def merged(intervals: Sequence[Interval], gap_s: float) -> list[Interval]:
    """Returns intervals in which those of the same iteration, role and phase are merged if at most `gap_s` seconds are
    between them. They are sorted by iteration, role, phase and begin."""
    result = list[Interval]()
    for interval in sorted(intervals):
        last = result[-1] if result else None
        if last is not None and last[:3] == interval[:3] and interval.began <= last.ended + gap_s:
            result[-1] = last._replace(ended=max(last.ended, interval.ended))
        else:
            result.append(interval)
    return result
