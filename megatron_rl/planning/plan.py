"""Plans a run on a cluster: the memory of all parts, the seconds of all phases, and whether the run fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.base import ConfigError, refuse
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.config.schema import Embedded, Servers
from megatron_rl.models.divisibility import engine_problems, trainer_problems
from megatron_rl.models.lora_targets import owners
from megatron_rl.models.shape import Shape
from megatron_rl.planning import compute, memory
from megatron_rl.planning.case import Case
from megatron_rl.planning.compute import EngineSetup
from megatron_rl.planning.hardware import Cluster
from megatron_rl.planning.memory import Actor, Precision, TrainingBytes
from megatron_rl.planning.phases import IterationPlan, micro_batch, plan_iteration, writers_of
from megatron_rl.planning.workload import Draw, longest_context
from megatron_rl.spec.rank_sets import words
from megatron_rl.weights import counting
from megatron_rl.weights.counting import Parallel
from megatron_rl.weights.quantisation import FORMATS
from megatron_rl.weights.rank_layouts import EngineLayout

ENGINE_WORKSPACE = 3 * memory.GIB  # bytes per GPU for prefill activations and CUDA graphs of a server
# assumed bytes of GPU memory that a server keeps while it sleeps: CUDA context, NCCL's buffers, CUDA graphs
ASLEEP = 2 * memory.GIB
# Assumed upper bound of the bytes of host memory per byte of a sleeping server's weights.
# vLLM copies its memory blocks to pinned memory, and torch rounds each block's size up to a power of 2.
SERVER_COPY = 2.0
# arguments in engine.args that disable prefix caching
NO_CACHE = frozenset(["--no-enable-prefix-caching", "--disable-radix-cache"])
NO_OVERLAP = frozenset(["--no-async-scheduling", "--disable-overlap-schedule"])


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The memory estimate of one role on the trainer's ranks. Bytes are given for the rank that needs the most."""

    name: str
    ranks: range  # the ranks that hold the role
    shape: Shape
    parallel: Parallel
    training: TrainingBytes
    embedded: float  # bytes of the separate copy of the weights that the embedded engine holds
    cache: float  # bytes of the embedded engine's KV cache per rank
    sleeps: bool
    host: float  # bytes of host memory per rank: the offloaded state of a sleeping role, and the reference weights
    # whether servers share the trainer's GPUs; the role's weights are then offloaded while another role trains
    leaves: bool = False

    @property
    def asleep(self) -> float:
        """Returns the bytes that the role keeps on the GPU while another role trains."""
        if self.leaves:
            return 0.0
        held = self.training.weights + self.embedded
        return held if self.sleeps else held + self.training.gradients + self.training.optimizer


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """The memory estimate of one GPU of a role's servers."""

    role: str
    weights: float  # bytes of the weights
    # bytes that engine.memory_share leaves for the KV cache; the server cannot start if this is not positive
    cache: float
    sequences: float  # number of sequences of maximum length that fit into the KV cache of one server
    share: float  # bytes of GPU memory that the server uses while it generates
    asleep: float  # bytes that the server keeps while the trainer uses its GPU; 0 on separate GPUs
    staging: float  # bytes of pinned host memory in which the server receives new weights


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The estimate of memory and time of a run whose trainer uses `ranks` GPUs of `cluster`. The engines use the other
    GPUs.
    """

    cluster: Cluster
    ranks: int
    roles: Sequence[RolePlan]
    servers: Sequence[ServerPlan]
    iterations: Sequence[IterationPlan]
    # simulated seconds of a cycle whose iterations overlap (see schedule.simulated); None: the sum over the iterations
    simulated_s: float | None = None

    @property
    def cycle_s(self) -> float:
        """Returns the seconds of a cycle: `simulated_s`, or the sum over the iterations if nothing was simulated."""
        if self.simulated_s is not None:
            return self.simulated_s
        return sum(iteration.seconds * iteration.times for iteration in self.iterations)

    @property
    def tokens_per_gpu(self) -> float:
        """Returns the number of trained tokens per second, divided by the number of GPUs of the cluster."""
        return (
            sum(iteration.trained * iteration.times for iteration in self.iterations) / self.cycle_s / self.cluster.gpus
        )

    @property
    def phases(self) -> dict[str, float]:
        """Returns {phase: seconds per cycle of the schedule}."""
        totals: dict[str, float] = {}
        for iteration in self.iterations:
            for name, seconds in iteration.phases.items():
                totals[name] = totals.get(name, 0.0) + seconds * iteration.times
        return totals

    @property
    def reserve(self) -> float:
        return memory.CONTEXT + memory.FRAGMENTS * self.cluster.device.memory

    def peak(self, role: RolePlan) -> float:
        """Returns the peak bytes on the fullest GPU of a role's ranks while `role` trains."""
        others = max(
            sum(other.asleep for other in self.roles if other is not role and rank in other.ranks)
            for rank in self._first_ranks(role.ranks)
        )
        return self.reserve + others + role.embedded + role.training.peak + self.beside

    def _first_ranks(self, ranks: range) -> list[int]:
        """Returns some of `ranks` among which each combination of roles occurs that one of `ranks` holds."""
        ends = {end for role in self.roles for end in (role.ranks.start, role.ranks.stop)}
        return sorted({ranks.start, *(end for end in ends if end in ranks)})

    @property
    def beside(self) -> float:
        """Returns the bytes that colocated servers keep on a trainer's GPU while they sleep."""
        return sum(server.asleep for server in self.servers)

    def refit_peak(self, role: RolePlan) -> float:
        """Returns the peak bytes on a GPU shared by trainer and servers during a refit, while servers receive a role's
        weights.

        The peak consists of the role's weights and the weights of all servers, without the servers' KV caches.
        """
        return self.reserve + role.training.weights + self.beside + sum(server.weights for server in self.servers)

    @property
    def rollout_peak(self) -> float:
        """Returns the peak bytes on a trainer's GPU during generation by the embedded engine or by colocated
        servers."""
        if self.beside:
            return memory.CONTEXT + sum(server.share for server in self.servers)
        held = [[role for role in self.roles if rank in role.ranks] for rank in self._first_ranks(range(self.ranks))]
        return max(
            self.reserve + sum(role.asleep for role in roles) + max((role.cache for role in roles), default=0.0)
            for roles in held
        )

    @property
    def host_per_node(self) -> float:
        """Returns the bytes of host memory that the run uses on each node of the trainer, if all ranks of the node hold
        as much as the fullest rank."""
        kept = 0.0
        if self.beside:  # weights of sleeping servers are on the host, except the weights of the role in training
            kept = sum(server.weights for server in self.servers) - min(server.weights for server in self.servers)
            kept = SERVER_COPY * kept + sum(server.staging for server in self.servers)
        first_ranks = self._first_ranks(range(self.ranks))
        held = max(sum(role.host for role in self.roles if rank in role.ranks) for rank in first_ranks)
        return (held + kept) * min(self.cluster.per_node, self.ranks)

    @property
    def staging_per_node(self) -> float:
        """Returns the bytes of pinned host memory that servers need on a node if they use all its GPUs. 0 if servers
        share the trainer's GPUs."""
        per_gpu = max((server.staging for server in self.servers), default=0.0)
        return 0.0 if self.beside else per_gpu * self.cluster.per_node

    @property
    def problems(self) -> list[str]:
        """Returns the reasons why the run does not fit into memory, one line each; an empty list if the run fits."""
        room, problems = self.cluster.device.memory, list[str]()
        places = [(f"{role.name} trains", self.peak(role)) for role in self.roles]
        if any(role.embedded for role in self.roles):
            places.append(("the embedded engine generates", self.rollout_peak))
        if self.beside:
            places.append(("servers generate in it", self.rollout_peak))
            places += [(f"servers take the weights of {role.name}", self.refit_peak(role)) for role in self.roles]
        for what, need in places:
            if need > room:
                gib = need / memory.GIB
                device = self.cluster.device
                problems.append(f"while {what} a GPU needs {gib:.1f} GiB; {device.name} has {device.memory_gib}")
        for server in self.servers:
            if server.sequences < 1:
                problems.append(
                    f"a server of {server.role} has {max(0.0, server.cache) / memory.GIB:.1f} GiB a GPU for keys and "
                    f"values beside {server.weights / memory.GIB:.1f} GiB of weights: "
                    "not one sequence of the greatest length fits"
                )
        return problems

    def to_json(self) -> dict[str, Any]:
        """Returns the whole estimate as JSON-serializable values, in bytes and seconds."""
        plan_fields = ("problems", "cycle_s", "reserve", "rollout_peak", "host_per_node", "staging_per_node")
        role_fields = ("name", "embedded", "cache", "asleep")
        return {
            "cluster": str(self.cluster),
            "trainer_gpus": self.ranks,
            "fits": not self.problems,
            "tokens_per_s_per_gpu": self.tokens_per_gpu,
            "phases_s": self.phases,
            **{name: getattr(self, name) for name in plan_fields},
            "roles": [
                {
                    **{name: getattr(role, name) for name in role_fields},
                    "model": role.shape.name,
                    "parameters": counting.total(role.shape),
                    "ranks": words(role.ranks),
                    "layout": {**asdict(role.parallel), "dp": role.parallel.dp},
                    "training": asdict(role.training),
                    "peak": self.peak(role),
                }
                for role in self.roles
            ],
            "servers": [asdict(server) for server in self.servers],
            "iterations": [
                {
                    **asdict(iteration),
                    "seconds": iteration.seconds,
                    "sets": [{**asdict(part), "ranks": words(part.ranks)} for part in iteration.sets],
                }
                for iteration in self.iterations
            ],
        }


def make(case: Case) -> RunPlan:
    """Estimates the memory and time of a run. Raises ConfigError if a layout does not divide a model or the cluster."""
    shapes, roles = case.models, case.roles
    for name, role in roles.items():
        problems = trainer_problems(shapes[name].sizes, role.layout, shapes[name].name)
        refuse(*(f"roles.{name}: {line}" for line in problems))
    actors = {name: Actor.of(role, shapes[name], len(case.role_ranks[name])) for name, role in roles.items()}
    draws, trained = _draws(case), _trained(case)
    inside = case.servers is None  # the embedded engine also holds the models of roles that are not trained
    held = [name for name in case.roles if name in case.held or (inside and name in case.spec.engine.opened)]
    role_plans = [_role(case, actors[name], name, draws, trained=name in trained) for name in held]
    servers, engines = engines_of(case)
    iterations = [plan_iteration(case, iteration, actors, engines) for iteration in case.work]
    return RunPlan(
        cluster=case.cluster, ranks=case.ranks, roles=role_plans, servers=list(servers.values()), iterations=iterations
    )


def engines_of(case: Case) -> tuple[dict[str, ServerPlan], dict[str, EngineSetup]]:
    """Returns ({role: estimate of its servers}, {role: its engines})."""
    names, draws = [] if case.servers is None else case.spec.engine.server_roles, _draws(case)
    servers = {name: _server(case, case.servers, name, draws) for name in names if case.servers is not None}
    engines = {
        name: _engine(case, servers.get(role.servers), len(case.role_ranks[name])) for name, role in case.roles.items()
    }
    return servers, engines


def plan_role(case: Case, name: str, ranks: int) -> tuple[RolePlan, float, Actor]:
    """Returns (estimate of the memory of a role on a number of ranks, bytes of a GPU that stay in reserve, the role's
    model). Raises ConfigError if the role's layout does not divide the ranks."""
    actor = Actor.of(case.roles[name], case.models[name], ranks)
    role_plan = _role(case, actor, name, _draws(case), trained=name in _trained(case))
    return role_plan, memory.CONTEXT + memory.FRAGMENTS * case.cluster.device.memory, actor


def _draws(case: Case) -> dict[str, Draw]:
    """Returns {role: its samples in an iteration}, of an iteration that trains the role if there is one."""
    draws = {draw.role: draw for iteration in case.work for draw in iteration.draws}
    return draws | {draw.role: draw for work in case.work for draw in work.draws if draw.role in work.roles}


def _trained(case: Case) -> set[str]:
    return {case.roles[name].owner for iteration in case.work for name in iteration.roles}


def make_or_none(case: Case) -> RunPlan | None:
    """Returns the estimate of a run, or None if the run's layouts do not divide the models or the cluster."""
    try:
        return make(case)
    except ConfigError:
        return None


def _longest(case: Case, name: str, draws: Mapping[str, Draw]) -> int:
    """Returns the maximum number of tokens of a role's samples. If the iteration draws no samples of the role, a single
    answer per sample is assumed.
    """
    return longest_context(case.roles[name], draws[name].episode if name in draws else EpisodeEstimate())


def _players(case: Case, name: str) -> list[str]:
    """Returns all roles whose answers are generated by the engines of one role. `name`: this role, which is one of the
    returned roles."""
    return [player for player, role in case.roles.items() if role.servers == name]


def _role(case: Case, actor: Actor, name: str, draws: Mapping[str, Draw], *, trained: bool) -> RolePlan:
    """Estimates the memory of a role on the trainer's ranks. `draws`: role -> the role's samples in an iteration.
    `trained`: False for a role that generates but is never trained, and so holds only its weights."""
    role, engine, (shape, parallel, numbers, _) = case.roles[name], case.spec.engine.settings, actor
    reference = role.reference or "reference" in loss_of(role).needs
    own_draws = [draws.get(role_name) for role_name, role_spec in case.roles.items() if role_spec.owner == name]
    micro = max((micro_batch(role, draw) for draw in own_draws), key=lambda batch: batch.behind)
    held = memory.worst(
        actor, micro, reference=reference, shared=owners(case.roles, case.role_ranks).get(name, name) != name
    )
    adapter_bytes = float(numbers.width * actor.adapters(0))
    if not trained:
        held, reference = TrainingBytes(weights=held.weights if role.has_policy else 0.0), False
    embedded, cache = 0.0, 0.0
    if isinstance(engine, Embedded) and name in case.spec.engine.opened:
        embedded = float(numbers.width * counting.total(shape)) * writers_of(role)
        if (
            trained and engine.quantization
        ):  # the engine keeps the quantised values, and computes with dequantised weights
            embedded += counting.engine_bytes(shape, 0, FORMATS[engine.quantization])
        tokens = max(
            min(engine.max_batch, -(-(draws[player].samples if player in draws else 1) // parallel.world))
            * _longest(case, player, draws)
            for player in _players(case, name)
        )
        cache = writers_of(role) * float(tokens * compute.kv_bytes(shape, numbers.width))
    leaves = case.colocated
    asleep = (held.optimizer if role.sleep or leaves else 0.0) + (held.weights if leaves else 0.0)
    return RolePlan(
        name=name, ranks=case.role_ranks[name], shape=shape, parallel=parallel, training=held, embedded=embedded,
        cache=cache, sleeps=role.sleep, leaves=leaves,
        host=asleep + ((held.weights if role.lora is None else adapter_bytes) if reference else 0.0),
    )  # fmt: skip


def _server(case: Case, settings: Servers, name: str, draws: Mapping[str, Draw]) -> ServerPlan:
    role, shape = case.roles[name], case.models[name]
    width = Precision.gpu(role.model.dtype).width
    problems = engine_problems(shape.sizes, settings.tp, shape.name, expert_parallel=settings.expert_parallel)
    refuse(*(f"engine of {name}: {line}" for line in problems))
    form = FORMATS[settings.quantization] if settings.quantization and role.has_policy else None
    weights = writers_of(role) * counting.engine_bytes(shape, width, form) / settings.tp
    share = settings.memory_share * case.cluster.device.memory
    cache = share - weights - ENGINE_WORKSPACE
    longest = max(_longest(case, player, draws) for player in _players(case, name))
    copies = shape.sizes.cache_copies(settings.tp)
    token = compute.kv_bytes(shape, settings.cache_width or width)
    sequences = max(0.0, cache) * settings.tp / copies / token / longest / writers_of(role)
    asleep = ASLEEP if settings.colocate else 0.0
    where = case.spec.engine.refit.staging
    adapters = role.lora is not None and settings.serves_adapters  # these servers receive only adapters
    staged = role.has_policy and not adapters and (where == "host" or (where == "off" and settings.stages_experts))
    layout = EngineLayout(
        tp=settings.tp, expert_parallel=settings.expert_parallel, quantization=settings.quantization if form else None
    )
    staging = counting.staging_bytes(shape.sizes, layout, width, experts_only=where == "off") if staged else 0
    return ServerPlan(
        role=name, weights=weights, cache=cache, sequences=sequences, share=share, asleep=asleep, staging=staging
    )


def _engine(case: Case, server: ServerPlan | None, ranks: int) -> EngineSetup:
    """Returns the engines of a role. `ranks`: number of the role's ranks, each of which has an embedded engine."""
    settings = case.spec.engine.settings
    form = FORMATS[settings.quantization] if settings.quantization else None
    if isinstance(settings, Servers):
        cached = not NO_CACHE & set(settings.args)
        return EngineSetup(
            replicas=settings.replicas,
            tp=settings.tp,
            max_batch=min(settings.max_batch, settings.at_once),
            kv_bytes=0.0 if server is None else max(server.cache, 1.0),
            expert_parallel=settings.expert_parallel,
            keeps_prefix=cached,
            shares_prompt=cached,
            overlapped=not NO_OVERLAP & set(settings.args),
            format=form,
            cache_width=settings.cache_width,
        )
    # kv_bytes is in effect unlimited: the embedded engine's KV cache grows as needed
    return EngineSetup(
        replicas=ranks, tp=1, max_batch=settings.max_batch, kv_bytes=1e18, compiled=False, keeps_prefix=False,
        overlapped=False,
    )  # fmt: skip
