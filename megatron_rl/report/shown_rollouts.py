"""Picks rollouts of runs for a report: a small index by which a page filters them, and their texts in packed chunks."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_rl.report.curves import rounded_float
from megatron_rl.report.html_page import Block, as_json, shortened
from megatron_rl.report.run_record import RunRecord
from megatron_rl.rewards.verdicts import final_verdict

MAX_ROLLOUTS = 4000  # shown of all runs together, unless more are asked for
MAX_FILES = 400  # iterations read of all runs together, unless more rollouts are asked for
CHUNK = 64  # rollouts whose texts are packed together
MAX_CHARACTERS = 20_000  # longer texts are cut
MAX_PIECES = 400  # of a conversation
Row = Mapping[str, Any]  # of an iteration's file, as store.read_rows gives it


@dataclass(slots=True)
class Index:
    """The columns by which a page filters rollouts.

    role, agent: places in `roles` and `agents`; episode: the number of the episode on the page; outcome: 1 for a
    correct rollout, 0 for a wrong one; says: a verifier's final verdict on the solution, 2 where it is unreadable;
    truth: whether that solution is correct; length: tokens that models wrote; steps: number of reasoning steps. In
    these columns -1 stands for None.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    agents: dict[str, int] = field(default_factory=dict)
    episodes: dict[tuple[int, int, str], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns.get("run", ()))

    def add(self, run: int, row: Row, threshold: float) -> None:
        """Adds a rollout. threshold: as in `is_correct`."""
        says, truth = opinion(row, threshold)
        episode, agent = row["episode"], row["agent"]
        values = {
            "run": run,
            "iteration": row["iteration"],
            "role": self.roles.setdefault(row["role"], len(self.roles)),
            "agent": -1 if agent is None else self.agents.setdefault(agent, len(self.agents)),
            "episode": -1
            if episode is None
            else self.episodes.setdefault((run, row["iteration"], episode), len(self.episodes)),
            "reward": _finite(main_reward(row["rewards"])),
            "outcome": _flag(is_correct(row, threshold)),
            "says": says,
            "truth": _flag(truth),
            "length": row["num_tokens"] or 0,
            "steps": len(row["steps"] or ()),
            "advantage": _finite(row["advantage"]),
        }
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)

    def plain(self, runs: Sequence[str]) -> dict[str, Any]:
        """Returns the index as the page's scripts read it."""
        return {**self.columns, "roles": list(self.roles), "agents": list(self.agents), "runs": runs, "chunk": CHUNK}


@dataclass(slots=True)
class Picked:
    """The rollouts that a page shows, and what is known of problems that came up again."""

    index: Index = field(default_factory=Index)
    chunks: list[str] = field(default_factory=list)  # base64 of gzip of JSON: a list of CHUNK rollouts
    solved: dict[tuple[int, str, str], list[tuple[int, int, int]]] = field(default_factory=dict)
    """(run, role, question) -> (iteration, correct answers, answers), by iteration"""
    files: int = 0  # files there are
    read: int = 0  # files that were read
    seen: int = 0  # rollouts in these

    def note(self) -> str:
        """Returns a sentence about what part of the rollouts this is."""
        shown, of = len(self.index), f" of {self.seen:,}" if self.seen > len(self.index) else ""
        iterations = (
            f"all {self.files:,} iterations"
            if self.read == self.files
            else f"{self.read:,} of {self.files:,} iterations"
        )
        return f"{shown:,}{of} rollouts, from {iterations} that were kept"

    def blocks(self, runs: Sequence[str]) -> Iterator[Block]:
        """Yields the page's data; none without rollouts."""
        if len(self.index):
            yield Block("rollouts-data", as_json(self.index.plain(runs)))
        for number, chunk in enumerate(self.chunks):
            yield Block(f"texts-{number}", chunk)


def pick(records: Sequence[RunRecord], most: int = MAX_ROLLOUTS) -> Picked:
    """Reads rollouts of some iterations of each run, evenly over the run with both ends, and of each iteration whole
    groups."""
    picked, waiting = Picked(), list[dict[str, Any]]()
    for place, record in enumerate(records):
        files, threshold = record.iteration_files(), record.threshold()
        own = _evenly(files, max(2, max(MAX_FILES, most // 16) // len(records)))
        quota = max(1, most // (len(records) * max(1, len(own))))
        picked.files += len(files)
        for path in own:
            rows = [row for row in record.rollouts(path) if row["text"] is not None]
            picked.read += bool(rows)
            picked.seen += len(rows)
            for row in _groups(rows, quota):
                picked.index.add(place, row, threshold)
                _count(picked, place, row, threshold)
                waiting.append(texts(row))
                if len(waiting) == CHUNK:
                    picked.chunks.append(_packed(waiting))
                    waiting.clear()
    if waiting:
        picked.chunks.append(_packed(waiting))
    return picked


def is_correct(row: Row, threshold: float) -> bool | None:
    """Returns the `correct` column; where it is empty, whether the reward `outcome` (or the only one) is above
    threshold, the middle of the run's `reward.range`."""
    if row["correct"] is not None:
        return row["correct"]
    rewards = row["rewards"]
    value = rewards.get("outcome", next(iter(rewards.values())) if len(rewards) == 1 else None)
    return None if value is None else value > threshold


def opinion(row: Row, threshold: float) -> tuple[int, bool | None]:
    """Returns a verifier's final verdict on a solution (1, 0, 2 where it cannot be read, -1 without one), and whether
    the solution is correct. threshold: as in `is_correct`.

    A solution's row has its verification as `review`. A verification's own row has verdicts and no review; its
    `correct` is whether its verdict agrees with the truth.
    """
    if row["review"] is not None:
        verdict = final_verdict(row["review"])
        return 2 if verdict is None else int(verdict), is_correct(row, threshold)
    if row["verdicts"] is None or (verdict := final_verdict(row["text"])) is None:
        return (-1 if row["verdicts"] is None else 2), None
    agrees = row["correct"]
    return int(verdict), None if agrees is None else verdict == agrees


def main_reward(rewards: Mapping[str, float]) -> float | None:
    """Returns the reward `trained` or `outcome`; where there is neither, the first."""
    for name in ("trained", "outcome"):
        if name in rewards:
            return rewards[name]
    return next(iter(rewards.values()), None)


def texts(row: Row) -> dict[str, Any]:
    """Returns what the page shows of an opened rollout, without what is empty. Long texts are cut."""
    names = ("group", "question", "answer", "prompt", "stop", "version", "steps", "verdicts", "review", "episode")
    found = {name: row[name] for name in names} | {
        "text": None if row["pieces"] else row["text"],
        "rewards": {name: _finite(value) for name, value in row["rewards"].items()},
        "credit": [_finite(value) for value in row["step_advantages"] or ()],
        "pieces": [
            [piece["author"], piece["tokens"], _finite(piece["advantage"]), _cut(piece["text"])]
            for piece in (row["pieces"] or ())[:MAX_PIECES]
        ],
    }
    found["steps"] = [_cut(step) for step in found["steps"] or ()]
    return {name: _cut(value) for name, value in found.items() if value not in (None, [], {}, "")}


def _cut(value: Any) -> Any:
    return shortened(value, MAX_CHARACTERS) if isinstance(value, str) else value


def _packed(rows: Sequence[dict[str, Any]]) -> str:
    whole = json.dumps(rows, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(whole, 5, mtime=0)).decode()


def _evenly(files: Sequence[Path], count: int) -> list[Path]:
    """Returns some of the files, evenly from the first to the last."""
    if len(files) <= count:
        return list(files)
    return [files[round(i * (len(files) - 1) / (count - 1))] for i in range(count)]


def _groups(rows: Sequence[dict[str, Any]], quota: int) -> list[dict[str, Any]]:
    """Returns about as many rows as the quota says, of every role as many: whole groups while they fit, at least a part
    of one."""
    roles = {role: list(own) for role, own in groupby(sorted(rows, key=lambda row: row["role"]), lambda r: r["role"])}
    out: list[dict[str, Any]] = []
    for own in roles.values():
        share, taken = max(1, quota // len(roles)), list[dict[str, Any]]()
        for _, group in groupby(own, key=lambda row: row["group"]):
            members = list(group)
            if taken and len(taken) + len(members) > share:
                break
            taken += members[:share]
        out += taken
    return out


def _count(picked: Picked, run: int, row: Row, threshold: float) -> None:
    """Counts an answer to a problem, if it is known whether it is correct."""
    correct = is_correct(row, threshold)
    if correct is None or row["question"] is None or (row["verdicts"] is not None and row["review"] is None):
        return
    iterations = picked.solved.setdefault((run, row["role"], row["question"][:MAX_CHARACTERS]), [])
    if iterations and iterations[-1][0] == row["iteration"]:
        iteration, good, count = iterations.pop()
        iterations.append((iteration, good + correct, count + 1))
    else:
        iterations.append((row["iteration"], int(correct), 1))


def _flag(value: bool | None) -> int:
    return -1 if value is None else int(value)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else rounded_float(value)
