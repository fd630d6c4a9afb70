"""Tries layouts and engines for a run: finds the fastest that fit a cluster, and cures for a run that does not fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.engine_kinds import default_servers
from megatron_rl.config.schema import ConfigError, Embedded, Layout, RoleConfig, Servers, TrainConfig
from megatron_rl.models.divisibility import Axes, allowed, engine_violations, trainer_problems
from megatron_rl.models.shape import Shape
from megatron_rl.planning import plan as plans
from megatron_rl.planning.hardware import GIB, Cluster
from megatron_rl.planning.phases import policy_of
from megatron_rl.planning.plan import RunPlan
from megatron_rl.planning.workload import IterationWork
from megatron_rl.spec.resolve import resolve
from megatron_rl.weights import counting

ENGINE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # shares of the cluster's nodes that engines may take
COLOCATED_SHARE, OWN_SHARE = 0.86, 0.9  # of a GPU: that servers of all roles take in the trainer's, and in their own
PAIRS = 150  # combinations of the roles' layouts that are tried for each choice of engines
MICRO_BATCHES = (32768, 16384, 8192, 4096)  # tokens of a micro-batch that are tried beside the config's own
WORTH = 0.03  # share of a cycle's time that a change must save to be advised
MOST = 5  # lines of advice on changes that save time
HOST_MEMORY = 450 * GIB  # of a node, from which it is pointed out: nodes with 512 GiB are the smallest that are common
# How many times the planned seconds of a longest answer a request should be waited for: it also waits in the server's
# queue, a refit may stand between, and the plan of generation is right within 30 % at best. Assumed.
PATIENCE = 2.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A config that fits, its plan, and how it differs from the config that was asked about."""

    config: TrainConfig
    plan: RunPlan
    overrides: Sequence[str]  # a.b=c arguments that make this config of the one asked about


def search(
    config: TrainConfig, cluster: Cluster, models: Mapping[str, Shape], work: Sequence[IterationWork], *, keep: int = 5
) -> list[Proposal]:
    """Returns the fastest layouts of all roles and choices of engines that fit, best first; none when nothing fits.

    Every one passes `check`. Layouts have neither context nor virtual pipeline parallelism, and have sequence
    parallelism wherever tp is above 1. With each layout nothing, the feed-forward or everything is computed again, in
    the largest micro-batches that fit, or in those of the config where these are smaller.
    """
    best: list[Proposal] = []
    for with_engine in engine_choices(config, cluster, models):
        best += _with_engines(with_engine, config, cluster, models, work, keep)
    best = sorted(best, key=lambda found: found.plan.cycle_s)[:keep]
    grown = [_grown(config, one, models, work) for one in best]
    different = {tuple(one.overrides): one for one in grown}  # two may have grown to the same
    return sorted(different.values(), key=lambda found: found.plan.cycle_s)


def advice(config: TrainConfig, made: RunPlan, models: Mapping[str, Shape], work: Sequence[IterationWork]) -> list[str]:
    """Returns lines on what would make the run fit, or faster where it fits; the most useful come first."""
    if made.problems:
        return _cures(config, made, models, work) or [
            "no single change makes it fit: --search looks at all of them together"
        ]
    lines, phases = [], made.phases
    name, seconds = max(phases.items(), key=lambda item: item[1])
    drawn = sum(s for phase, s in phases.items() if phase.startswith("rollout"))
    total = sum(phases.values())
    lines.append(f"{name} is {seconds / total:.0%} of the work of a cycle, all generation {drawn / total:.0%}")
    paying = []
    for text, other in _changes(config, made, models):
        tried = _plan_or_none(other, made.cluster, models, work)
        if tried is not None and not tried.problems and tried.cycle_s < (1 - WORTH) * made.cycle_s:
            saved = 1 - tried.cycle_s / made.cycle_s
            words = nodes_words(config, other, tried) if tried.ranks != made.ranks else []
            if isinstance(other.engine, Servers):
                words += _place_words(other.engine, config.engine)
            also = f" ({' '.join(words)})" if words else ""
            line = f"{text}{also}: {tried.cycle_s:.0f} s a cycle instead of {made.cycle_s:.0f} ({saved:.0%} less)"
            paying.append((tried.cycle_s, line))
    lines += [text for _, text in sorted(paying)[:MOST]] + _waits(config, made)
    node = made.cluster.per_node
    for role in made.roles:
        if role.parallel.tp > node:
            lines.append(
                f"{role.name}: tp {role.parallel.tp} is more than a node's {node} GPUs: "
                "its all-reduces go over the network"
            )
    if made.host_per_node > HOST_MEMORY:
        lines.append(
            f"roles that sleep and references hold {made.host_per_node / GIB:.0f} GiB of each node's own memory: "
            "check that a node has as much"
        )
    return lines


def _waits(config: TrainConfig, made: RunPlan) -> list[str]:
    """Returns a line for each role whose longest answer may take longer than a request may, and for each endpoint."""
    lines = []
    for name in config.roles:
        own = [iteration for iteration in made.iterations if name in iteration.longest]
        if not own or not isinstance(config.engine, Servers):
            continue
        worst, limit = max(own, key=lambda iteration: iteration.longest[name]), config.engine.request_timeout_s
        seconds = worst.longest[name]
        if PATIENCE * seconds > limit:
            lines.append(
                f"the longest answer of {name} takes {seconds:.0f} s among the {worst.rows[name]:.0f} that a server "
                f"decodes at once, and a request ends after engine.request_timeout_s = {limit:g}: set it to "
                f"{PATIENCE:g} times as much, engine.request_timeout_s={math.ceil(PATIENCE * seconds / 100) * 100}"
            )
    away = [name for name, role in config.roles.items() if role.endpoint is not None]
    return lines + [f"{name} is played by an endpoint: what its answers take is not in this plan" for name in away]


def layouts(role: RoleConfig, shape: Shape, ranks: int, per_node: int) -> Iterator[Layout]:
    """Yields the layouts that divide the model and the ranks. tp stays within a node."""
    sizes = shape.sizes
    whole = allowed(sizes, "tp"), allowed(sizes, "pp x vpp"), allowed(sizes, "ep")
    tps = [tp for tp in (1, 2, 4, 8, 16) if tp <= per_node and whole[0](tp)]
    pps = [pp for pp in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32) if whole[1](pp)]
    eps = [ep for i in range(10) for ep in (2**i, 3 * 2**i) if whole[2](ep)] if sizes.experts else [1]
    for tp, pp, ep in itertools.product(tps, pps, eps):
        for etp in sorted({1, tp}) if sizes.experts else [None]:
            layout = Layout(tp=tp, pp=pp, ep=ep, etp=None if etp in (None, tp) else etp, sequence_parallel=tp > 1)
            if ranks % layout.model_ranks or ranks % layout.expert_ranks:
                continue
            if sizes.experts and layout.expert_tp * ep > ranks // pp:
                continue
            if not trainer_problems(sizes, Axes.of(layout), shape.name):
                yield layout


def engine_choices(config: TrainConfig, cluster: Cluster, models: Mapping[str, Shape]) -> Iterator[TrainConfig]:
    """Yields the config with each choice of engines worth trying."""
    if isinstance(config.engine, Embedded):
        yield config
    settings = config.engine if isinstance(config.engine, Servers) else default_servers()
    models = {name: models[name] for name in config.server_roles}
    width = max({"bfloat16": 2, "float32": 4}[config.roles[name].model.dtype] for name in models)
    largest = max(width * counting.total(shape) for shape in models.values())
    room = settings.memory_share * cluster.device.memory * 0.75
    seen = set()
    for share, tp in itertools.product(ENGINE_SHARES, (1, 2, 4, 8, 16, 32, 64)):
        if largest / tp > room or any(
            engine_violations(shape.sizes, tp, expert_parallel=settings.expert_parallel) for shape in models.values()
        ):
            continue
        gpus = round(share * cluster.nodes) * cluster.per_node if cluster.nodes > 1 else int(share * cluster.per_node)
        replicas = gpus // (tp * len(models))
        if replicas < 1 or (replicas, tp) in seen or gpus >= cluster.gpus:
            continue
        seen.add((replicas, tp))
        own = {"colocate": False, "memory_share": OWN_SHARE} if settings.colocate else {}
        engine = replace(settings, replicas=replicas, tp=tp, urls={}, gpus=(), **own)
        yield _beside_trainer(replace(config, engine=engine), cluster)
    yield from _colocated_choices(config, settings, cluster, models, largest)


def _colocated_choices(
    config: TrainConfig, settings: Servers, cluster: Cluster, models: Mapping[str, Shape], largest: float
) -> Iterator[TrainConfig]:
    """Yields the config with servers of each role in all of the trainer's GPUs, of each size within a node."""
    if config.rollouts.max_staleness or any(role.lora is not None for role in config.roles.values()):
        return
    share = settings.memory_share if settings.colocate else round(COLOCATED_SHARE / len(config.server_roles), 2)
    for tp in (1, 2, 4, 8, 16):
        if tp > cluster.per_node or cluster.per_node % tp or largest / tp > share * cluster.device.memory * 0.75:
            continue
        if any(engine_violations(s.sizes, tp, expert_parallel=settings.expert_parallel) for s in models.values()):
            continue
        engine = replace(
            settings,
            replicas=cluster.gpus // tp,
            tp=tp,
            urls={},
            gpus=(),
            colocate=True,
            memory_share=share,
            start=True,
        )
        yield replace(config, engine=engine)


def _beside_trainer(config: TrainConfig, cluster: Cluster) -> TrainConfig:
    """Returns the config with its servers on the last GPUs of the trainer's node where the cluster has no other one:
    only a run that starts its servers itself has them there."""
    engine, wanted = config.engine, plans.server_gpus(config)
    if not isinstance(engine, Servers) or cluster.nodes > 1 or not 0 < wanted < cluster.per_node:
        return config
    gpus = tuple(range(cluster.per_node - wanted, cluster.per_node))
    return replace(config, engine=replace(engine, gpus=gpus, start=True))


def engine_words(engine: Servers, asked: Embedded | Servers) -> list[str]:
    """Returns the arguments that make `asked`, a config's engine, this one."""
    words = [f"engine.kind={engine.kind}", f"engine.replicas={engine.replicas}", f"engine.tp={engine.tp}"]
    words += [f"engine.colocate={str(engine.colocate).lower()}", f"engine.memory_share={engine.memory_share:g}"]
    return words + _place_words(engine, asked)


def _place_words(engine: Servers, asked: Embedded | Servers) -> list[str]:
    """Returns the arguments that move the servers of `asked` to where those of `engine` stand. None of them can take
    `urls` out of a config."""
    before, words = asked if isinstance(asked, Servers) else default_servers(), []
    if engine.gpus != before.gpus:
        words.append(f"engine.gpus=[{','.join(map(str, engine.gpus))}]")
    if engine.start != before.start:
        words.append(f"engine.start={str(engine.start).lower()}")
    return words


def nodes_words(asked: TrainConfig, config: TrainConfig, made: RunPlan) -> list[str]:
    """Returns the arguments that give the trainer the nodes that it has in the plan of `config`, and as many ranks
    where it shares its node with servers; none where the config asked about has as many."""
    nodes = -(-made.ranks // made.cluster.per_node)
    words = [] if nodes == asked.job.nodes else [f"job.nodes={nodes}"]
    shared = isinstance(config.engine, Servers) and bool(config.engine.gpus)
    if nodes == 1 and made.ranks != asked.launch.nproc and (shared or asked.launch.nproc > 1):
        words.append(f"launch.nproc={made.ranks}")
    return words


def _with_engines(
    config: TrainConfig, asked: TrainConfig, cluster: Cluster, models: Mapping[str, Shape],
    work: Sequence[IterationWork],
    keep: int,
) -> list[Proposal]:  # fmt: skip
    """Returns the best layouts of the roles for the engines of `config`, fastest first.

    First each role is tried alone; then the best layouts of the roles are combined, and those that fit together stay.
    """
    names = _with_policy(config)
    limit = max(4, int(PAIRS ** (1 / len(names))))
    choices: dict[str, list[RoleConfig]] = {}
    for name in names:
        iterations = [iteration for iteration in work if name in {policy_of(config, role) for role in iteration.roles}]
        fitting = list(_fitting_alone(config, name, cluster, models, iterations))
        small = sorted(fitting, key=lambda choice: choice[1])[: limit // 3]
        fast = [choice for choice in sorted(fitting, key=lambda choice: choice[0]) if choice not in small]
        choices[name] = [choice[2] for choice in [*fast[: limit - len(small)], *small]]
    out: list[Proposal] = []
    for chosen in itertools.product(*choices.values()):
        made_config = replace(config, roles={**config.roles, **dict(zip(choices, chosen, strict=True))})
        made = _plan_or_none(made_config, cluster, models, work)
        if made is None or made.problems or not passes(made_config, made.ranks):
            continue
        out.append(Proposal(config=made_config, plan=made, overrides=_overrides(asked, made_config, made)))
    return sorted(out, key=lambda found: found.plan.cycle_s)[:keep]


def _grown(
    asked: TrainConfig, found: Proposal, models: Mapping[str, Shape], work: Sequence[IterationWork]
) -> Proposal:  # fmt: skip
    """Returns the proposal with the largest micro-batches that fit beside the other roles and save time."""
    for name in _with_policy(found.config):
        role = found.config.roles[name]
        for tokens in _micro_batches(role):
            if tokens <= role.micro_batch_tokens:
                break
            config = _with_role(found.config, name, micro_batch_tokens=tokens)
            made = _plan_or_none(config, found.plan.cluster, models, work)
            if made is None or made.problems or made.cycle_s >= found.plan.cycle_s or not passes(config, made.ranks):
                continue
            found = Proposal(config=config, plan=made, overrides=_overrides(asked, config, made))
            break
    return found


def _fitting_alone(
    config: TrainConfig, name: str, cluster: Cluster, models: Mapping[str, Shape], iterations: Sequence[IterationWork]
) -> Iterator[tuple[float, float, RoleConfig]]:
    """Yields (seconds of a cycle, bytes, role) for every way to train a role that fits when nothing else is there."""
    role, ranks = config.roles[name], plans.trainer_gpus(config, cluster)
    for layout, recompute in itertools.product(
        layouts(role, models[name], ranks, cluster.per_node), _recomputes(models[name])
    ):
        fits = False
        for tokens in _micro_batches(role):
            if fits and tokens != role.micro_batch_tokens:
                continue  # a larger one fits
            model = replace(role.model, **recompute)
            other = replace(role, layout=layout, model=model, micro_batch_tokens=tokens, sleep=True)
            alone = replace(config, roles={**config.roles, name: other})
            made = _plan_or_none(alone, cluster, models, iterations, only=name)
            if made is not None and _alone_fits(made, name):
                own = next(one for one in made.roles if one.name == name)
                yield made.cycle_s, own.training.peak + own.asleep, other
                fits = True


def _recomputes(shape: Shape) -> list[dict[str, Any]]:
    """Returns the settings of recomputation that are tried: nothing, the largest part of a layer, everything."""
    part = "moe" if shape.sizes.experts else "mlp"
    return [
        {"recompute": "none"}, {"recompute": "selective", "recompute_modules": (part,)}, {"recompute": "full"}
    ]  # fmt: skip


def _micro_batches(role: RoleConfig) -> list[int]:
    """Returns the sizes of micro-batches that hold the role's longest sample, the largest first; its own among them."""
    own, longest = role.micro_batch_tokens, role.max_prompt_tokens + role.sampling.max_tokens
    return sorted({own, *(tokens for tokens in MICRO_BATCHES if tokens >= min(own, longest))}, reverse=True)


def _plan_or_none(
    config: TrainConfig,
    cluster: Cluster,
    models: Mapping[str, Shape],
    work: Sequence[IterationWork],
    only: str | None = None,
) -> RunPlan | None:
    """Returns the plan of a config, or None when it cannot be cut so.

    `only`: a role that is tried alone. The others get a plain layout, because theirs may not divide these ranks.
    """
    if only is not None:
        plain = {
            name: role if name == only else replace(role, layout=Layout(), sleep=True)
            for name, role in config.roles.items()
        }
        config = replace(config, roles=plain)
    try:
        return plans.make(config, cluster, models, work)
    except ConfigError:
        return None


def _alone_fits(made: RunPlan, name: str) -> bool:
    """Returns whether the role fits when nothing else is on the GPU."""
    role = next(role for role in made.roles if role.name == name)
    return made.reserve + role.embedded + role.training.peak <= made.cluster.device.memory and all(
        s.sequences >= 1 for s in made.servers
    )


def passes(config: TrainConfig, ranks: int) -> bool:
    """Tells whether `check` takes the config on so many ranks of the trainer."""
    try:
        resolve(config, ranks, to_come=True)
    except ConfigError:
        return False
    return True


def _changes(config: TrainConfig, made: RunPlan, models: Mapping[str, Shape]) -> Iterator[tuple[str, TrainConfig]]:
    """Yields single changes that may save time, as (words, changed config)."""
    for name in _with_policy(config):
        role = config.roles[name]
        if role.model.recompute == "full":
            yield (
                f"{name} fits without recomputation (model.recompute=none)",
                _with_role(config, name, model=replace(role.model, recompute="none")),
            )
        for tokens in _micro_batches(role):
            if tokens > role.micro_batch_tokens:
                yield (
                    f"{name} fits with micro_batch_tokens={tokens}",
                    _with_role(config, name, micro_batch_tokens=tokens),
                )
        for layout in layouts(role, models[name], made.ranks, made.cluster.per_node):
            if layout != role.layout and layout.model_ranks <= role.layout.model_ranks:
                yield f"{name} fits at {_words(layout)}", _with_role(config, name, layout=layout)
        if role.model.recompute == "full" and role.layout.tp > 1 and not role.layout.sequence_parallel:
            layout = replace(role.layout, sequence_parallel=True)
            yield f"{name} with layout.sequence_parallel=true", _with_role(config, name, layout=layout)
    if isinstance(config.engine, Servers) and not config.engine.colocate:
        engine, node = config.engine, made.cluster.per_node
        more = max(1, node // (engine.tp * len(config.server_roles)))
        other = replace(config, engine=replace(engine, replicas=engine.replicas + more))
        yield (
            f"{more} engine replicas more for each role, by engine.replicas={engine.replicas + more}",
            _beside_trainer(other, made.cluster) if engine.gpus else other,
        )


def _cures(config: TrainConfig, made: RunPlan, models: Mapping[str, Shape], work: Sequence[IterationWork]) -> list[str]:
    """Returns lines on single changes, of one role or of all alike, that make the run fit."""
    lines, held = [], _with_policy(config)
    for names in [[name] for name in held] + ([held] if len(held) > 1 else []):
        if lines and len(names) > 1:
            break  # one role's change is enough
        for words, changes in _smaller_roles(config.roles[names[0]], models[names[0]], made):
            other = config
            for name in names:
                own = changes | (
                    {"model": replace(config.roles[name].model, recompute="full")} if "model" in changes else {}
                )
                other = _with_role(other, name, **own)
            tried = _plan_or_none(other, made.cluster, models, work)
            if tried is not None and not tried.problems:
                lines.append(
                    f"{' and '.join(names)} fit{'s' * (len(names) == 1)} with {words}: {tried.cycle_s:.0f} s a cycle"
                )
                break
    if isinstance(config.engine, Servers):
        return lines
    replicas = max(1, made.cluster.gpus // 2 // len(config.server_roles))
    other = _beside_trainer(replace(config, engine=replace(default_servers(), replicas=replicas)), made.cluster)
    tried = _plan_or_none(other, made.cluster, models, work)
    if tried is not None and not tried.problems and isinstance(other.engine, Servers):
        places = _place_words(other.engine, config.engine) + nodes_words(config, other, tried)
        words = " ".join(["engine.kind=vllm", f"engine.replicas={replicas}", *places])
        lines.append(
            "vLLM servers on half of the GPUs in place of the embedded engine fit "
            f"({words}): {tried.cycle_s:.0f} s a cycle"
        )
    return lines


def _smaller_roles(role: RoleConfig, shape: Shape, made: RunPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (words, changed fields) that lower the memory a role needs, the mildest change first."""
    if not role.sleep:
        yield "sleep=true", {"sleep": True}
    if role.model.recompute != "full":
        yield "model.recompute=full", {"model": replace(role.model, recompute="full")}
    for layout in sorted(
        layouts(role, shape, made.ranks, made.cluster.per_node),
        key=lambda layout: (layout.model_ranks, layout.expert_ranks),
    ):
        yield f"layout {_words(layout)}", {"layout": layout}


def _with_policy(config: TrainConfig) -> list[str]:
    """Returns the roles that the trainer holds a model for: no other role's, and no endpoint's."""
    return [name for name, role in config.roles.items() if role.has_policy]


def _with_role(config: TrainConfig, name: str, **changes: Any) -> TrainConfig:
    return replace(config, roles={**config.roles, name: replace(config.roles[name], **changes)})


def _words(layout: Layout) -> str:
    numbers = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    words = [f"{axis}={size}" for axis, size in numbers.items() if size > 1 or axis == "tp"]
    return " ".join(words + ([f"etp={layout.etp}"] if layout.etp is not None else []))


def _overrides(asked: TrainConfig, config: TrainConfig, made: RunPlan) -> list[str]:
    """Returns the arguments that turn the config that was asked about into this one, on the nodes of its plan."""
    out = []
    for name in _with_policy(config):
        role = config.roles[name]
        layout, recompute, before = role.layout, role.model.recompute, asked.roles[name]
        etp = "null" if layout.etp is None else layout.etp
        together = str(layout.sequence_parallel).lower()
        wanted = (
            f"{{tp: {layout.tp}, pp: {layout.pp}, vpp: null, ep: {layout.ep}, etp: {etp}, "
            f"sequence_parallel: {together}}}"
        )
        modules = f"[{', '.join(role.model.recompute_modules)}]"
        micro = role.micro_batch_tokens
        out += [f"roles.{name}.layout={wanted}"] if layout != before.layout else []
        out += [f"roles.{name}.model.recompute={recompute}"] if recompute != before.model.recompute else []
        if recompute == "selective" and role.model.recompute_modules != before.model.recompute_modules:
            out += [f"roles.{name}.model.recompute_modules={modules}"]
        out += [f"roles.{name}.micro_batch_tokens={micro}"] if micro != before.micro_batch_tokens else []
        out += [f"roles.{name}.sleep=true"] if role.sleep != before.sleep else []
    if config.engine != asked.engine and isinstance(config.engine, Servers):
        out += engine_words(config.engine, asked.engine)
    return out + nodes_words(asked, config, made)
