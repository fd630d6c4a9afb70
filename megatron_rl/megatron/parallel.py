"""Creates the process groups of a layout. Several layouts can coexist in one world; Megatron-core uses one layout at a
time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.base import refuse
from megatron_rl.config.schema import Layout
from megatron_rl.megatron import platform
from megatron_rl.messages.world import Replicas, all_gather
from megatron_rl.weights.parameter_mapping import Shard

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402


@dataclass(frozen=True)
class Groups:
    """The process groups of one parallel layout. Megatron-core reads its process groups from module globals; the
    context manager `active()` sets the globals to these groups and restores the previous values afterwards."""

    layout: Layout
    tp: Any  # process group of the tensor-parallel ranks
    pp: Any  # group of the pipeline stages
    cp: Any  # group of the ranks that split each sequence (context parallelism)
    dp: Any  # group of the data-parallel replicas
    experts: Any  # group of ranks that together hold one copy of a stage's experts; expert-tensor ranks vary fastest
    control: Any  # gloo group of all ranks, for small objects
    replicas: Replicas  # ranks of every data-parallel replica, and the gloo group of this rank's replica
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


# {(layout, seed, timeout): groups}, all created while `_world` was torch's world group
_made: dict[tuple[Layout, int, int], Groups] = {}
_world: Any = None


def create(layout: Layout, *, seed: int = 0, timeout_s: int = 1800) -> Groups:
    """Returns the process groups of `layout`, and creates them at the first call. Roles with the same layout share the
    groups. Collective over all ranks.

    Groups are shared because they are expensive: a layout has about 24 groups, each with NCCL communicators or with
    gloo threads that wake up a hundred times a second. Raises ConfigError if tp * cp * pp or etp * ep * pp does
    not divide the number of ranks.
    """
    global _world
    if dist.group.WORLD is not _world:
        _made.clear()
        _world = dist.group.WORLD
    key = layout, seed, timeout_s
    if key not in _made:
        _made[key] = _create(layout, seed, timeout_s)
    return _made[key]


def _create(layout: Layout, seed: int, timeout_s: int) -> Groups:
    """Creates the groups of a layout with Megatron-core's function, and restores core's globals afterwards."""
    world = dist.get_world_size()
    refuse(*layout.rank_problems(world))
    snapshot = _snapshot()
    # The groups of other layouts keep working, because this call only resets Megatron-core's globals.
    parallel_state.destroy_model_parallel()
    with _one_backend():
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
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    groups = Groups(
        layout=layout,
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        experts=parallel_state.get_expert_tensor_and_model_parallel_group(),
        control=control,
        replicas=_replicas(control, timeout_s),
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


def _replicas(control: Any, timeout_s: int) -> Replicas:
    """Finds the ranks of each data-parallel replica and creates a gloo group for each replica. Collective."""
    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    last = pp == parallel_state.get_pipeline_model_parallel_world_size() - 1
    reports = last and tp == 0 and parallel_state.get_context_parallel_rank() == 0
    everyone = all_gather((parallel_state.get_data_parallel_rank(), reports), control)
    ranks: list[list[int]] = [[] for _ in range(1 + max(number for number, _ in everyone))]
    reporters = [0] * len(ranks)
    for rank, (number, is_reporter) in enumerate(everyone):
        ranks[number].append(rank)
        if is_reporter:
            reporters[number] = rank
    group = None
    for members in ranks if len(ranks[0]) > 1 else ():
        replica_group = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout_s))
        group = replica_group if dist.get_rank() in members else group
    return Replicas(ranks=ranks, reporters=reporters, group=group)


def _snapshot() -> dict[str, Any]:
    """Returns every global variable of Megatron-core's parallel_state that holds a group, a rank or a size."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
