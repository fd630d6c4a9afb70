"""The messages that the trainer and its engines exchange on the refit store. Values are validated when they are read
(see RefitStore.peek)."""

from __future__ import annotations

from pydantic import NonNegativeInt

from megatron_rl.config.base import config
from megatron_rl.config.schema import RefitConfig
from megatron_rl.refit.exchange import ExchangeOutcome, RefitOrder
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.transport_choice import RankLocation

Vote = ExchangeOutcome  # an engine rank's result of a refit


@config
class Setup:
    """The trainer's first message to all engines. Its key is "setup"."""

    topology: Topology
    settings: RefitConfig


@config
class Ready:
    """An engine rank's answer to the trainer's roll call. Its key is "REFIT/ready/RANK"."""

    version: NonNegativeInt | None  # weight version that the engine rank holds; None if it holds no complete version
    location: RankLocation


@config
class Go:
    """The trainer's message that a refit begins. Its key is "REFIT/go"."""

    engines: dict[int, RankLocation]  # engine rank -> location, of the engine ranks that take part
    trainer: list[RankLocation]  # locations of all trainer ranks
    epoch: int  # number of the set of transports; new transports are opened when the number changes
    order: RefitOrder

    def fits(self, topology: Topology) -> bool:
        """Returns whether the ranks in this message are ranks of the topology."""
        ranks = {*self.engines, *self.order.base}
        return len(self.trainer) == topology.trainer.world and ranks <= {*range(topology.engines.world)}


@config
class Verdict:
    """The trainer's message that a refit has ended. Its key is "REFIT/verdict"."""

    committed: list[int]  # engine ranks that hold the new weight version
