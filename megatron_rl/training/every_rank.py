"""A fleet in which every rank holds a part of every policy: each method is one command to all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.lib.timing import named_range
from megatron_rl.messages.world import World
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.lessons import Lesson, Metrics
from megatron_rl.training.update import token_scores, update
from megatron_rl.types import Rollout


class EveryRank:
    """Implements training.fleet.Fleet. Every rank has an instance, and the driver (rank 0) calls the methods inside
    `world.from_driver`. A method runs its handler on all ranks at the same time. Handlers are collective: they use
    `world.work`, and must not call methods of the fleet.
    """

    def __init__(
        self, world: World, memory: DeviceMemory, *, rescore: bool = False,
        around: Callable[[int], contextlib.AbstractContextManager[None]] = lambda number: contextlib.nullcontext(),
        occupied_s: Callable[[], float | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`rescore`: see update.update. `around`: returns a context manager in which the iteration with the given index
        runs on this rank. `occupied_s`: see Fleet.occupied_s.
        """
        self.memory, self._world, self._rescore = memory, world, rescore
        self.occupied_s = occupied_s
        self._iteration = contextlib.ExitStack()  # the context manager of the iteration that runs
        world.serve("fleet/begin", lambda order: self._iteration.enter_context(around(*order)))
        world.serve("fleet/end", lambda _: self._iteration.close())
        self.serve("start", self._start)
        self.serve("generate", memory.generate)
        self.serve("score", self._score)
        self.serve("train", self._train)
        self.serve("refit", self._refit)

    def serve(self, name: str, handler: Callable[..., Any]) -> None:
        """Registers a collective handler, which `call` runs on every rank. Every rank must register the same names.
        Traces of torch's profiler show the handler under this name.
        """
        self._world.serve(f"fleet/{name}", lambda order: named_range(name)(handler)(*order))

    def call(self, name: str, *arguments: Any, bulk: Any = None) -> Any:
        """Runs a handler on every rank with these arguments, and returns the driver's result. See World.together for
        errors. `bulk`: a last argument that is None on other ranks than the driver, such as rollouts.
        """
        if bulk is None:
            return self._world.together(f"fleet/{name}", arguments, arguments)
        return self._world.together(f"fleet/{name}", (*arguments, bulk), (*arguments, None))

    @property
    def with_engine(self) -> Sequence[str]:
        return [name for name, trainee in self.memory.trainees.items() if trainee.refit is not None]

    def start(self, versions: Mapping[str, int]) -> None:
        self.call("start", dict(versions))

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        self.call("begin", number)
        yield
        self.call("end")

    def generate(self) -> None:
        self.call("generate")

    def score(self, policy: str, rollouts: Sequence[Rollout], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        return self.call("score", policy, [*names], bulk=rollouts)

    def update(self, lesson: Lesson, learning: Sequence[str]) -> Metrics:
        return self.call("train", lesson.policy, [*learning], bulk=lesson.rollouts)

    def refit(self, policy: str, version: int) -> None:
        self.call("refit", policy, version)

    def _start(self, versions: Mapping[str, int]) -> None:
        self.memory.start()
        self.memory.clear(self.with_engine)
        for policy in self.memory.trainees:
            self._refit(policy, versions.get(policy, 0))

    def _score(self, policy: str, names: Sequence[str], rollouts: Sequence[Rollout] | None) -> Any:
        with self.memory.weights(policy):
            return token_scores(self._world.work, self.memory.trainees[policy].policy, rollouts, names)

    def _train(self, policy: str, learning: Sequence[str], rollouts: Sequence[Rollout] | None) -> Metrics:
        with self.memory.train(policy, learning):
            return update(self._world.work, self.memory.trainees[policy], rollouts, rescore=self._rescore)

    def _refit(self, policy: str, version: int) -> None:
        with self.memory.refit(policy):
            if (send := self.memory.trainees[policy].refit) is not None:
                send(version)
