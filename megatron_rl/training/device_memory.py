"""Manages which component uses the memory of the trainer's devices: the policy that trains, the weights that are sent
to engines, or engines on the same devices (colocated engines) while they generate.

If the engines run on other devices, the policies stay on the trainer's devices. Only policies that are configured to
sleep are moved to host memory between their iterations. If the engines share the trainer's devices, the phases are

    generate    policies are off-loaded completely; engines are awake
    train       engines sleep; one policy is on the device with weights, gradients and optimizer state
    refit       gradients and optimizer state are off-loaded; the engine loads the new weights, but has no KV cache yet
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from megatron_rl.training.update import PolicyMemory, Trainee


class ColocatedEngines(Protocol):
    """The engines that run on the trainer's devices. The driver calls `sleep` and `wake`, which need not alternate."""

    def sleep(self, refitted: Collection[str]) -> None:
        """Puts all engines to sleep: on return, no engine holds device memory.

        `refitted`: names of the policies whose new weights will be sent to their engines before the engines wake, so
            that the engines need not keep the old weights.

        Raises EngineError if an engine may still hold memory.
        """
        ...

    def wake(self) -> None:
        """Wakes all engines, so that they answer requests again. An engine that missed a weight sync (refit) loads the
        current weights first.
        """
        ...


class DeviceMemory:
    """The policies of a rank in the memory of the rank's device. Methods are called on every rank of the policy.

    `colocated`: whether engines run on the trainer's devices. If not, the only effect is that policies configured to
        sleep are off-loaded between their iterations.
    """

    def __init__(self, trainees: dict[str, Trainee], *, colocated: bool = False) -> None:
        self.trainees, self._colocated = trainees, colocated

    def start(self) -> None:
        """Moves policies to host memory at the start of the run: all policies if engines are colocated, otherwise those
        that are configured to sleep between their iterations.
        """
        for trainee in self.trainees.values():
            if self._colocated:
                trainee.policy.memory.sleep(weights=True)
            elif trainee.sleeps:
                trainee.policy.memory.sleep()

    def offload(self) -> None:
        """Moves all policies to host memory, so that engines can use the device."""
        for trainee in self.trainees.values():
            trainee.policy.memory.sleep(weights=True)

    @contextlib.contextmanager
    def train(self, name: str) -> Iterator[None]:
        """Context manager that keeps a policy on the device with its weights, gradients and optimizer state."""
        trainee = self.trainees[name]
        if self._colocated or trainee.sleeps:
            trainee.policy.memory.wake()
        yield
        if self._colocated or trainee.sleeps:
            trainee.policy.memory.sleep()

    @contextlib.contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Context manager for a block that needs a policy's weights on the device: a checkpoint, log-probs, or a weight
        sync. With colocated engines, moves the weights to the device before the block, and to host memory after it.
        Without colocated engines, does nothing, because the weights are always on the device.
        """
        if not self._colocated:
            yield
            return
        with leaving(self.trainees[name].policy.memory):
            yield


@contextlib.contextmanager
def leaving(memory: PolicyMemory) -> Iterator[None]:
    """Context manager that moves a policy's weights to the device before the block, and to host memory after it."""
    with memory.present():
        yield
    memory.sleep(weights=True)


class EngineTurns:
    """Decides on the driver when colocated engines sleep and wake.

    `engines`: the colocated engines; None if no engine runs on the trainer's devices, and then no method does anything.
    `offload`: moves the policies of all ranks to host memory (DeviceMemory.offload).
    """

    def __init__(self, engines: ColocatedEngines | None, offload: Callable[[], None]) -> None:
        self._engines, self._offload = engines, offload
        self._generating = engines is not None  # engines are awake after their start
        # names of the policies whose engines got the newest weights since the engines were put to sleep
        self._refitted: set[str] = set()
        # True while an engine that does not generate yet holds newly sent weights on the device
        self._weights_there = False

    def generate(self) -> None:
        """Gives the devices to the engines: off-loads all policies and wakes the engines. On return, the engines accept
        requests.
        """
        if self._engines is None or self._generating:
            return
        self._offload()
        self._engines.wake()
        self._generating, self._weights_there = True, False
        self._refitted.clear()

    def clear(self, refitted: Collection[str] = ()) -> None:
        """Puts the engines to sleep, so that weights can be loaded on the devices.

        `refitted`: names of the policies whose new weights will be sent to their engines before the engines wake.
        """
        if self._engines is not None and (self._generating or self._weights_there):
            self._engines.sleep([name for name in refitted if name not in self._refitted])
            self._generating = self._weights_there = False

    @contextlib.contextmanager
    def refit(self, name: str) -> Iterator[None]:
        """Context manager in which the engine of a policy loads new weights (weight sync). The engine's copy then stays
        on the device, also during further weight syncs, until `clear`.
        """
        if self._generating:
            self.clear()
        yield
        self._refitted.add(name)
        self._weights_there = True
