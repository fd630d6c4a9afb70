"""A fleet whose policies are held by ranks: each method is a command to the ranks of a policy, or to all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.lib.timing import named_range
from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import World
from megatron_rl.training.device_memory import ColocatedEngines, DeviceMemory, EngineTurns
from megatron_rl.training.lessons import Lesson, Metrics
from megatron_rl.training.update import token_scores, update
from megatron_rl.types import AGENT, EPISODE, Rollout


class RankFleet:
    """Implements training.fleet.Fleet. Every rank has an instance, and the driver calls the methods. Handlers run on
    the ranks; they are collective over the ranks of their policy, and must not call methods of the fleet.
    """

    def __init__(
        self, commands: Commands, memory: DeviceMemory, refits: Mapping[str, Callable[[int], None]], *,
        world_of: Callable[[str], World], ranks: Mapping[str, Sequence[int]],
        engines: ColocatedEngines | None = None, rescore: bool = False,
        resets: Callable[[int], bool] = lambda number: False,
        around: Callable[[int], contextlib.AbstractContextManager[None]] = lambda number: contextlib.nullcontext(),
        occupied_s: Callable[[], float | None] = lambda: None, profiled: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`memory`: the policies of this rank. `refits`: {policy: function of the driver that sends the policy's
        weights to its engine, with the number of their version}. `world_of`: returns the ranks of a policy, on these
        ranks. `ranks`: {policy: numbers of its ranks}. `engines`: the colocated engines. `rescore`: see update.update.
        `resets`: returns whether the iteration with the given index begins with a replacement of reference models.
        `around`: returns a context manager in which the iteration with the given index runs on this rank.
        `occupied_s`: see Fleet.occupied_s. `profiled`: indices of the iterations that are profiled.
        """
        self.memory, self.refits, self.occupied_s = memory, refits, occupied_s
        self._commands, self._world_of, self._ranks = commands, world_of, ranks
        self._rescore, self._resets = rescore, resets
        self.engines = EngineTurns(engines, lambda: self.everywhere("offload"))
        self._iteration = contextlib.ExitStack()  # the context manager of the iteration that runs
        self._around, self._profiled = around, profiled
        self.serve("begin", self._begin)
        self.serve("end", self._iteration.close)
        self.serve("start", memory.start)
        self.serve("offload", memory.offload)
        self.serve("score", self._score)
        self.serve("train", self._train)

    def serve(self, name: str, handler: Callable[..., Any]) -> None:
        """Registers a collective handler. Every rank must register the same names. Traces of torch's profiler show the
        handler under this name.
        """
        self._commands.serve(name, lambda order: named_range(name)(handler)(*order))

    def everywhere(self, name: str, *arguments: Any, bulk: Sequence[Any] = ()) -> Any:
        """Runs a handler on every rank with these arguments, and returns the result of rank 0. See Commands.together
        for errors. `bulk`: last arguments that are None on other ranks than rank 0.
        """
        others = (*arguments, *[None] * len(bulk))
        return self._commands.together(name, (*arguments, *bulk), others).result()

    def call(self, name: str, policy: str, *arguments: Any, bulk: Any) -> Future[Any]:
        """Runs a handler on the ranks of a policy with the policy's name and these arguments. The future gives the
        result of the first of the ranks. `bulk`: a last argument that is None on the other ranks, such as rollouts.
        """
        shared, ranks = (policy, *arguments), self._ranks[policy]
        return self._commands.together(name, (*shared, bulk), (*shared, None), ranks, about=policy)

    @property
    def with_engine(self) -> Sequence[str]:
        return [*self.refits]

    def start(self, versions: Mapping[str, int]) -> None:
        self.everywhere("start")
        self.engines.clear(self.with_engine)
        for policy in self.with_engine:
            self.refit(policy, versions.get(policy, 0))

    def begin(self, number: int) -> None:
        if self._resets(number):
            self.engines.clear()
        self._commands.iteration = number
        begun = self._post("begin", number)
        if number in self._profiled:  # a trace that begins within a stage of the driver does not name the stage
            begun.result()

    def end(self) -> None:
        self._post("end")

    def _post(self, name: str, *arguments: Any) -> Future[Any]:
        """Runs a handler on every rank, without waiting for it. A rank where it fails runs no later command."""
        return self._commands.together(name, arguments, arguments)

    def generate(self) -> None:
        self.engines.generate()

    def score(self, policy: str, rollouts: Sequence[Rollout], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        self.engines.clear()
        return self.call("score", policy, [*names], bulk=self._sent(policy, rollouts)).result()

    def apart(self, policy: str, other: str) -> bool:
        return {*self._ranks[policy]}.isdisjoint(self._ranks[other])

    def update(self, lesson: Lesson, learning: Sequence[str]) -> Future[Metrics]:
        self.engines.clear(learning)
        return self.call("train", lesson.policy, bulk=self._sent(lesson.policy, lesson.rollouts))

    def _sent(self, policy: str, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Returns the rollouts without what only the driver reads, if another rank than rank 0 gets them."""
        if self._ranks[policy][0] == 0:
            return rollouts
        units = [{name: r.payload[name] for name in (EPISODE, AGENT) if name in r.payload} for r in rollouts]
        return [
            replace(rollout, payload=unit, rewards={}, annotations={})
            for rollout, unit in zip(rollouts, units, strict=True)
        ]

    def refit(self, policy: str, version: int) -> None:
        if (send := self.refits.get(policy)) is not None:
            with self.engines.refit(policy):
                send(version)

    def _begin(self, number: int) -> None:
        self._iteration.close()
        self._iteration.enter_context(self._around(number))

    def _score(self, policy: str, names: Sequence[str], rollouts: Sequence[Rollout] | None) -> Any:
        with self.memory.weights(policy):
            return token_scores(self._world_of(policy), self.memory.trainees[policy].policy, rollouts, names)

    def _train(self, policy: str, rollouts: Sequence[Rollout] | None) -> Metrics:
        with self.memory.train(policy):
            return update(self._world_of(policy), self.memory.trainees[policy], rollouts, rescore=self._rescore)
