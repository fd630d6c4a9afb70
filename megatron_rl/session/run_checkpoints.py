"""The checkpoints of a training run, and the exported models of its best evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_rl.config.evaluation import Best
from megatron_rl.run.checkpoint import STATE, write_json
from megatron_rl.session import evaluations
from megatron_rl.session.run_setup import Driver
from megatron_rl.session.saving import PolicyFiles, refusing
from megatron_rl.training.rank_fleet import RankFleet

ANSWER_S = 0.2  # seconds in which ranks that do not train answer whether they have written their files


class RunCheckpoints:
    """Implements training.fleet.Checkpoints. Every rank has an instance, and the driver calls the methods.

    A checkpoint is one command to the ranks of each policy, which has a place in the order of their commands: other
    policies go on meanwhile. The first checkpoint is always written in the foreground, because its duration is
    measured. From the duration the run decides how long before the time limit of a Slurm job it exits.
    """

    def __init__(
        self, fleet: RankFleet, files: Mapping[str, PolicyFiles], policies: Sequence[str], driver: Driver,
        best: Best | None, export: Callable[[Path], None], *, background: bool,
    ) -> None:  # fmt: skip
        """`files`: the trained policies of this rank. `policies`: names of all trained policies. `best`: the setting
        evaluation.best. `export`: collective function that writes the models into a directory. `background`: whether
        training continues while files are written."""
        self._fleet, self._policies, self._driver, self._background = fleet, policies, driver, background
        self._best, self._export = best, export
        self._due: int | None = None  # number of the checkpoint that has begun and is not committed yet; None: no such
        self._state: Mapping[str, Any] | None = None  # of this checkpoint, once `save` has given it
        # answers of the policies' ranks: seconds of `save` (None: files are written in the background), then whether
        # these files are written
        self._saves, self._written = dict[str, Future[Any]](), dict[str, Future[Any]]()
        self._measured = False
        self._seconds = 0.0  # sum of the seconds that the policies of the first checkpoint took
        fleet.serve("save", lambda policy, number, behind, _: files[policy].save(number, background=behind))
        fleet.serve("written", lambda policy, waits, _: files[policy].written(wait=waits))
        fleet.serve("keep_best", self._keep_best)

    def begin(self, number: int) -> None:
        self.settle(wait=True)
        assert self._due is None, "the loop calls save for a checkpoint before it begins the next one"
        self._fleet.engines.clear()
        with refusing(self._driver.checkpoints, number):
            pending = self._driver.checkpoints.begin(number)
            for policy in self._policies:
                (pending / policy).mkdir()
        self._due, behind = number, self._background and self._measured
        self._saves = {policy: self._fleet.call("save", policy, number, behind, bulk=None) for policy in self._policies}

    def save(self, number: int, state: Mapping[str, Any]) -> int | None:
        if self._due != number:
            self.begin(number)
        self._state = state
        return self.settle(wait=not (self._background and self._measured))

    def settle(self, *, wait: bool) -> int | None:
        if self._due is None or self._state is None or not self._are_written(wait=wait):
            return None
        number, checkpoints, start = self._due, self._driver.checkpoints, time.monotonic()
        with refusing(checkpoints, number):
            write_json(checkpoints.pending(number) / STATE, self._state)
            checkpoints.commit(number)
        self._due = self._state = None
        if not self._measured:  # the sum, because ranks that hold several policies save one after the other
            self._driver.leave.saved(self._seconds + time.monotonic() - start)
            self._measured = True
        return number

    def _are_written(self, *, wait: bool) -> bool:
        """Returns whether the files of all policies are written. With `wait`, waits for them."""
        if not _answered(self._saves.values(), wait=wait):
            return False
        seconds = [answer.result() for answer in self._saves.values()]
        if None not in seconds:
            self._seconds = sum(seconds)
            return True
        for waits in (False, True) if wait else (False,):
            if not self._written:
                self._written = {p: self._fleet.call("written", p, waits, bulk=None) for p in self._policies}
            if not _answered(self._written.values(), wait=wait):
                return False
            written, self._written = all(answer.result() for answer in self._written.values()), {}
            if written:
                return True
        return False

    def keep_best(self, number: int, best: Sequence[tuple[int, float]]) -> None:
        assert self._best is not None, "the loop calls keep_best only if evaluation.best is set"
        self._driver.checkpoints.protected |= {iterations for iterations, _ in best}
        self._fleet.engines.clear()
        self._fleet.everywhere("keep_best", number, best)
        self._driver.summary({"best": evaluations.best_record(self._driver.directory, self._best.metric, best)})

    def remove_surpassed(self, best: Sequence[tuple[int, float]]) -> None:
        checkpoints = self._driver.checkpoints
        checkpoints.protected = frozenset(iterations for iterations, _ in best)
        evaluations.remove_surpassed(self._driver.directory, checkpoints, best)

    def _keep_best(self, number: int, best: Sequence[tuple[int, float]]) -> None:
        evaluations.keep_best(self._driver.directory, number, best, self._export)


def _answered(answers: Iterable[Future[Any]], *, wait: bool) -> bool:
    """Returns whether all commands have been answered. With `wait`, waits for the answers. Raises the first error."""
    found = futures.wait(answers, None if wait else ANSWER_S, return_when=futures.FIRST_EXCEPTION)
    for answer in found.done:
        answer.result()
    return not found.not_done
