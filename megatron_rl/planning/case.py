"""Defines the run to be planned, and methods that return the same run with one change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_rl.config.base import ConfigError, refuse
from megatron_rl.config.engines import Embedded, Servers
from megatron_rl.models.shape import Shape
from megatron_rl.planning.hardware import Cluster
from megatron_rl.planning.workload import IterationWork
from megatron_rl.spec import checks
from megatron_rl.spec.rank_sets import rank_sets
from megatron_rl.spec.run_spec import ClusterSpec, EngineSpec, RoleSpec, RunSpec

PER_NODE = 8  # number of GPUs per node if the user gives no cluster


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run whose memory and time are to be estimated: its specification, the cluster, the model shape of each role,
    and the work of each iteration.
    """

    spec: RunSpec
    cluster: Cluster
    models: Mapping[str, Shape]
    work: Sequence[IterationWork]

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return self.spec.roles

    @property
    def held(self) -> list[str]:
        """Returns the roles for which the trainer holds a model."""
        return [name for name, role in self.roles.items() if role.has_policy]

    @property
    def servers(self) -> Servers | None:
        """Returns the settings of the servers, or None if the run uses the embedded engine."""
        settings = self.spec.engine.settings
        return settings if isinstance(settings, Servers) else None

    @property
    def colocated(self) -> bool:
        """Returns whether servers share the trainer's GPUs."""
        return self.servers is not None and self.servers.colocate

    @property
    def ranks(self) -> int:
        """Returns the number of the trainer's GPUs. Raises ConfigError if the engines leave no GPU to the trainer."""
        return trainer_gpus(self.spec.engine, self.cluster)

    @cached_property
    def role_ranks(self) -> Mapping[str, range]:
        """Returns {role: its ranks}. Raises ConfigError if the trainer has not the ranks that a role asks for."""
        sets, problems = rank_sets(self.roles, self.ranks)
        refuse(*problems)
        return sets

    def with_roles(self, **changed: RoleSpec) -> Case:
        """Returns this run with some roles replaced. `changed`: role name -> its new specification."""
        roles = {**self.roles, **changed}
        engine = replace(self.spec.engine, roles={name: roles[name] for name in self.spec.engine.roles})
        return replace(self, spec=replace(self.spec, roles=roles, engine=engine))

    def with_role(self, name: str, **changes: Any) -> Case:
        """Returns this run with changed settings of the role `name`. `changes`: setting -> new value."""
        return self.with_roles(**{name: replace(self.roles[name], **changes)})

    def with_engine(self, settings: Embedded | Servers) -> Case:
        """Returns this run with another engine, which `settings` describes."""
        alone = {name: replace(role, servers=role.owner) for name, role in self.roles.items()}
        case = self if isinstance(settings, Servers) else self.with_roles(**alone)
        engine, auto = case.spec.engine, self.spec.settings.get("refit", {}).get("staging", "auto") == "auto"
        if auto and isinstance(settings, Embedded):
            engine = replace(engine, refit=replace(engine.refit, staging="off"))
        return replace(case, spec=replace(case.spec, engine=replace(engine, settings=settings)))

    def with_staleness(self, staleness: int) -> Case:
        """Returns this run with rollouts that are generated up to `staleness` iterations ahead of training."""
        loop = self.spec.loop
        loop = replace(loop, rollouts=replace(loop.rollouts, max_staleness=staleness))
        return replace(self, spec=replace(self.spec, loop=loop))

    def beside_trainer(self) -> Case:
        """Returns this run with its servers on the last GPUs of the trainer's node.

        Returns the run unchanged if it has no servers on separate GPUs, if the cluster has several nodes, or if the
        servers would leave no GPU to the trainer. Also sets engine.start to True, because servers can share the
        trainer's node only if the run starts them.
        """
        gpus, node = server_gpus(self.spec.engine), self.cluster.per_node
        if self.servers is None or self.cluster.nodes > 1 or not 0 < gpus < node:
            return self
        return self.with_engine(replace(self.servers, gpus=tuple(range(node - gpus, node)), start=True))

    def passes(self) -> bool:
        """Returns whether `megatron-rl check` would accept the run with the number of ranks that the run has on this
        cluster.
        """
        spec = replace(self.spec, cluster=replace(self.spec.cluster, ranks=self.ranks))
        return not checks.problems(spec, to_come=True)


def own_cluster(engine: EngineSpec, cluster: ClusterSpec) -> str:
    """Returns the name of the cluster that a config requests, such as `2x8xA100-80`.

    The number of nodes is job.nodes plus the nodes that the servers need. Each node has 8 A100-80 GPUs. If the command
    trains nothing, servers run on the nodes of job.nodes, and nodes are added only if these are too few.

    In two cases, the cluster is instead a single node whose GPUs are launch.nproc plus those of the servers. Both cases
    require job.nodes = 1. In the first case, launch.nproc is above 1, and the only servers on separate GPUs, if any,
    are those that the run starts on engine.gpus. In the second case, the run starts servers on engine.gpus, and
    launch.nproc plus the number of their GPUs is 8.
    """
    settings, gpus = engine.settings, server_gpus(engine)
    shared = isinstance(settings, Servers) and settings.start and settings.gpus and not settings.urls
    nproc = cluster.launch.nproc
    if cluster.job.nodes == 1 and ((nproc > 1 and (shared or not gpus)) or (shared and nproc + gpus == PER_NODE)):
        return f"1x{nproc + gpus}xA100-80"
    if not engine.trains:
        return f"{max(cluster.job.nodes, -(-gpus // PER_NODE))}x{PER_NODE}xA100-80"
    return f"{cluster.job.nodes + -(-gpus // PER_NODE)}x{PER_NODE}xA100-80"


def trainer_gpus(engine: EngineSpec, cluster: Cluster) -> int:
    """Returns the number of GPUs that the engines leave to the trainer, rounded down to whole nodes if at least one
    node is left. For a command that trains nothing, returns the number of all GPUs.

    Raises ConfigError if the engines leave no GPU, or need more GPUs than there are.
    """
    gpus = server_gpus(engine)
    if not engine.trains and gpus <= cluster.gpus:
        return cluster.gpus
    free = cluster.gpus - gpus
    free = free // cluster.per_node * cluster.per_node if free >= cluster.per_node else free
    if free < 1 and isinstance(engine.settings, Servers):
        raise ConfigError(
            f"{len(engine.server_roles)} roles x engine.replicas {engine.settings.replicas} x engine.tp "
            f"{engine.settings.tp} = {gpus} GPUs of engines leave none of {cluster}'s {cluster.gpus} "
            f"{'for the trainer' if engine.trains else 'or are more'}: lower engine.replicas, or take more nodes"
        )
    return free


def server_gpus(engine: EngineSpec) -> int:
    """Returns the number of GPUs on which only servers run."""
    return 0 if isinstance(engine.settings, Servers) and engine.settings.colocate else engine.num_server_gpus
