"""Holds the process groups of one role as a value: several layouts live in one world, and one is active at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.schema import Layout
from megatron_rl.megatron import platform
from megatron_rl.weights.parameter_mapping import Shard
from megatron_rl.world import Replicas, all_gather

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402


@dataclass(frozen=True)
class Groups:
    """The communicators of one layout. Core reads them from module globals, which `active()` sets and restores."""

    layout: Layout
    tp: Any  # process group of the tensor-parallel ranks
    pp: Any  # group of the pipeline stages
    cp: Any  # group of the ranks that divide each sequence
    dp: Any  # group of the data-parallel replicas
    experts: Any  # group that holds one stage's experts once: expert-tensor ranks fastest, then expert-parallel
    control: Any  # gloo group of all ranks, for small objects
    replicas: Replicas  # ranks of each data-parallel replica, and the gloo group of this rank's
    _globals: dict[str, Any]

    @property
    def tp_rank(self) -> int:
        return self.tp.rank()

    @property
    def pp_rank(self) -> int:
        return self.pp.rank()

    @property
    def cp_rank(self) -> int:
        return self.cp.rank()

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    @property
    def copies(self) -> int:
        """Returns the number of ranks that hold the same dense parameters."""
        return self.dp.size() * self.cp.size()

    @property
    def shard(self) -> Shard:
        """Returns which part of every parameter this rank holds."""
        etp = self.layout.expert_tp
        return Shard(self.layout.tp, self.tp_rank, etp, self.experts.rank() % etp)

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp.size() - 1

    @property
    def answers(self) -> bool:
        """Says whether this rank is the first tensor rank of the last stage, which returns log-probs for its tokens."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def reports(self) -> bool:
        """Says whether the sums of this rank count: one rank of each replica has the sums of all its tokens."""
        return self.answers and self.cp_rank == 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes core see this layout inside the block, and afterwards what it saw before."""
        before = _snapshot()
        parallel_state.__dict__.update(self._globals)
        try:
            yield
        finally:
            parallel_state.__dict__.update(before)


_made: dict[tuple[Layout, int, int], Groups] = {}  # the groups that exist in the world `_world`
_world: Any = None


def create(layout: Layout, *, seed: int = 0, timeout_s: int = 1800) -> Groups:
    """Returns the groups of `layout`, the same for all roles that have it. Collective over all ranks.

    Groups are shared because a layout has two dozen, each with communicators, or with threads that wake a hundred times
    a second. Raises ValueError when tp * cp * pp or etp * ep * pp does not divide the ranks.
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
    """Makes the groups of a layout with core's own function, and leaves core's globals as they were."""
    world = dist.get_world_size()
    if world % layout.model_ranks:
        raise ValueError(
            f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} = {layout.model_ranks} does not divide {world} ranks: "
            "start a multiple, or change the layout"
        )
    if world % layout.expert_ranks:
        raise ValueError(
            f"etp {layout.expert_tp} x ep {layout.ep} x pp {layout.pp} = {layout.expert_ranks} does not divide {world} "
            "ranks: lower layout.ep or layout.etp (null is tp), or start a multiple"
        )
    before = _snapshot()
    parallel_state.destroy_model_parallel()  # this forgets names only: groups made for other layouts live on as values
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
    parallel_state.__dict__.update(before)
    return groups


@contextlib.contextmanager
def _one_backend() -> Iterator[None]:
    """Makes core's groups for which it names no backend of NCCL alone inside the block, where there is a GPU.

    Without a name torch takes both backends of the world, gloo and NCCL, and gloo connects every rank of a group with
    every other one as the group is made, for tensors of a CPU that none of these groups carries.
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
    """Collective: finds out which ranks hold each replica, and gives those of one replica a gloo group of their own."""
    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    last = pp == parallel_state.get_pipeline_model_parallel_world_size() - 1
    reports = last and tp == 0 and parallel_state.get_context_parallel_rank() == 0
    everyone = all_gather((parallel_state.get_data_parallel_rank(), reports), control)
    ranks: list[list[int]] = [[] for _ in range(1 + max(number for number, _ in everyone))]
    reporters = [0] * len(ranks)
    for rank, (number, told) in enumerate(everyone):
        ranks[number].append(rank)
        if told:
            reporters[number] = rank
    group = None
    for members in ranks if len(ranks[0]) > 1 else ():
        made = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout_s))
        group = made if dist.get_rank() in members else group
    return Replicas(ranks=ranks, reporters=reporters, group=group)


def _snapshot() -> dict[str, Any]:
    """Returns every global of core's parallel_state that names a group, a rank or a size."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
