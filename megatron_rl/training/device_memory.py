"""Says who has the memory of the trainer's devices: the policy that trains, weights that travel to engines, or, where
these stand in the trainer's devices, the engines while they generate.

With engines elsewhere policies have it always, and those that are set to sleep leave it between their iterations. With
engines in the trainer's devices the order is

    generate    policies are away with all they have; engines are awake
    train       engines sleep; one policy is there with weights, gradients and optimizer
    refit       its gradients and optimizer are away; its engine takes its weights back, and no cache yet
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from megatron_rl.training.update import Trainee


class ColocatedEngines(Protocol):
    """The engines that stand in the trainer's devices. Both verbs are collective, and may follow each other in any
    order."""

    def sleep(self, refitted: Collection[str]) -> None:
        """Has no engine hold memory on return. `refitted`: the policies whose weights a refit brings before their
        engines are woken, so that these need not keep them.

        Raises EngineError where an engine may still hold some.
        """
        ...

    def wake(self) -> None:
        """Has all engines answer again, after those that missed a refit have taken the weights."""
        ...


class DeviceMemory:
    """The memory of the trainer's devices over a run. Every verb is collective, and the same on every rank.

    `engines`: None where no engine stands in the trainer's devices; all but the sleep of policies does nothing then.
    """

    def __init__(self, trainees: Mapping[str, Trainee], engines: ColocatedEngines | None = None) -> None:
        self.trainees, self._engines = trainees, engines
        self._generating = engines is not None  # engines are awake when they have been started
        self._refitted: set[str] = set()  # policies whose engines have their newest weights since these slept
        self._weights_there = False  # of an engine that took its weights and was not put to sleep again

    def start(self) -> None:
        """Has policies leave that sleep between their iterations."""
        for trainee in self.trainees.values():
            if self._engines is not None:
                trainee.policy.memory.sleep(weights=True)
            elif trainee.sleeps:
                trainee.policy.memory.sleep()

    def generate(self) -> None:
        """Gives the devices to the engines: they may be asked from here on."""
        if self._engines is None or self._generating:
            return
        for trainee in self.trainees.values():
            trainee.policy.memory.sleep(weights=True)
        self._engines.wake()
        self._generating, self._weights_there = True, False
        self._refitted.clear()

    def clear(self, refitted: Collection[str] = ()) -> None:
        """Takes the devices from the engines: weights may come. `refitted`: as of ColocatedEngines.sleep."""
        if self._engines is not None and (self._generating or self._weights_there):
            self._engines.sleep([name for name in refitted if name not in self._refitted])
            self._generating = self._weights_there = False

    @contextlib.contextmanager
    def train(self, name: str, refitted: Collection[str]) -> Iterator[None]:
        """Has a policy there with all that an update needs. `refitted`: all policies that get an update now, before
        anything is generated again."""
        trainee = self.trainees[name]
        self.clear(refitted)
        if self._engines is not None or trainee.sleeps:
            trainee.policy.memory.wake()
        yield
        if self._engines is not None or trainee.sleeps:
            trainee.policy.memory.sleep()

    @contextlib.contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Has a policy's weights there, beside engines that sleep: for a checkpoint, log-probs, a refit."""
        if self._engines is None:
            yield
            return
        self.clear()
        with self.trainees[name].policy.memory.present():
            yield
        self.trainees[name].policy.memory.sleep(weights=True)

    @contextlib.contextmanager
    def refit(self, name: str) -> Iterator[None]:
        """Has a policy's weights there while its engine takes them. What engines took stays on the device, beside
        further refits, until a policy trains or something else than a refit needs it."""
        if self._engines is None:
            yield
            return
        if self._generating:
            self.clear()
        policy = self.trainees[name].policy
        with policy.memory.present():
            yield
        policy.memory.sleep(weights=True)
        self._refitted.add(name)
        self._weights_there = True
