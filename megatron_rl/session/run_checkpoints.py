"""The checkpoints of a training run, and the exported models of its best evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.evaluation import Best
from megatron_rl.session import evaluations
from megatron_rl.session.run_setup import Driver, Saver
from megatron_rl.training.rank_fleet import RankFleet


class RunCheckpoints:
    """Implements training.fleet.Checkpoints. Every rank has an instance, and the driver calls the methods."""

    def __init__(
        self, fleet: RankFleet, saver: Saver, driver: Driver, best: Best | None, export: Callable[[Path], None]
    ) -> None:
        """`best`: the setting evaluation.best. `export`: collective function that writes the models into a
        directory."""
        self._fleet, self._saver, self._driver = fleet, saver, driver
        self._best, self._export = best, export
        self._writing = False  # whether a checkpoint is being written in the background
        fleet.serve("save", saver.save)
        fleet.serve("settle", lambda wait: saver.settle(wait=wait))
        fleet.serve("keep_best", self._keep_best)

    def save(self, number: int, state: Mapping[str, Any]) -> int | None:
        self._fleet.engines.clear()
        complete = self._fleet.everywhere("save", number, bulk=[state])
        self._writing = complete is None
        return complete

    def settle(self, *, wait: bool) -> int | None:
        if not self._writing:  # the ranks are not asked, because they may be busy
            return None
        complete = self._fleet.everywhere("settle", wait)
        self._writing = complete is None
        return complete

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
