"""The trainer's side of a refit (weight sync to the engines), a transaction of four steps: roll call, transfer, vote,
verdict.

After a refit, each engine that took part holds either the complete new weight version or no valid version.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.schema import RefitConfig
from megatron_rl.devices.allocator import return_free_pages
from megatron_rl.messages.world import all_gather, broadcast
from megatron_rl.refit.checksums import place_for
from megatron_rl.refit.engine_side import Endpoint
from megatron_rl.refit.exchange import Exchange, ExchangeOutcome, LocalSide, RefitOrder
from megatron_rl.refit.refit_store import Address, MessageError, RefitStore
from megatron_rl.refit.store_messages import Go, Ready, Verdict, Vote
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.transport import Added, Deadline, Mismatch, RefitError, TransportError
from megatron_rl.refit.transport_choice import RankLocation, RankLocations, Wiring
from megatron_rl.refit.weight_limits import NonFiniteWeights, WeightLimits

ROLL_CALL_S = 10.0  # seconds after which an engine that does not answer is left out of the refit
REJOIN_S = 5.0  # longest wait in seconds for live engines to register again, after a refit that failed for all engines
VERDICTS = 16  # number of the latest refits whose results (verdicts) stay on the key-value store
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RollCall:
    """The engines that answered the trainer at the start of a refit and take part in it. The same on every trainer
    rank.
    """

    number: int  # index of the refit
    locations: dict[int, RankLocation]  # engine rank -> location
    versions: dict[
        int, int | None
    ]  # engine rank -> weight version that the rank holds; None if it holds no complete version
    lost: dict[int, str]  # engine rank that did not answer -> reason


@dataclass(frozen=True)
class _RefitReport:
    """The result of one refit (weight sync to the engines)."""

    committed: list[int]  # engine ranks that hold the new version
    failed: dict[int, str]  # replica index -> reason
    mismatch: str | None  # error message for the first parameter with a wrong checksum
    outcomes: list[ExchangeOutcome]  # outcome of each process


TRAVELLERS = (RankLocation, Address, ExchangeOutcome, _RollCall, _RefitReport)  # types sent between trainer ranks


class TrainerSide:
    """The trainer's side of refits, which send weights to the engines. Creating and calling an instance are collective
    over all trainer ranks, which are the ranks of the role: trainer rank 0 is the role's first rank.

    `endpoint` is an engine inside this process; its engine rank equals the trainer rank. If `endpoint` is None, the
    engines are separate processes, which connect to the key-value store at `address`.
    """

    def __init__(
        self,
        topology: Topology,
        settings: RefitConfig,
        parameters: Mapping[str, Tensor],
        *,
        group: Any,
        endpoint: Endpoint | None = None,
        host: str = "127.0.0.1",
        added: Added | None = None,
    ) -> None:
        """Opens the key-value store on trainer rank 0, and connects to it on the other ranks.

        `parameters`: the parameters of this rank, by names that contain global layer and expert indices.
        `group`: a gloo process group of all trainer ranks (`Groups.control`).
        `endpoint`: the engine inside this process, or None if the engines are separate processes.
        `host`: name or address of trainer rank 0's host, at which the other ranks and the engines reach the store. The
        default suffices if all of them run on one host.
        `added`: function that returns the values to add to the parameters that are sent, such as a LoRA delta.

        Raises ValueError when the group or the parameters do not match the topology.
        """
        self.topology, self._settings, self._group, self._endpoint = topology, settings, group, endpoint
        self._rank = dist.get_rank(group)
        if topology.trainer.world != dist.get_world_size(group):
            raise ValueError(
                f"{topology.trainer} has {topology.trainer.world} ranks, but the group has {dist.get_world_size(group)}"
            )
        topology.check_trainer(self._rank, parameters)
        self._sources = topology.sources(self._rank, parameters, added)
        self._limits = WeightLimits(topology, self._rank, parameters, added)
        self._saturated = 0  # largest number of saturated weights that was logged
        self._device = next(iter(parameters.values())).device
        self._trainer_locations: list[RankLocation] = self._gather(RankLocation.new(self._device))
        self._store, self.address = self._open_store(host)
        self._number, self._epoch = 0, 0
        self._awaited: set[int] = set()  # engine ranks of a failed refit, for which its retry waits
        self._locations: RankLocations | None = None
        self._wiring: Wiring | None = None
        self._exchange: Exchange | None = None
        self._versions: dict[int, int | None] = {}  # engine rank -> weight version, for engines inside the trainer
        self._probes: list[tuple[int, float]] = []
        self._copy_rate = _copy_rate(self._device)
        self._delta_pays = settings.delta

    def __call__(self, version: int, replicas: Collection[int] | None = None) -> dict[str, float]:
        """Sends the weights to the engines as weight version `version`. Returns metrics (refit/seconds,
        refit/gigabytes, ...), the same on every rank.

        `replicas`: indices of the engine replicas to refit. All of these replicas must have joined. If None, refits all
        replicas that have joined, and waits until at least one replica has joined.

        A replica that fails is left out, and rank 0 logs a warning. Raises RefitError on every rank when no engine
        received the new version, or when any engine inside the trainer failed. Raises Mismatch on every rank when an
        engine's values differ from the values that were sent. Raises NonFiniteWeights on every rank, before anything is
        sent, when weights are not finite.
        """
        start = time.perf_counter()
        saturated = self._check_weights(version)
        deadline = Deadline.start(self._settings.timeout_s, self._settings.message_timeout_s)
        report = self._transfer(self._roll_call(deadline, replicas), version, deadline)
        again = not report.committed and not report.mismatch and self._endpoint is None and replicas is None
        if again:  # retry, because an engine may have died after its answer and before its first message
            deadline = Deadline.start(self._settings.timeout_s, self._settings.message_timeout_s)
            report = self._transfer(self._roll_call(deadline, None), version, deadline)
        self._awaited = set()
        if report.mismatch:
            raise Mismatch(report.mismatch)
        if not report.committed or (self._endpoint is not None and report.failed):
            reasons = "; ".join(f"engine {replica}: {why}" for replica, why in report.failed.items())
            raise RefitError(f"version {version} of the weights did not reach the engines: {reasons}")
        for replica, why in report.failed.items() if self._rank == 0 else ():
            _log.warning("engine %s is left out: it did not come to version %s (%s)", replica, version, why)
        return self._figures(report, time.perf_counter() - start) | {"refit/saturated_weights": float(saturated)}

    def _check_weights(self, version: int) -> int:
        """Returns the number of weights of all ranks that the engines' format clips. Raises NonFiniteWeights on every
        rank if a rank has weights that are not finite."""
        checks: list[tuple[str | None, int]] = self._gather(tuple(self._limits.check()))
        for rank, (sentence, _) in enumerate(checks):
            if sentence is not None:
                raise NonFiniteWeights(
                    f"version {version} of the weights is not sent: {sentence} (trainer rank {rank}). Training has "
                    "diverged; resume from an earlier checkpoint with a lower optimizer.lr"
                )
        saturated, form = sum(count for _, count in checks), self.topology.engines.format
        if saturated > self._saturated and self._rank == 0 and form is not None:
            self._saturated = saturated
            _log.warning(
                "%d weights of version %d exceed %g, the largest value of engine.quantization = %r, and are clipped",
                saturated, version, form.limit, self.topology.engines.quantization,
            )  # fmt: skip
        return saturated

    def close(self) -> None:
        """Closes the connections to the engines."""
        self._disconnect()

    def _roll_call(self, deadline: Deadline, replicas: Collection[int] | None) -> _RollCall:
        """Returns the engines that take part in the refit. Engines inside the trainer process always take part."""
        self._number += 1
        if self._endpoint is not None:
            return _RollCall(self._number, dict(enumerate(self._trainer_locations)), self._versions, {})
        return self._on_first_rank(lambda: self._call_engines(deadline, replicas))

    def _call_engines(self, deadline: Deadline, replicas: Collection[int] | None) -> _RollCall:
        """Returns the registered engines that answer the trainer now. Called on rank 0.

        Waits until at least one replica has joined with all its ranks. When a failed refit is retried, also waits up to
        REJOIN_S seconds for all engines of the first try. Raises RefitError when no engine joins before the deadline.
        """
        tp, world = self.topology.engines.tp, self.topology.engines.world
        patience = time.monotonic() + REJOIN_S
        while True:
            hello = [
                r
                for r in range(world)
                if (replicas is None or r // tp in replicas) and self._store.has(f"hello/{r}", 0)
            ]
            complete = _complete_replicas(hello, tp)
            if complete and (self._awaited <= {*complete} or time.monotonic() > patience):
                break
            if deadline.wait_s() <= 0.01:
                where, waited = f"{self.address[0]}:{self.address[1]}", f"{self._settings.timeout_s:.0f} s"
                raise RefitError(f"no engine has joined the store at {where} in {waited}")
            time.sleep(0.05)
        self._store.put("next", self._number)
        self._store.put(f"{self._number}/ticket", True)
        call, end = _RollCall(self._number, {}, {}, {}), time.monotonic() + ROLL_CALL_S
        taken = {*self._trainer_locations}
        for rank in complete:
            try:
                ready = self._store.get(f"{self._number}/ready/{rank}", Ready, max(0.05, end - time.monotonic()))
                if ready.location in taken:
                    raise MessageError(f"another process is at its location {ready.location}")
            except TransportError as error:
                why = f"did not answer the roll call within {ROLL_CALL_S:.0f} s"
                why = f"answered the roll call wrongly: {error}" if isinstance(error, MessageError) else why
                call.lost[rank] = f"engine rank {rank} {why}"
                # An engine registers again when it finds that its registration is missing.
                self._store.remove(f"hello/{rank}")
                continue
            call.locations[rank], call.versions[rank] = ready.location, ready.version
            taken.add(ready.location)
        for rank in call.locations.keys() - _complete_replicas(call.locations, tp):
            del call.locations[rank]
        self._awaited = set(call.locations)
        return call

    def _transfer(self, call: _RollCall, version: int, deadline: Deadline) -> _RefitReport:
        """Transfers the weights to the engines that answered, collects their votes (whether the weights arrived), and
        stores the verdict (which engines hold the new version) on the key-value store.
        """
        fresh = self._locations is None or self._locations.engines != call.locations
        if fresh:
            self._disconnect()
            self._epoch += 1
        order = self._order(call, version, fresh=fresh)
        if self._rank == 0 and self._endpoint is None:
            go = Go(engines=call.locations, trainer=self._trainer_locations, epoch=self._epoch, order=order)
            self._store.put(f"{call.number}/go", go)
        outcome = ExchangeOutcome()
        if call.locations:
            try:
                if fresh:
                    self._connect(call)
                assert self._exchange is not None
                if fresh:
                    self._exchange.probe(deadline, outcome)
                if self._endpoint is not None:
                    self._endpoint.begin_refit()
                self._exchange.run(order, deadline, outcome)
            except TransportError as failure:
                outcome.error = str(failure)
        outcomes = self._gather(outcome)
        report = self._on_first_rank(lambda: self._judge(call, outcomes, deadline))
        if self._rank == 0 and self._endpoint is None:
            self._close_call(call, report)
        if fresh:
            self._probes = [outcome.probe for outcome in report.outcomes]
            return_free_pages()  # needed because malloc's heaps have grown if threads sent requests to a lost engine
        if self._endpoint is not None:
            self._versions = dict.fromkeys(report.committed, version)
            if self._rank in report.committed:
                self._endpoint.commit_refit(version)
        if report.failed or report.mismatch:
            self._disconnect()
        return report

    def _order(self, call: _RollCall, version: int, *, fresh: bool) -> RefitOrder:
        """Returns the settings of one refit. `fresh`: whether the transports are new, in which case no engine can
        receive only differences from the last version.
        """
        held = {r: v for r, v in call.versions.items() if v is not None and r in call.locations}
        base = held if self._delta_pays and not fresh else {}
        if self._wiring is not None and "nccl" in self._wiring.kinds:
            # No delta is sent over NCCL: NCCL needs message sizes in advance, and is too fast for deltas to save time.
            self._delta_pays = False
        return RefitOrder(
            version=version,
            verify=self._settings.verify,
            sums_on=place_for(self._device),
            base=base,
            keeps_sent=self._delta_pays,
        )

    def _connect(self, call: _RollCall) -> None:
        """Creates the refit plan and the transports for the engines that answered at the start of the refit."""
        locations = RankLocations(self._trainer_locations, call.locations)
        self._wiring = Wiring(
            self._store.under(f"epoch{self._epoch}"), locations, self._trainer_locations[self._rank], self._settings
        )
        plan = self.topology.plan(locations, self._settings.bucket_mib)
        side = LocalSide(
            source=self._rank,
            sources=self._sources,
            destination=None if self._endpoint is None else self._rank,
            targets=None if self._endpoint is None else self.topology.carried(self._endpoint.targets),
            device=self._device,
        )
        self._exchange = Exchange(plan, side, self._wiring.route, dtype=self.topology.torch_dtype, pulse=self._pulse)
        self._locations = locations

    def _pulse(self, rank: int) -> Any:
        """Returns a counter that engine rank `rank` increments while it waits for messages, or None without a valid
        counter."""
        with contextlib.suppress(MessageError):
            return self._store.peek(f"pulse/{rank}", int)

    def _judge(self, call: _RollCall, trainer: list[ExchangeOutcome], deadline: Deadline) -> _RefitReport:
        """Decides which engine replicas hold the new weight version, from the outcomes of all trainer ranks and the
        engines' votes. Called on rank 0.
        """
        wrong = dict(call.lost)
        for rank, outcome in enumerate(trainer):
            wrong |= {r: why for r, why in outcome.lost_destinations.items() if r not in wrong}
            if outcome.error is not None:
                wrong |= {r: f"trainer rank {rank}: {outcome.error}" for r in call.locations if r not in wrong}
            if self._endpoint is not None and outcome.lost_sources:
                wrong.setdefault(rank, next(iter(outcome.lost_sources.values())))
        outcomes = [*trainer]
        for rank in call.locations if self._endpoint is None else ():
            patient = replace(deadline, pulse=functools.partial(self._pulse, rank))
            if rank not in wrong and (
                late := patient.until(functools.partial(self._store.has, f"{call.number}/vote/{rank}"))
            ):
                wrong[rank] = f"engine rank {rank} did not say how it went: {late}"
            try:
                vote = self._store.peek(f"{call.number}/vote/{rank}", Vote)
            except MessageError as error:
                wrong.setdefault(rank, f"engine rank {rank} voted wrongly: {error}")
                continue
            outcomes += [] if vote is None else [vote]
            if vote is not None and vote.error:
                wrong.setdefault(rank, vote.error)
        tp = self.topology.engines.tp
        failed = {r // tp: wrong[r] for r in sorted(wrong, reverse=True)}
        mismatch = next((outcome.mismatch for outcome in outcomes if outcome.mismatch), None)
        committed = [] if mismatch else [r for r in call.locations if r // tp not in failed]
        for rank in call.locations if self._endpoint is None else ():
            if rank // tp in failed:
                self._store.remove(f"hello/{rank}")
        return _RefitReport(committed, failed, mismatch, outcomes)

    def _close_call(self, call: _RollCall, report: _RefitReport) -> None:
        """Stores the verdict (which engines hold the new version) on the key-value store, and removes the keys of
        earlier refits.

        The last VERDICTS verdicts stay on the store for engines that read them late. All other keys of older refits and
        of earlier sets of transports are removed, including keys that a suspended engine has written since.
        """
        # The verdict and the next refit's index are stored atomically, so that no engine repeats this refit.
        verdict = Verdict(committed=report.committed)
        self._store.put_together({"next": call.number + 1, f"{call.number}/verdict": verdict})
        last = (f"{call.number - 1}/{kind}" for kind in ("ready", "vote", "ticket", "go"))
        refits = (f"{number}/" for number in range(call.number - 2 * VERDICTS, call.number - VERDICTS + 1))
        location_prefixes = (f"epoch{epoch}/" for epoch in range(self._epoch - 2 * VERDICTS, self._epoch))
        self._store.clear([*last, *refits, *location_prefixes])

    def _figures(self, report: _RefitReport, seconds: float) -> dict[str, float]:
        """Returns the metrics of a refit (weight sync).

        The metric `floor_seconds` is the shortest time that the measured bandwidths allow.
        """
        floors = [0.0]
        outcomes = report.outcomes
        for outcome, (size, probed) in zip(outcomes, self._probes, strict=False):
            wire = (outcome.sent + outcome.received) * probed / size if size else 0.0
            floors.append(wire + outcome.local / self._copy_rate)
        sent, full = (sum(getattr(o, name) for o in outcomes) for name in ("sent", "full"))
        metrics = {
            "seconds": seconds,
            "gigabytes": sent / 1e9,
            "local_gigabytes": sum(o.local for o in outcomes) / 1e9,
            "floor_seconds": max(floors),
            "ratio_to_floor": seconds / max(*floors, 1e-9),
            "checked_slices": float(sum(o.checked for o in outcomes)),
            "failed_engines": float(len(report.failed)),
        }
        if self._settings.delta and full:
            metrics["share_of_full"] = sent / full
            self._weigh_delta(report)
        return {f"refit/{name}": value for name, value in metrics.items()}

    def _weigh_delta(self, report: _RefitReport) -> None:
        """Turns delta encoding off if encoding and applying deltas took longer than the sending time that they saved,
        as on a fast link.
        """
        for outcome, (size, seconds) in zip(report.outcomes, self._probes, strict=False):
            saved = (outcome.full - outcome.sent) * seconds / size if size else 0.0
            if self._delta_pays and outcome.full > outcome.sent and outcome.delta_seconds > saved:
                self._delta_pays = False
                if self._rank == 0:
                    _log.warning(
                        "refit.delta is off from now on: finding the changes took %.2f s, and saved %.2f s of sending",
                        outcome.delta_seconds,
                        saved,
                    )

    def _open_store(self, host: str) -> tuple[RefitStore, Address]:
        """Opens a key-value store on trainer rank 0 and connects the other ranks to it. Returns (client of the store,
        address of the store).
        """
        opened: list[RefitStore] = []

        def open_() -> Address:
            store, address = RefitStore.host(host)
            settings = {name: getattr(self._settings, name) for name in self._settings.__dataclass_fields__}
            store.put("setup", {"topology": self.topology.to_json(), "settings": settings})
            store.put("next", 1)
            opened.append(store)
            return address

        address = self._on_first_rank(open_)
        return opened[0] if opened else RefitStore.join(address), address

    def _disconnect(self) -> None:
        """Closes the transports. The next refit then creates a new plan and new transports."""
        if self._wiring is not None:
            self._wiring.close()
        self._locations, self._wiring, self._exchange = None, None, None

    def _gather(self, value: Any) -> list[Any]:
        """Gathers `value` from all trainer ranks. Returns the list of values, indexed by rank, on every rank."""
        return all_gather(value, self._group, travellers=TRAVELLERS)

    def _on_first_rank(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on trainer rank 0 only. Returns the function's result on every rank. If the function raises
        RefitError, raises this error on every rank.
        """
        result, failure = None, None
        if self._rank == 0:
            try:
                result = function()
            except RefitError as error:
                failure = type(error).__name__, str(error)
        result, failure = broadcast((result, failure), self._group, travellers=TRAVELLERS)
        if failure is not None:
            raise {kind.__name__: kind for kind in (TransportError, Mismatch)}.get(failure[0], RefitError)(failure[1])
        return result


def _complete_replicas(ranks: Collection[int], tp: int) -> list[int]:
    """Returns the engine ranks of complete replicas. A replica is complete if all its `tp` ranks are in `ranks`."""
    return [rank for rank in ranks if all(rank // tp * tp + place in ranks for place in range(tp))]


def _copy_rate(device: torch.device) -> float:
    """Measures the speed of a copy within `device`. Returns bytes per second."""
    source, target = (torch.ones(16 << 20, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    start = time.perf_counter()
    target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return len(source) / max(1e-9, time.perf_counter() - start)
