"""The engine's side of a refit: takes part when the trainer calls, and serves only at a version that the trainer committed."""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import asdict
from typing import Any, Protocol

import torch

from megatron_rl.config import Refit
from megatron_rl.refit.base import Deadline, Parameters, RefitError, TransportError
from megatron_rl.refit.board import Board
from megatron_rl.refit.exchange import End, Exchange, Order, Outcome
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.wiring import Seat, Seating, Wiring

SETUP_TIMEOUT_S = 60
_log = logging.getLogger(__name__)


class Endpoint(Protocol):
    """What an engine gives a refit."""

    @property
    def targets(self) -> Parameters: ...

    def begin_refit(self) -> None:
        """From here on weights are mixed: the engine serves nothing until `commit_refit`."""
        ...

    def commit_refit(self, version: int) -> None:
        """The weights are whole and of this version."""
        ...


class EngineSide:
    """One rank of an engine that runs in a process of its own. Joins a trainer's board under its rank (over all replicas).

    After an error it joins anew: the trainer then counts it as one that has to take all weights.
    """

    def __init__(self, board: Board, rank: int, endpoint: Endpoint, device: torch.device) -> None:
        """Raises TransportError when the trainer does not answer."""
        setup = board.get("setup", SETUP_TIMEOUT_S)
        self.topology, self._settings = Topology.from_json(setup["topology"]), Refit(**setup["settings"])
        if not 0 <= rank < self.topology.engines.world:
            raise ValueError(f"engine rank {rank}: the trainer expects {self.topology.engines.world} engine ranks")
        self._board, self._rank, self._endpoint, self._device = board, rank, endpoint, device
        self.version: int | None = None
        self._seat = Seat.here(device)
        self._epoch = -1
        self._wiring: Wiring | None = None
        self._exchange: Exchange | None = None
        self._join()

    def take_part(self, idle_s: float) -> int | None:
        """Waits for a refit and takes part in it -> the version committed; None when none came in `idle_s`, or it was not for this
        engine, or failed (the engine then holds no version). Raises TransportError when the trainer is gone."""
        number = self._board.get("next", SETUP_TIMEOUT_S)
        try:
            self._board.get(f"{number}/ticket", idle_s)
        except TransportError:
            self._board.peek("next")  # raises when there is no trainer
            return None
        self._board.put(f"{number}/ready/{self._rank}", {"version": self.version, "seat": self._seat, "incarnation": self._incarnation})
        go = self._board.get(f"{number}/go", self._settings.timeout_s)
        if str(self._rank) not in go["engines"]:
            self._await_end(number)
            return None
        # The trainer may be waiting for an engine that is lost: this one is patient, and goes when there is a verdict.
        timeout = self._settings.timeout_s
        deadline = Deadline.start(timeout, timeout, lambda: self._board.peek(f"{number}/verdict") is not None)
        vote = self._vote(go, deadline)
        self._board.put(f"{number}/vote/{self._rank}", vote)
        verdict = self._board.get(f"{number}/verdict", self._settings.timeout_s)
        if self._rank in verdict["committed"]:
            version: int = go["order"]["version"]
            self.version = version
            self._endpoint.commit_refit(version)
            return version
        _log.warning("refit to version %s was not committed here: %s", go["order"]["version"], vote["error"] or "another rank failed")
        self._leave()
        self._join()
        return None

    def close(self) -> None:
        self._leave()

    def _vote(self, go: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Moves the weights -> what the trainer is told."""
        outcome, error, probe = Outcome(), None, (0, 0.0)
        try:
            if go["epoch"] != self._epoch:
                probe = self._arrange(go, deadline)
            assert self._exchange is not None
            self._endpoint.begin_refit()
            self.version = None
            outcome = self._exchange.run(order_from(go["order"]), deadline)
            error = next(iter(outcome.lost_sources.values()), None)
        except (RefitError, OSError) as failure:
            error = str(failure)
        return {"error": error, "outcome": asdict(outcome), "probe": probe}

    def _arrange(self, go: dict[str, Any], deadline: Deadline) -> tuple[int, float]:
        self._leave()
        seats = {int(rank): Seat(*seat) for rank, seat in go["engines"].items()}
        seating = Seating([Seat(*seat) for seat in go["trainer"]], seats)
        self._wiring = Wiring(self._board.under(f"epoch{go['epoch']}"), seating, self._seat, self._settings)
        end = End(destination=self._rank, targets=self._endpoint.targets, device=self._device)
        plan = self.topology.plan(seating, self._settings.bucket_mib)
        self._exchange = Exchange(plan, end, self._wiring.route, dtype=self.topology.torch_dtype)
        self._epoch = go["epoch"]
        return self._exchange.probe(deadline)

    def _await_end(self, number: int) -> None:
        """A refit without this engine: comes back in time for the next."""
        with contextlib.suppress(TransportError):
            self._board.get(f"{number}/verdict", self._settings.timeout_s)

    def _join(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._board.put(f"hello/{self._rank}", self._incarnation)

    def _leave(self) -> None:
        if self._wiring is not None:
            self._wiring.close()
        self._wiring, self._exchange, self._epoch = None, None, -1


def order_from(value: dict[str, Any]) -> Order:
    """An Order out of JSON, whose keys are text."""
    return Order(version=value["version"], verify=value["verify"], base={int(rank): version for rank, version in value["base"].items()})
