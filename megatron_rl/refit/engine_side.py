"""The engine's side of a refit (weight sync): receives weights, and serves only versions that the trainer committed."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Protocol

import torch

from megatron_rl.refit.exchange import Exchange, ExchangeOutcome, LocalSide
from megatron_rl.refit.refit_store import MessageError, RefitStore
from megatron_rl.refit.store_messages import Go, Ready, Setup, Verdict, Vote
from megatron_rl.refit.transport import Deadline, Parameters, RefitError, TransportError
from megatron_rl.refit.transport_choice import RankLocation, RankLocations, Wiring

SETUP_TIMEOUT_S = 60
LISTEN_S = 1.0  # seconds for which a thread waits for the next refit before it checks whether it was closed
_log = logging.getLogger(__name__)


class Endpoint(Protocol):
    """The interface of an engine whose weights are updated by refits (weight syncs from the trainer)."""

    @property
    def targets(self) -> Parameters:
        """Returns the engine's parameters, which the refit overwrites."""
        ...

    def begin_refit(self) -> None:
        """Prepares the engine for a refit that overwrites `targets`. If the engine generates with the memory of
        `targets`, it stops serving until `commit_refit` is called, because the weights may be a mixture of two versions
        until then.
        """
        ...

    def commit_refit(self, version: int) -> None:
        """Makes the engine serve the weights in `targets`, all of which now have the weight version `version`."""
        ...


class EngineSide:
    """One rank of an engine that runs in a separate process from the trainer.

    Engine ranks are numbered over all replicas. The engine rank registers on the trainer's key-value store, and
    registers again after a failed refit (weight sync). The refit after a failed refit sends all weights to the rank,
    instead of the difference from the last version.
    """

    def __init__(self, store: RefitStore, rank: int, endpoint: Endpoint, device: torch.device) -> None:
        """Registers engine rank `rank` on the trainer's key-value store.

        Raises TransportError when the trainer does not answer, and ValueError when the trainer does not expect `rank`.
        """
        setup = store.get("setup", Setup, SETUP_TIMEOUT_S)
        self.topology, self._settings = setup.topology, setup.settings
        if not 0 <= rank < self.topology.engines.world:
            raise ValueError(f"engine rank {rank}: the trainer expects {self.topology.engines.world} engine ranks")
        self._store, self._rank, self._endpoint, self._device = store, rank, endpoint, device
        self.version: int | None = None  # version of the weights in endpoint.targets; None if they are incomplete
        self._closed = False
        self._location, self._pulses = RankLocation.new(device), 0
        self._epoch = -1
        self._wiring: Wiring | None = None
        self._exchange: Exchange | None = None
        self._join()

    def take_part(self, idle_s: float) -> int | None:
        """Waits up to `idle_s` seconds for a refit (weight sync) and takes part in it. Returns the weight version that
        the engine now serves.

        Returns None if no refit began in that time, or if the refit failed or did not include this engine. After a
        failed refit the engine holds no valid weight version. Raises TransportError when the trainer is gone.
        """
        _, version = self._receive(idle_s)
        if version is not None:
            self._endpoint.commit_refit(version)
        return version

    def _receive(self, idle_s: float) -> tuple[bool, int | None]:
        """Waits for a refit and takes part in it like `take_part`, but does not make the engine serve the received
        weights. Returns (whether the refit included this engine, the committed weight version or None).
        """
        # If the registration is missing or has another value, the trainer has dropped this process as late or lost.
        if self._store.peek(f"hello/{self._rank}", str) != self._incarnation:
            self._leave()
            self._join()
        number = self._store.get("next", int, SETUP_TIMEOUT_S)
        if not self._store.has(f"{number}/ticket", idle_s):
            return False, None
        self._store.put(f"{number}/ready/{self._rank}", Ready(version=self.version, location=self._location))
        go = self._await_go(number)
        # If `go` lists another location, it means an earlier process of this engine rank, which died during this refit.
        if go is None or go.engines.get(self._rank) != self._location:
            self._await_key(number, "verdict")
            return False, None
        vote = self._vote(go, self._patient_deadline(number))
        self._store.put(f"{number}/vote/{self._rank}", vote)
        self._await_key(number, "verdict")
        verdict = self._store.peek(f"{number}/verdict", Verdict)
        if verdict is not None and self._rank in verdict.committed:
            self.version = go.order.version
            return True, self.version
        _log.warning(
            "refit to version %s was not committed here: %s", go.order.version, vote.error or "another rank failed"
        )
        self._leave()
        self._join()
        return True, None

    def close(self) -> None:
        """Closes the connections to the trainer."""
        self._closed = True
        self._leave()

    def _vote(self, go: Go, deadline: Deadline) -> Vote:
        """Receives the weights of a refit. Returns this engine rank's vote, which tells the trainer whether the weights
        arrived.
        """
        outcome = ExchangeOutcome()
        try:
            if go.epoch != self._epoch:
                self._connect(go)
                assert self._exchange is not None
                self._exchange.probe(deadline, outcome)
            assert self._exchange is not None
            self._endpoint.begin_refit()
            self.version = None
            self._exchange.run(go.order, deadline, outcome)
            outcome.error = next(iter(outcome.lost_sources.values()), None)
        except (RefitError, OSError) as failure:
            outcome.error = str(failure)
        return outcome

    def _connect(self, go: Go) -> None:
        """Creates the refit plan and the transports between the trainer ranks and the engine ranks that take part in
        this refit.
        """
        self._leave()
        locations = RankLocations(go.trainer, go.engines)
        self._wiring = Wiring(self._store.under(f"epoch{go.epoch}"), locations, self._location, self._settings)
        side = LocalSide(
            destination=self._rank, targets=self.topology.carried(self._endpoint.targets), device=self._device
        )
        plan = self.topology.plan(locations, self._settings.bucket_mib)
        self._exchange = Exchange(plan, side, self._wiring.route, dtype=self.topology.torch_dtype)
        self._epoch = go.epoch

    def _await_go(self, number: int) -> Go | None:
        """Waits until the refit with index `number` begins, and returns its message. Returns None if the refit ends
        without the message, or if the message is not valid.
        """
        self._await_key(number, "go")
        try:
            go = self._store.peek(f"{number}/go", Go)
            if go is not None and not go.fits(self.topology):
                raise MessageError("it names ranks that do not exist")
            return go
        except MessageError as error:
            _log.warning("refit %s is left out: %s", number, error)
            return None

    def _await_key(self, number: int, what: str) -> None:
        """Waits until the trainer has stored `what` (such as "verdict") of the refit with index `number` on the
        key-value store, or until the refit ends without it."""
        self._patient_deadline(number).until(lambda seconds: self._store.has(f"{number}/{what}", seconds))

    def _patient_deadline(self, number: int) -> Deadline:
        """Returns a deadline, `timeout_s` from now, for this engine rank's waits in the refit with index `number`.

        One message may take all of this time, because the trainer may wait for a lost engine before it answers this
        engine. A wait with this deadline repeatedly increments the rank's counter on the store, which shows that the
        rank is alive, and the wait ends early if the refit is over.
        """

        def over() -> bool:
            self._pulses += 1
            self._store.put(f"pulse/{self._rank}", self._pulses)
            ended = self._store.has(f"{number}/verdict", 0) or self._store.peek("next", int) != number
            return ended or self._closed

        return Deadline.start(self._settings.timeout_s, self._settings.timeout_s, over)

    def _join(self) -> None:
        """Registers this engine rank on the trainer's store under a new random id, so that the trainer includes the
        rank in refits.
        """
        self._incarnation = uuid.uuid4().hex
        self._store.put(f"hello/{self._rank}", self._incarnation)

    def _leave(self) -> None:
        """Closes the transports. The next refit opens new ones."""
        if self._wiring is not None:
            self._wiring.close()
        self._wiring, self._exchange, self._epoch = None, None, -1


class StagedEngineSide(EngineSide):
    """An engine rank that receives weights in staging memory: a thread takes part in every refit while the engine
    generates with its present weights.

    `take_part` replaces the present weights with the received weights. Until then, the engine serves the present
    weights, even if the refit fails or the trainer dies. The trainer begins the next refit only after every engine has
    replaced its weights.
    """

    def __init__(self, store: RefitStore, rank: int, endpoint: Endpoint, device: torch.device) -> None:
        super().__init__(store, rank, endpoint, device)
        self._change = threading.Condition()
        # Has at most one element: the result of the last refit, until `take_part` returns this result.
        # The result is the weight version that is complete in staging memory, or None if the refit failed on this rank.
        self._results: list[int | None] = []
        self._listened = False  # whether the thread has ended without an unexpected exception
        self._thread = threading.Thread(target=self._listen, name="refits", daemon=True)

    def _vote(self, go: Go, deadline: Deadline) -> Vote:
        with self._change:
            self._results = []  # an old result is invalid, because staging memory is about to be overwritten
        return super()._vote(go, deadline)

    def start(self) -> None:
        """Starts the thread that takes part in refits."""
        self._thread.start()

    def take_part(self, idle_s: float) -> int | None:
        """Waits up to `idle_s` seconds for the end of a refit whose result was not returned yet, and serves the
        received weights. Returns their version, or None if no refit ended or the refit failed on this rank. Raises
        RefitError if the thread ended by an unexpected exception.
        """
        with self._change:
            self._change.wait_for(lambda: self._results or not self._thread.is_alive(), idle_s)
            version = self._results.pop() if self._results else None
            if not (self._thread.is_alive() or self._listened or self._thread.ident is None):
                raise RefitError("the thread that receives refits has failed: see its traceback in the log")
        if version is not None:
            self._endpoint.commit_refit(version)
            if self._device.type == "cuda":  # the next refit may overwrite staging memory once `take_part` returns
                torch.cuda.current_stream(self._device).synchronize()
        return version

    def close(self) -> None:
        """Ends the thread, and closes the connections to the trainer."""
        self._closed = True
        if self._thread.is_alive():
            self._thread.join()
        super().close()

    @torch.inference_mode()  # tensors allocated in inference mode cannot be modified outside inference mode
    def _listen(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # needed because each thread has a separate current device in torch
        try:
            while not self._closed:
                try:
                    took_part, version = self._receive(LISTEN_S)
                except MessageError as error:
                    _log.warning("a refit is left out: %s", error)
                    time.sleep(LISTEN_S)
                    continue
                if took_part:
                    with self._change:
                        self._results = [version]
                        self._change.notify_all()
        except TransportError as error:
            _log.warning("no more refits are received: %s", error)
        self._listened = True
