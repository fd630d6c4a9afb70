"""A world and commands of one rank without torch.distributed, for tests of code that needs no process group."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import Replicas, World


class OneProcess(World):
    """A world of one rank, without torch.distributed."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._leading = False

    def barrier(self) -> None:
        return None

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value

    def everywhere(self, value: bool) -> bool:
        return value

    def scatter(self, sizes: Sequence[int], make: Callable[[int], np.ndarray], replicas: Replicas) -> np.ndarray:
        return make(0)

    def gather_back(self, own: np.ndarray | None, sizes: Sequence[int], replicas: Replicas) -> list[np.ndarray] | None:
        return None if own is None else [own]


class CommandsAtOnce(Commands):
    """Commands of one rank, for tests without a driver: the thread that posts a command runs its handler at once."""

    def __init__(self) -> None:
        super().__init__(OneProcess())
        self._driver = threading.get_ident()

    def in_driver(self) -> bool:
        return self._driver == threading.get_ident()

    def _post(
        self, name: str, ranks: Sequence[int], arguments: Sequence[Any], *, collective: bool, about: str = "",
        iteration: int | None = None,
    ) -> Future[dict[int, Any]]:  # fmt: skip
        future = Future[dict[int, Any]]()
        future.set_result({rank: self._handlers[name](arguments[place]) for place, rank in enumerate(ranks)})
        return future
