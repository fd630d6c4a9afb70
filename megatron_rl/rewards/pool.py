"""Runs a reward function in worker processes that are killed at a time-out and limited in memory; every failure is counted."""

from __future__ import annotations

import enum
import pickle
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config import Reward
from megatron_rl.rewards.worker import HEADER, write_frame

CHUNK = 16  # gradings a worker holds at once
START_TIMEOUT_S = 120.0  # importing the reward's module


class Outcome(enum.Enum):
    SCORE = "score"
    TIMEOUT = "timeout"
    ERROR = "error"


class RewardFailure(RuntimeError):
    """The reward cannot be used: it cannot be imported, or fails too often to learn from."""


@dataclass(frozen=True)
class Graded:
    """One result; `score` is 0.0 unless the outcome is SCORE."""

    outcome: Outcome
    score: float = 0.0
    detail: str = ""
    seconds: float = 0.0


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    ready: bool = False
    held: deque[int] = field(default_factory=deque)  # items sent and not answered, in order
    buffer: bytearray = field(default_factory=bytearray)
    since: float = 0.0  # when it began on what it does now

    @property
    def deadline_from(self) -> float | None:
        return self.since if self.held or not self.ready else None


class GradePool:
    """`with GradePool(config.reward) as pool: pool.grade(responses, payloads)`. Workers start at the first use."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._workers: list[_Worker] = []

    def __enter__(self) -> GradePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers."""
        for worker in self._workers:
            _kill(worker)
        self._workers = []

    def grade(self, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        """[B] responses and payloads -> [B] results, in order. Raises RewardFailure when the function cannot be imported."""
        items = [(response, dict(payload)) for response, payload in zip(responses, payloads, strict=True)]
        results: dict[int, Graded] = {}
        waiting = deque(range(len(items)))
        wanted = min(self.reward.workers, max(1, len(items)))
        while len(self._workers) < wanted:
            self._workers.append(self._start())
        while len(results) < len(items):
            for worker in self._workers:
                self._feed(worker, waiting, items)
            self._collect(results)
            self._replace_stuck(results, waiting)
        return [results[i] for i in range(len(items))]

    def _start(self) -> _Worker:
        command = [sys.executable, "-m", "megatron_rl.rewards.worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        write_frame(_in(process), (self.reward.target, self.reward.args, self.reward.memory_mib))
        return _Worker(process, since=time.monotonic())

    def _feed(self, worker: _Worker, waiting: deque[int], items: Sequence[tuple[str, dict[str, Any]]]) -> None:
        if not worker.ready or worker.held or not waiting:
            return
        share = min(CHUNK, -(-len(waiting) // len(self._workers)))
        worker.since = time.monotonic()
        try:
            for _ in range(share):
                write_frame(_in(worker.process), items[waiting[0]])
                worker.held.append(waiting.popleft())
        except BrokenPipeError:  # it died: _collect sees the end of its answers
            return

    def _collect(self, results: dict[int, Graded]) -> None:
        """Reads what has been answered; waits at most until the next deadline."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(_out(worker.process), selectors.EVENT_READ, worker)
            for key, _ in selector.select(timeout=self._patience()):
                worker = key.data
                data = _out(worker.process).read1(1 << 16)
                if not data:
                    worker.process.wait()
                worker.buffer += data
                for answer in _frames(worker.buffer):
                    self._answer(worker, answer, results)

    def _answer(self, worker: _Worker, answer: Any, results: dict[int, Graded]) -> None:
        worker.since = time.monotonic()
        if not worker.ready:
            if answer is not None:
                raise RewardFailure(f"reward.target {self.reward.target!r} cannot be used: {answer}; it has the form package.module:name")
            worker.ready = True
            return
        score, detail, seconds = answer
        outcome = Outcome.ERROR if score is None else Outcome.SCORE
        results[worker.held.popleft()] = Graded(outcome, score or 0.0, detail, seconds)

    def _patience(self) -> float:
        starts = [w.since + self._limit(w) for w in self._workers if w.deadline_from is not None]
        return max(0.0, min(starts) - time.monotonic()) if starts else 0.1

    def _limit(self, worker: _Worker) -> float:
        return self.reward.timeout_s if worker.ready else START_TIMEOUT_S

    def _replace_stuck(self, results: dict[int, Graded], waiting: deque[int]) -> None:
        """A worker past its deadline, or dead: its first item is at fault, the others go back to the front of the queue."""
        now = time.monotonic()
        for i, worker in enumerate(self._workers):
            died = worker.process.poll() is not None
            late = worker.deadline_from is not None and now > worker.since + self._limit(worker)
            if not died and not late:
                continue
            if not worker.ready:
                raise RewardFailure(f"a reward worker did not start: {self.reward.target!r} cannot be imported, or reward.memory_mib = "
                                    f"{self.reward.memory_mib} is too little for it")  # fmt: skip
            _kill(worker)
            if worker.held:
                fault = worker.held.popleft()
                status = worker.process.returncode
                results[fault] = (
                    Graded(Outcome.ERROR, detail=f"its worker died with status {status}")
                    if died
                    else Graded(Outcome.TIMEOUT, detail=f"no answer within {self.reward.timeout_s} s", seconds=now - worker.since)
                )
                waiting.extendleft(reversed(worker.held))
            self._workers[i] = self._start()


def check_failures(graded: Sequence[Graded], max_share: float) -> None:
    """Raises RewardFailure when more than `max_share` of the gradings timed out or raised: a run would learn from silent zeros."""
    failed = [g for g in graded if g.outcome is not Outcome.SCORE]
    if len(failed) <= max_share * len(graded):
        return
    late = sum(g.outcome is Outcome.TIMEOUT for g in failed)
    raise RewardFailure(
        f"{len(failed)} of {len(graded)} gradings failed ({late} time-outs, {len(failed) - late} errors), more than "
        f"reward.max_failure_share = {max_share}; the first: {failed[0].detail}. Mend the reward, or raise reward.timeout_s or the share"
    )


def _frames(buffer: bytearray) -> list[Any]:
    """Takes whole frames off the front of `buffer`."""
    out = []
    while len(buffer) >= HEADER.size:
        (size,) = HEADER.unpack_from(buffer)
        if len(buffer) < HEADER.size + size:
            break
        out.append(pickle.loads(bytes(buffer[HEADER.size : HEADER.size + size])))
        del buffer[: HEADER.size + size]
    return out


def _in(process: subprocess.Popen[bytes]) -> Any:
    return process.stdin


def _out(process: subprocess.Popen[bytes]) -> Any:
    return process.stdout


def _kill(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue
