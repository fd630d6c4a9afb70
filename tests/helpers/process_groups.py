"""Ends the process groups that a test's case has made: idle gloo threads wake a hundred times a second, and a hundred
groups cost a rank 13 % of a core."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world

from megatron_rl.megatron import parallel

T = TypeVar("T")


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Destroys, at the block's end, the process groups that were made in the block. Collective."""
    standing = {*_world.pg_map}
    yield
    parallel._made.clear()
    parallel_state._global_process_group_list = None  # core keeps each group that it has made
    gc.collect()
    dist.barrier()
    for group in [group for group in _world.pg_map if group not in standing]:
        dist.destroy_process_group(group)


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Returns what a function returns, and ends the process groups that it made. Collective."""
    with ended():
        return function(*arguments)
