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
from collections.abc import Collection, Iterator
from typing import Protocol

from megatron_rl.training.update import Trainee


class ColocatedEngines(Protocol):
    """The engines that run on the trainer's devices. Every rank calls `sleep` and `wake`, which need not alternate."""

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
    """The state of the memory of the trainer's devices. Every method is collective and is called with the same
    arguments on every rank.

    `engines`: the colocated engines; None if no engine runs on the trainer's devices. With None, the only effect is
        that policies configured to sleep are off-loaded between their iterations.
    """

    def __init__(self, trainees: dict[str, Trainee], engines: ColocatedEngines | None = None) -> None:
        self.trainees, self._engines = trainees, engines
        self._generating = engines is not None  # engines are awake after their start
        # names of the policies whose engines got the newest weights since the engines were put to sleep
        self._refitted: set[str] = set()
        # True while an engine that does not generate yet holds newly sent weights on the device
        self._weights_there = False

    def start(self) -> None:
        """Moves policies to host memory at the start of the run: all policies if engines are colocated, otherwise those
        that are configured to sleep between their iterations.
        """
        for trainee in self.trainees.values():
            if self._engines is not None:
                trainee.policy.memory.sleep(weights=True)
            elif trainee.sleeps:
                trainee.policy.memory.sleep()

    def generate(self) -> None:
        """Gives the devices to the engines: off-loads all policies and wakes the engines. On return, the engines accept
        requests.
        """
        if self._engines is None or self._generating:
            return
        for trainee in self.trainees.values():
            trainee.policy.memory.sleep(weights=True)
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
    def train(self, name: str, refitted: Collection[str]) -> Iterator[None]:
        """Context manager that keeps a policy on the device with its weights, gradients and optimizer state.

        `refitted`: names of all policies that are updated before the engines generate again.
        """
        trainee = self.trainees[name]
        self.clear(refitted)
        if self._engines is not None or trainee.sleeps:
            trainee.policy.memory.wake()
        yield
        if self._engines is not None or trainee.sleeps:
            trainee.policy.memory.sleep()

    @contextlib.contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Context manager that keeps a policy's weights on the device while the engines sleep: for a checkpoint or to
        compute log-probs.
        """
        self.clear()
        with self._present(name):
            yield

    @contextlib.contextmanager
    def refit(self, name: str) -> Iterator[None]:
        """Context manager that keeps a policy's weights on the device while its engine loads them (weight sync). The
        engine's copy then stays on the device, also during further weight syncs, until a policy trains or `weights`
        needs the memory.
        """
        if self._generating:
            self.clear()
        with self._present(name):
            yield
        self._refitted.add(name)
        self._weights_there = True

    @contextlib.contextmanager
    def _present(self, name: str) -> Iterator[None]:
        """Context manager for a block that needs a policy's weights on the device. With colocated engines, moves the
        weights to the device before the block, and to host memory after it. Without colocated engines, does nothing,
        because the weights are always on the device.
        """
        if self._engines is None:
            yield
            return
        memory = self.trainees[name].policy.memory
        with memory.present():
            yield
        memory.sleep(weights=True)
