"""A world of one rank without torch.distributed, for tests of code that needs no process group."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_rl.world import Handler, Replicas, T, World


class OneProcess(World):
    """A world of one rank, without torch.distributed."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._calling = threading.Lock()

    def barrier(self) -> None:
        return None

    def broadcast(self, value: T) -> T:
        return value

    def from_driver(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    def serve(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler

    def call_all(self, name: str, args_per_rank: Sequence[Any]) -> list[Any]:
        [argument] = args_per_rank
        with self._calling:
            return [self._handlers[name](argument)]

    def scatter(self, sizes: Sequence[int], make: Callable[[int], np.ndarray], replicas: Replicas) -> np.ndarray:
        return make(0)

    def gather_back(self, own: np.ndarray | None, sizes: Sequence[int], replicas: Replicas) -> list[np.ndarray] | None:
        return None if own is None else [own]
