"""Searches layouts and engines for a run: the fastest that fit a cluster, and changes that make a run fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron_rl.config.base import ConfigError
from megatron_rl.config.engine_kinds import default_servers
from megatron_rl.config.model import WEIGHT_BYTES
from megatron_rl.config.schema import Embedded, Layout, RoleConfig
from megatron_rl.models.divisibility import allowed, engine_violations, trainer_problems
from megatron_rl.models.shape import Shape
from megatron_rl.planning.case import PER_NODE, Case
from megatron_rl.planning.hardware import GIB
from megatron_rl.planning.placements import Candidate, Placements
from megatron_rl.planning.plan import RunPlan, make_or_none
from megatron_rl.planning.schedule import simulated
from megatron_rl.spec.rank_sets import ALL
from megatron_rl.spec.run_spec import RoleSpec
from megatron_rl.weights import counting

# shares of the cluster's nodes that the search tries to give to the engines
ENGINE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
# share of a GPU's memory that servers use: COLOCATED_SHARE for the servers of all roles together on a GPU of the
# trainer, OWN_SHARE for a server on a separate GPU
COLOCATED_SHARE, OWN_SHARE = 0.86, 0.9
SIMULATED = 40  # number of placements that are simulated, those with the best estimates
SHARED = 0.99  # roles share all ranks unless a cycle on ranks of their own takes at most this share of the time
# micro-batch sizes in tokens that are tried in addition to the configured size
MICRO_BATCHES = (32768, 16384, 8192, 4096)
WORTH = 0.03  # minimum share of a cycle's time that a change must save to be advised
MOST = 5  # maximum number of lines of advice on changes that save time
# bytes of host memory per node above which a warning is printed; common nodes have at least 512 GiB
HOST_MEMORY = 450 * GIB
# Assumed minimum ratio of a request's timeout to the estimated seconds of the longest answer.
# A request also waits in the server's queue and during refits, and the estimate is accurate to 30 % at best.
PATIENCE = 2.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A run that fits into memory, its estimate, and the overrides that change the original config to this run."""

    case: Case
    plan: RunPlan
    overrides: Sequence[str]  # command-line overrides (a.b=c) that change the original config to this run

    @property
    def shared(self) -> bool:
        """Returns whether all roles share all ranks."""
        return all(len(role.ranks) == self.plan.ranks for role in self.plan.roles)


def search(base: Case, *, keep: int = 5) -> list[Proposal]:
    """Returns the fastest combinations of ranks and layouts of the roles and of engines that fit into memory, fastest
    first. Returns an empty list if nothing fits.

    `keep`: the maximum number of proposals. If all of them have all roles on all ranks, or if none of them has, the
    fastest proposal of the other kind follows as one more, if there is one.

    Every proposal passes `megatron-rl check`. The tried layouts use no context parallelism and no virtual pipeline
    parallelism, and use sequence parallelism if tp > 1. For each layout, three recomputation settings are tried: none,
    the feed-forward part, and everything. Each setting is tried with the largest micro-batch size that fits, and with
    the configured size if it fits.
    """
    placements = Placements(_variants)
    plain = with_ranks(base, dict.fromkeys(base.roles, ALL))
    found = [candidate for case in engine_choices(plain) for candidate in placements.candidates(case, keep)]
    found.sort(key=lambda candidate: candidate.seconds)
    shared = [candidate for candidate in found if candidate.shared][:SIMULATED]
    apart = [candidate for candidate in found if not candidate.shared][:SIMULATED]
    best = [*_best(base, shared, keep), *_best(base, apart, keep)]
    different = {tuple(proposal.overrides): proposal for proposal in best}  # two proposals may have become equal
    ranked = sorted(different.values(), key=lambda proposal: proposal.plan.cycle_s)
    kinds = {proposal.shared for proposal in ranked[:keep]}
    others = {proposal.shared: proposal for proposal in reversed(ranked[keep:]) if proposal.shared not in kinds}
    return [*ranked[:keep], *others.values()]


def best_ranks(base: Case) -> tuple[dict[str, str], float, float | None]:
    """Returns (the ranks of each role with which the run is fastest, seconds of a cycle with them, and with all roles
    on all ranks). The ranks are values of roles.NAME.ranks; others than `all` save at least 1 - SHARED of the time. The
    last value is None if the roles do not fit together.

    Layouts, micro-batches and engines are the configured ones. Raises ConfigError if nothing fits into memory.
    """

    def configured(case: Case, name: str, ranks: int) -> Iterator[RoleSpec]:
        if not [*case.roles[name].layout.rank_problems(ranks)]:
            yield case.roles[name]

    plain = with_ranks(base, dict.fromkeys(base.roles, ALL))
    found = Placements(configured).candidates(plain, keep=1)
    apart = sorted((one for one in found if not one.shared), key=lambda candidate: candidate.seconds)[:SIMULATED]
    placed = [{name: role.ranks for name, role in candidate.case.roles.items()} for candidate in apart]
    plans = [(case, make_or_none(case)) for case in (plain, *(with_ranks(plain, ranks) for ranks in placed))]
    fitting = [
        (case, simulated(case, plan).cycle_s)
        for case, plan in plans
        if plan is not None and not plan.problems and case.passes()
    ]
    if not fitting:
        raise ConfigError(
            "with these layouts the roles do not fit into memory, neither on shared ranks nor on ranks of their own: "
            "`megatron-rl plan CONFIG --search` tries other layouts, too"
        )
    case, seconds = min(fitting, key=lambda pair: pair[1])
    shared = next((own for one, own in fitting if one is plain), None)
    if shared is not None and seconds > SHARED * shared:
        case, seconds = plain, shared
    return {name: str(role.ranks) for name, role in case.roles.items()}, seconds, shared


def with_ranks(case: Case, ranks: Mapping[str, int | str]) -> Case:
    """Returns a run whose roles have other ranks. `ranks`: {role: its ranks}."""
    return case.with_roles(**{name: replace(role, ranks=ranks[name]) for name, role in case.roles.items()})


def advice(case: Case, base_plan: RunPlan) -> list[str]:
    """Returns lines of advice on changes that make the run fit into memory or, if it fits, make it faster.

    The most useful line is first.
    """
    plans = [(new, plan) for new in _changes(case, base_plan) if (plan := make_or_none(new)) and not plan.problems]
    changes = [(new, simulated(new, plan)) for new, plan in plans]
    changes.sort(key=lambda change: change[1].cycle_s)
    if base_plan.problems:
        fitting = [f"it fits with {_words(case, new)}: {plan.cycle_s:.0f} s a cycle" for new, plan in changes[:MOST]]
        return fitting or ["no single change makes it fit: --search looks at all of them together"]
    phases = base_plan.phases
    name, seconds = max(phases.items(), key=lambda item: item[1])
    drawn = sum(s for phase, s in phases.items() if phase.startswith("rollout"))
    total = sum(phases.values())
    lines = [f"{name} is {seconds / total:.0%} of the work of a cycle, all generation {drawn / total:.0%}"]
    for new, plan in changes[:MOST]:
        saved = 1 - plan.cycle_s / base_plan.cycle_s
        if saved > WORTH:
            cycles = f"{plan.cycle_s:.0f} s a cycle instead of {base_plan.cycle_s:.0f} ({saved:.0%} less)"
            lines.append(f"{_words(case, new)}: {cycles}")
    lines += _waits(case, base_plan)
    node = base_plan.cluster.per_node
    lines += [
        f"{role.name}: tp {role.parallel.tp} is more than a node's {node} GPUs: its all-reduces go over the network"
        for role in base_plan.roles
        if role.parallel.tp > node
    ]
    if base_plan.host_per_node > HOST_MEMORY:
        lines.append(
            f"roles that sleep, references and servers hold {base_plan.host_per_node / GIB:.0f} GiB of each node's own "
            "memory: check that a node has as much"
        )
    if base_plan.staging_per_node > HOST_MEMORY:
        lines.append(
            f"servers receive weights in {base_plan.staging_per_node / GIB:.0f} GiB of each node's own memory: check "
            "that a node has as much, or set refit.staging to off"
        )
    return lines


def _waits(case: Case, plan: RunPlan) -> list[str]:
    """Returns a warning for each role whose longest answer may exceed the request timeout, and a note for each role
    whose answers come from an external endpoint.
    """
    lines = list[str]()
    for name in case.roles:
        iterations = [iteration for iteration in plan.iterations if name in iteration.longest]
        if not iterations or case.servers is None:
            continue
        worst, limit = max(iterations, key=lambda iteration: iteration.longest[name]), case.servers.request_timeout_s
        seconds = worst.longest[name]
        if PATIENCE * seconds > limit:
            lines.append(
                f"the longest answer of {name} takes {seconds:.0f} s among the {worst.rows[name]:.0f} that a server "
                f"decodes at once, and a request ends after engine.request_timeout_s = {limit:g}: set it to "
                f"{PATIENCE:g} times as much, engine.request_timeout_s={math.ceil(PATIENCE * seconds / 100) * 100}"
            )
    away = [name for name, role in case.roles.items() if role.endpoint is not None]
    return lines + [f"{name} is played by an endpoint: what its answers take is not in this plan" for name in away]


def layouts(role: RoleConfig, shape: Shape, ranks: int, per_node: int) -> Iterator[Layout]:
    """Yields the possible layouts of a role. The parallel sizes of each layout divide the model and the number of
    ranks, and tp is at most the number of GPUs of a node.
    """
    sizes = shape.sizes
    fits = {axis: allowed(sizes, axis) for axis in ("tp", "pp x vpp", "ep")}
    tps = [tp for tp in (1, 2, 4, 8, 16) if tp <= per_node and fits["tp"](tp)]
    pps = [pp for pp in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32) if fits["pp x vpp"](pp)]
    eps = [ep for i in range(10) for ep in (2**i, 3 * 2**i) if fits["ep"](ep)] if sizes.experts else [1]
    for tp, pp, ep in itertools.product(tps, pps, eps):
        for etp in sorted({1, tp}) if sizes.experts else [tp]:
            layout = Layout(tp=tp, pp=pp, ep=ep, etp=None if etp == tp else etp, sequence_parallel=tp > 1)
            divides = ranks % layout.model_ranks == 0 == ranks % layout.expert_ranks
            holds = not sizes.experts or etp * ep <= ranks // pp
            if divides and holds and not trainer_problems(sizes, layout, shape.name):
                yield layout


def engine_choices(case: Case) -> Iterator[Case]:
    """Yields variants of the run, one for each number, size and placement of engines that the search tries."""
    if isinstance(case.spec.engine.settings, Embedded):
        yield case
    settings, cluster, names = case.servers or default_servers(), case.cluster, case.spec.engine.server_roles
    width = {name: WEIGHT_BYTES[case.roles[name].model.dtype] for name in names}
    largest = max(width.values()) * max(counting.total(case.models[name]) for name in names)

    def holds(tp: int, share: float) -> bool:
        """Returns whether each role's model is divisible by `tp` and fits on a server of `tp` GPUs that uses the share
        `share` of their memory.
        """
        return largest / tp <= share * cluster.device.memory * 0.75 and not any(
            engine_violations(case.models[name].sizes, tp, expert_parallel=settings.expert_parallel) for name in names
        )

    seen = set[tuple[int, int]]()
    for share, tp in itertools.product(ENGINE_SHARES, (1, 2, 4, 8, 16, 32, 64)):
        gpus = round(share * cluster.nodes) * cluster.per_node if cluster.nodes > 1 else int(share * cluster.per_node)
        replicas = gpus // (tp * len(names))
        if not holds(tp, settings.memory_share) or replicas < 1 or (replicas, tp) in seen or gpus >= cluster.gpus:
            continue
        seen.add((replicas, tp))
        extra = {"colocate": False, "memory_share": OWN_SHARE} if settings.colocate else {}
        yield case.with_engine(replace(settings, replicas=replicas, tp=tp, urls={}, gpus=(), **extra)).beside_trainer()
    if case.spec.loop.rollouts.ahead or any(role.lora is not None for role in case.roles.values()):
        return
    # colocated servers: each role has servers on all of the trainer's GPUs, with any tp within a node
    share = settings.memory_share if settings.colocate else round(COLOCATED_SHARE / len(names), 2)
    for tp in (1, 2, 4, 8, 16):
        if tp <= cluster.per_node and not cluster.per_node % tp and holds(tp, share):
            extra = {"replicas": cluster.gpus // tp, "tp": tp, "memory_share": share, "colocate": True, "start": True}
            yield case.with_engine(replace(settings, urls={}, gpus=(), **extra))


def setting_words(place: str, old: Any, new: Any) -> list[str]:
    """Returns the config overrides that change some settings.

    `old`, `new`: the old and the new settings, two dataclasses of the same type.
    `place`: dotted name of the settings in the config, such as roles.generator.

    The field `urls` is left out, because no override can remove it from a config. The field `servers` is left out,
    because it follows from other settings.
    """
    words = list[str]()
    for name in (field.name for field in dataclasses.fields(new)):
        was, now = getattr(old, name), getattr(new, name)
        if was == now or name in ("urls", "servers"):
            continue
        if dataclasses.is_dataclass(now) and type(was) is type(now):
            words += setting_words(f"{place}.{name}", was, now)
        else:
            words.append(f"{place}.{name}={now if isinstance(now, str) else json.dumps(now, separators=(',', ':'))}")
    return words


def _nodes_words(base: Case, case: Case) -> list[str]:
    """Returns the config overrides that change the trainer's number of nodes from that of one run to that of another.

    `base`: the run with the original config. `case`: the changed run. If the trainer shares a single node with
    servers, the overrides also set the number of ranks. Returns an empty list if both runs have the same numbers.
    """
    ranks, cluster = case.ranks, base.spec.cluster
    nodes = -(-ranks // case.cluster.per_node)
    words = [] if nodes == cluster.job.nodes else [f"job.nodes={nodes}"]
    shared = case.servers is not None and bool(case.servers.gpus)
    if nodes == 1 and ranks != cluster.launch.nproc and (shared or cluster.launch.nproc > 1):
        words.append(f"launch.nproc={ranks}")
    return words


def _best(base: Case, candidates: Sequence[Candidate], keep: int) -> list[Proposal]:
    """Returns the fastest of some candidates, by simulation, with micro-batches as large as fit, fastest first."""
    plans = [(candidate.case, make_or_none(candidate.case)) for candidate in candidates]
    fitting = [(case, simulated(case, plan)) for case, plan in plans if plan is not None and not plan.problems]
    fitting.sort(key=lambda pair: pair[1].cycle_s)
    # a config with one rank and servers beside it stands for a whole node of PER_NODE GPUs (own_cluster)
    alone = base.cluster.nodes == 1 and base.cluster.per_node != PER_NODE
    accepted = (pair for pair in fitting if pair[0].passes() and not (alone and pair[0].ranks == 1))
    return [
        _grown(base, Proposal(case=case, plan=plan, overrides=overrides(base, case)))
        for case, plan in itertools.islice(accepted, keep)
    ]


def _proposal(base: Case, case: Case) -> Proposal | None:
    """Returns a run as a proposal. Returns None if the run does not fit into memory or if `megatron-rl check` would
    refuse it.
    """
    plan = make_or_none(case)
    if plan is None or plan.problems or not case.passes():
        return None
    return Proposal(case=case, plan=plan, overrides=overrides(base, case))


def _grown(base: Case, proposal: Proposal) -> Proposal:
    """Returns the proposal with larger micro-batches, and with roles that stay on the GPU while others train, if these
    fit into memory and save time.
    """
    for name in proposal.case.held:
        role = proposal.case.roles[name]
        for tokens in (tokens for tokens in _micro_batches(role) if tokens > role.micro_batch_tokens):
            grown = _proposal(base, proposal.case.with_role(name, micro_batch_tokens=tokens))
            if grown is None:
                continue
            grown = replace(grown, plan=simulated(grown.case, grown.plan))
            if grown.plan.cycle_s < proposal.plan.cycle_s:
                proposal = grown
                break
        awake = _proposal(base, proposal.case.with_role(name, sleep=False))
        if awake is not None:
            awake = replace(awake, plan=simulated(awake.case, awake.plan))
            proposal = min(proposal, awake, key=lambda one: one.plan.cycle_s)
    return proposal


def _variants(case: Case, name: str, ranks: int) -> Iterator[RoleSpec]:
    """Yields a role with each layout on `ranks` ranks, recomputation and micro-batch size that the search tries."""
    role, shape = case.roles[name], case.models[name]
    part = "moe" if shape.sizes.experts else "mlp"  # the largest part of a layer
    recomputes = {"recompute": "none"}, {"recompute": "selective", "recompute_modules": (part,)}, {"recompute": "full"}
    choices = itertools.product(layouts(role, shape, ranks, case.cluster.per_node), recomputes)
    for layout, recompute in choices:
        model = replace(role.model, **cast(Any, recompute))
        for tokens in _micro_batches(role):
            yield replace(role, layout=layout, model=model, micro_batch_tokens=tokens, sleep=True)


def _micro_batches(role: RoleConfig) -> list[int]:
    """Returns the micro-batch sizes in tokens to try, largest first: the configured size, and the sizes of
    MICRO_BATCHES that hold the role's longest sample.
    """
    size, longest = role.micro_batch_tokens, role.max_prompt_tokens + role.sampling.max_tokens
    return sorted({size, *(tokens for tokens in MICRO_BATCHES if tokens >= min(size, longest))}, reverse=True)


def _changes(case: Case, plan: RunPlan) -> Iterator[Case]:
    """Yields variants of the run with one change each: to one role, to all roles alike, or to the engines."""
    node = plan.cluster.per_node
    for names in [[name] for name in case.held] + ([case.held] if len(case.held) > 1 else []):
        role, shape = case.roles[names[0]], case.models[names[0]]
        sleep: list[dict[str, Any]] = [] if role.sleep else [{"sleep": True}]
        recomputed = [{"recompute": kind} for kind in ("none", "full") if kind != role.model.recompute]
        tokens = [{"micro_batch_tokens": number} for number in _micro_batches(role) if number > role.micro_batch_tokens]
        cut = [{"layout": layout} for layout in layouts(role, shape, plan.ranks, node) if layout != role.layout]
        for change in [*sleep, *recomputed, *tokens, *cut]:
            variant = case
            for name in names:
                model = {"model": replace(case.roles[name].model, **change)} if "recompute" in change else change
                variant = variant.with_role(name, **model)
            yield variant
    sets, engine = len(case.spec.engine.server_roles), case.servers
    if engine is None:  # try servers on half of the GPUs instead of the embedded engine
        yield case.with_engine(
            replace(default_servers(), replicas=max(1, plan.cluster.gpus // 2 // sets))
        ).beside_trainer()
    elif not engine.colocate:
        variant = case.with_engine(replace(engine, replicas=engine.replicas + max(1, node // (engine.tp * sets))))
        yield variant.beside_trainer() if engine.gpus else variant


def _words(base: Case, case: Case) -> str:
    """Returns the result of `overrides` as words of a command line."""
    return " ".join(overrides(base, case))


def overrides(base: Case, case: Case) -> list[str]:
    """Returns the config overrides that change a run's config, including the number of the trainer's nodes.

    `base`: the run with the original config. `case`: the run with the changed config.
    """
    words = [word for name in case.held for word in setting_words(f"roles.{name}", base.roles[name], case.roles[name])]
    if case.servers is None:
        words += [] if base.servers is None else ["engine={kind: embedded}"]
    else:
        words += [f"engine.kind={case.servers.kind}"] if base.servers is None else []
        words += setting_words("engine", base.servers or default_servers(), case.servers)
    words += setting_words("rollouts", base.spec.loop.rollouts, case.spec.loop.rollouts)
    return words + _nodes_words(base, case)
