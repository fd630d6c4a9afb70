"""Creates the process groups of a layout on a set of ranks. Several layouts and sets can coexist in one world;
Megatron-core uses one layout at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, overload

import torch
import torch.distributed as dist

from megatron_rl.config.base import refuse
from megatron_rl.config.schema import Layout
from megatron_rl.megatron import platform
from megatron_rl.messages.world import Replicas
from megatron_rl.weights.parameter_mapping import Shard

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402


@dataclass(frozen=True)
class Groups:
    """The process groups of one parallel layout on a set of ranks, which is a range of the world's ranks. A rank's
    place is its index in the set; the leader has place 0. Megatron-core reads its process groups from module globals;
    the context manager `active()` sets the globals to these groups and restores the previous values afterwards."""

    layout: Layout
    tp: Any  # process group of the tensor-parallel ranks
    pp: Any  # group of the pipeline stages
    cp: Any  # group of the ranks that split each sequence (context parallelism)
    dp: Any  # group of the data-parallel replicas
    experts: Any  # group of ranks that together hold one copy of a stage's experts; expert-tensor ranks vary fastest
    control: Any  # gloo group of the set, for small objects
    whole: Any  # group of the set with the world's backends, for `platform.as_world`
    replicas: Replicas  # places of every data-parallel replica, and the gloo group of this rank's replica
    _globals: dict[str, Any]

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same dense parameters."""
        return self.dp.size() * self.cp.size()

    @property
    def shard(self) -> Shard:
        """This rank's tensor-parallel and expert-tensor-parallel position, which determines the rank's part of each
        parameter."""
        etp = self.layout.expert_tp
        return Shard(self.layout.tp, self.tp.rank(), etp, self.experts.rank() % etp)

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def answers(self) -> bool:
        """True on the first tensor rank of the last pipeline stage. This rank returns the log-probs of its tokens."""
        return self.is_last_stage and self.tp.rank() == 0

    @property
    def reports(self) -> bool:
        """True on exactly one rank of each data-parallel replica: the rank that reports the replica's sums, such as the
        loss."""
        return self.answers and self.cp.rank() == 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager that makes this layout Megatron-core's active layout inside the block, and restores the
        previous layout when the block ends."""
        snapshot = _snapshot()
        parallel_state.__dict__.update(self._globals)
        try:
            yield
        finally:
            parallel_state.__dict__.update(snapshot)


# {(layout, ranks, seed, timeout): groups, or None outside of the ranks}, all created while `_world` was torch's world
_made: dict[tuple[Layout, range, int, int], Groups | None] = {}
_world: Any = None


@overload
def create(layout: Layout, ranks: None = None, *, seed: int = 0, timeout_s: int = 1800) -> Groups: ...
@overload
def create(layout: Layout, ranks: range | None, *, seed: int = 0, timeout_s: int = 1800) -> Groups | None: ...
def create(layout: Layout, ranks: range | None = None, *, seed: int = 0, timeout_s: int = 1800) -> Groups | None:
    """Returns the process groups of `layout` on `ranks` (None: all ranks), and creates them at the first call. Returns
    None on a rank outside of `ranks`. Roles with the same layout and ranks share the groups.

    Collective over all ranks of the world, also over those outside of `ranks`: torch names groups by a counter in each
    process, so that every rank must create every group, in the same order.

    Groups are shared because they are expensive: a layout has about 24 groups, each with NCCL communicators or with
    gloo threads that wake up a hundred times a second. Raises ConfigError if tp * cp * pp or etp * ep * pp does
    not divide the number of ranks.
    """
    global _world
    if dist.group.WORLD is not _world:
        _made.clear()
        _world = dist.group.WORLD
    if ranks is None:
        ranks = range(dist.get_world_size())
    key = layout, ranks, seed, timeout_s
    if key not in _made:
        _made[key] = _create(layout, ranks, seed, timeout_s)
    return _made[key]


def _create(layout: Layout, ranks: range, seed: int, timeout_s: int) -> Groups | None:
    """Creates the groups of a layout with Megatron-core's function, and restores core's globals afterwards."""
    refuse(*layout.rank_problems(len(ranks)))
    snapshot, timeout = _snapshot(), timedelta(seconds=timeout_s)
    # The groups of other layouts keep working, because this call only resets Megatron-core's globals.
    parallel_state.destroy_model_parallel()
    with _one_backend(), platform.layout_of(ranks):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            create_gloo_process_groups=True,
            distributed_timeout_minutes=max(1, timeout_s // 60),
        )
    control = dist.new_group([*ranks], backend="gloo", timeout=timeout)
    whole = dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group([*ranks], timeout=timeout)
    replicas = _replicas(layout, ranks, timeout)
    groups = None
    if dist.get_rank() in ranks:
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        groups = Groups(
            layout=layout,
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            dp=parallel_state.get_data_parallel_group(),
            experts=parallel_state.get_expert_tensor_and_model_parallel_group(),
            control=control,
            whole=whole,
            replicas=replicas,
            _globals=_snapshot(),
        )
    parallel_state.__dict__.update(snapshot)
    return groups


@contextlib.contextmanager
def _one_backend() -> Iterator[None]:
    """Makes NCCL the default backend of groups that Megatron-core creates inside the block. No-op without a GPU.

    By default torch creates a group with both backends of the world, gloo and NCCL. Gloo would connect every pair of
    ranks of the group when the group is created, but is not needed, because CPU tensors are never sent over these
    groups.
    """
    if not torch.cuda.is_available():
        yield
        return
    make = parallel_state.create_group

    def make_of_nccl(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return make(*args, backend=backend or "nccl", **kwargs)

    parallel_state.create_group = make_of_nccl
    try:
        yield
    finally:
        parallel_state.create_group = make


def _replicas(layout: Layout, ranks: range, timeout: timedelta) -> Replicas:
    """Returns the places of each data-parallel replica, and creates a gloo group for each replica. Collective over the
    world.

    Megatron-core numbers the ranks of a layout with tp fastest, then cp, dp and pp. A replica reports from the first
    rank that it has in the last pipeline stage, see `Groups.reports`.
    """
    width, stride = layout.tp * layout.cp, len(ranks) // layout.pp
    firsts = range(0, stride, width)
    replicas = [[stage + first + i for stage in range(0, len(ranks), stride) for i in range(width)] for first in firsts]
    own_group = None
    for places in replicas if layout.model_ranks > 1 else ():
        members = [ranks[place] for place in places]
        group = dist.new_group(members, backend="gloo", timeout=timeout)
        own_group = group if dist.get_rank() in members else own_group
    return Replicas(ranks=replicas, reporters=[places[-width] for places in replicas], group=own_group)


def _snapshot() -> dict[str, Any]:
    """Returns every global variable of Megatron-core's parallel_state that holds a group, a rank or a size."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
