"""A world of one rank without torch.distributed, for tests of code that needs no process group."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_rl.messages.world import Replicas, World


class OneProcess(World):
    """A world of one rank, without torch.distributed."""

    rank, size = 0, 1

    def __init__(self, outer: World | None = None) -> None:
        self._prepare(outer)
        self.work = OneProcess(self) if outer is None else self

    def barrier(self) -> None:
        return None

    def _send(self, value: Any) -> Any:
        return value

    def everywhere(self, value: bool) -> bool:
        return value

    def scatter(self, sizes: Sequence[int], make: Callable[[int], np.ndarray], replicas: Replicas) -> np.ndarray:
        return make(0)

    def gather_back(self, own: np.ndarray | None, sizes: Sequence[int], replicas: Replicas) -> list[np.ndarray] | None:
        return None if own is None else [own]
