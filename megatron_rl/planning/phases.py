"""Plans one iteration: the seconds of its phases, and what is assumed of roles that answer several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.config.schema import RoleConfig
from megatron_rl.planning import compute, memory
from megatron_rl.planning.case import Case
from megatron_rl.planning.compute import EngineSetup, SequenceBatch
from megatron_rl.planning.hardware import HOST, Cluster
from megatron_rl.planning.memory import Actor, MicroBatchLoad, Precision
from megatron_rl.planning.workload import Draw, IterationWork, longest_context
from megatron_rl.weights import counting

GRADING_S = 0.02  # one of reward.workers grades one response
CHANGE_S = 1.0  # the orders to servers and supervisors, and freeing memory, when the GPUs change hands. Assumed


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """The assumptions of an iteration's plan on a role that answers several times in a sample, and what follows from
    them."""

    role: str
    estimate: EpisodeEstimate
    answer: float  # mean tokens of an answer
    longest: int  # tokens of the longest sample
    micro_batch: int | None  # tokens that a micro-batch of the role takes; None: it has no policy
    kept: bool  # what stands before an answer is kept in the engine
    waiting: float  # seconds that tools take longer than the generation that runs beside them

    def __str__(self) -> str:
        own = self.estimate
        parts = [
            f"{self.role} is taken to answer {own.answers} times in an episode, in {self.answer:.0f} tokens each",
            f"between two answers it is told {own.told} tokens, and its longest sample has {self.longest:,}",
            "an engine keeps what it has read of an episode until the next answer"
            if self.kept
            else "before each answer an engine reads again all that stands before it",
        ]
        if own.tool_s:
            beside = f"{self.waiting:,.0f} s longer than generation takes" if self.waiting else "hidden by generation"
            parts.append(
                f"tools take {own.tool_s:g} s between two answers, {own.calls_at_once} calls at once, beside the "
                f"generation of other episodes: {beside}"
            )
        if self.micro_batch is not None and self.longest > self.micro_batch:
            parts.append(
                f"a sample of more than {self.micro_batch:,} tokens would stop the run: raise "
                f"roles.{self.role}.micro_batch_tokens, or let episodes end before"
            )
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """The seconds of one iteration by phase, in order, and the tokens of it."""

    role: str  # the roles that it trains, joined by +
    times: int  # iterations like this one in a cycle
    phases: Mapping[str, float]
    hidden: float  # seconds of generation that run beside training and are not waited for
    generated: float  # tokens that are generated
    trained: float  # tokens that are trained on
    flops: float  # operations of the training itself, all GPUs together
    sent: float  # bytes that the refit sends
    rows: Mapping[str, float]  # sequences decoded together at one engine, by role
    longest: Mapping[str, float]  # seconds of a role's longest answer among as many others
    episodes: Sequence[EpisodePlan] = ()  # of the roles that answer several times in one

    @property
    def seconds(self) -> float:
        return sum(self.phases.values()) - self.hidden


def plan_iteration(
    case: Case, work: IterationWork, actors: Mapping[str, Actor], engines: Mapping[str, EngineSetup]
) -> IterationPlan:
    """Plans an iteration: its roles' answers, and then an update of every policy that it trains, one after the
    other."""
    costs = {draw.role: _rollout(case, draw, engines[draw.role]) for draw in work.draws if _answers_here(case, draw)}
    phases = _generation(case, work, costs)
    reward_s = sum(draw.samples for draw in work.draws[:1]) * GRADING_S / case.spec.reward.workers
    phases["reward"] = reward_s / (1 if case.servers is None else 8)
    trained: dict[str, list[Draw]] = {}
    for draw in work.trained:
        trained.setdefault(case.roles[draw.role].owner, []).append(draw)
    for name, draws in trained.items():
        update = _training(case.roles[name], case.cluster, draws, actors[name])
        phases |= {phase: phases.get(phase, 0.0) + seconds for phase, seconds in update.items()}
    if case.colocated:
        phases["sleep and wake"] = _changes_of_place(case, list(trained), actors, engines)
    served = case.servers is not None and case.servers.serves_adapters  # a refit sends the adapter alone
    place = "ranks" if case.servers is None else "gpus" if case.colocated else "elsewhere"
    refits = [
        compute.refit_cost(
            actors[name], engines[name], case.cluster, place=place, adapter=served and actors[name].lora is not None
        )
        for name in trained
    ]
    phases["refit"] = sum(refit.seconds for refit in refits)
    drawn = sum(seconds for name, seconds in phases.items() if name.startswith("rollout"))
    ahead = case.spec.loop.rollouts.max_staleness > 0
    flops = [
        compute.train_flops(case.models[d.role], batch_of(case.roles[d.role], d, d.samples), case.roles[d.role].lora)
        for d in work.trained
    ]
    return IterationPlan(
        role=work.role, times=work.times, phases=phases,
        hidden=min(drawn, sum(phases.values()) - drawn) if ahead else 0.0,
        generated=sum(d.samples * d.written for d in work.draws),
        trained=sum(d.samples * d.length for d in work.trained),
        flops=sum(flops), sent=sum(refit.sent for refit in refits),
        rows={name: cost.rows for name, cost in costs.items()},
        longest={name: cost.longest for name, cost in costs.items()},
        episodes=[
            _episode(case.roles[draw.role], draw, costs[draw.role])
            for draw in work.draws if draw.role in costs and draw.episode.answers > 1
        ],
    )  # fmt: skip


def _answers_here(case: Case, draw: Draw) -> bool:
    """Returns whether the run's own engines write the answers. The machines of an endpoint are not known."""
    return case.roles[draw.role].endpoint is None


def _generation(case: Case, work: IterationWork, costs: Mapping[str, compute.RolloutCost]) -> dict[str, float]:
    """Returns the seconds of an iteration's answers by phase, role after role.

    Answers go on to the next role as they come: only the part behind the first counts, unless one server, or servers
    that share their GPUs, write both.
    """
    phases, before, asked = dict[str, float](), 0.0, set[str]()
    apart = case.servers is not None and not case.colocated
    for role, cost in costs.items():
        engine, seconds = case.roles[role].servers, cost.seconds
        if apart and before and engine not in asked:
            seconds = max(seconds - before, seconds / max(1.0, cost.waves) / 4)
        asked.add(engine)
        before += seconds
        waiting = min(cost.waiting, seconds)
        phases[f"rollout {role}"] = seconds - waiting
        if waiting:
            phases[f"rollout {role}, waiting for tools"] = waiting
    return phases


def _changes_of_place(
    case: Case, trained: Sequence[str], actors: Mapping[str, Actor], engines: Mapping[str, EngineSetup]
) -> float:
    """Returns the seconds in which one GPU's memory changes between servers and trainer, for an iteration that trains
    these policies.

    Their weights and optimizers come and go. Their servers drop their weights, the others keep theirs in host memory.
    """
    moved = 0.0
    for name in trained:
        actor = actors[name]
        stage = counting.heaviest(actor.shape, actor.parallel)
        moved += actor.numbers.width * actor.held(stage) + memory.optimizer_bytes(actor, stage)
    for name in case.spec.engine.server_roles:
        if name not in trained:
            whole = actors[name].numbers.width * counting.total(case.models[name])
            moved += writers_of(case.roles[name]) * whole / engines[name].tp
    return 2 * moved / HOST + 2 * CHANGE_S


def _rollout(case: Case, draw: Draw, engine: EngineSetup) -> compute.RolloutCost:
    """Returns the cost of generating `draw`. Tools run beside the generation of other samples.

    The two models of a tandem both read every token, one after the other, and share the cache.
    """
    role = case.roles[draw.role]
    width, writers = Precision.gpu(role.model.dtype).width, writers_of(role)
    engine = replace(engine, kv_bytes=engine.kv_bytes / writers)
    alone = compute.rollout_cost(case.models[draw.role], engine, case.cluster, draw, width=width)
    generating, tools = writers * alone.seconds, compute.tool_seconds(draw, writers * alone.alone)
    return replace(
        alone, seconds=max(generating, tools), waiting=max(0.0, tools - generating), longest=writers * alone.longest
    )


def _episode(role: RoleConfig, draw: Draw, cost: compute.RolloutCost) -> EpisodePlan:
    return EpisodePlan(
        role=draw.role, estimate=draw.episode, answer=draw.response, longest=longest_context(role, draw.episode),
        micro_batch=micro_batch(role, draw).tokens if role.has_policy else None, kept=cost.kept, waiting=cost.waiting,
    )  # fmt: skip


def writers_of(role: RoleConfig) -> int:
    """Returns the number of models in an engine of the role; a tandem's junior is taken to be of the senior's size."""
    return 1 if role.tandem is None else 2


def batch_of(role: RoleConfig, draw: Draw, sequences: int) -> SequenceBatch:
    """Returns the batch of one pass over so many samples of a draw."""
    return SequenceBatch(
        sequences=sequences, length=draw.length, micro_tokens=role.micro_batch_tokens * role.layout.cp,
        prompt=draw.prompt, told=draw.length - draw.prompt - draw.written,
        per_prompt=draw.per_prompt if role.shared_prefixes else 1.0,
    )  # fmt: skip


def _training(role: RoleConfig, cluster: Cluster, draws: Sequence[Draw], actor: Actor) -> dict[str, float]:
    """Returns the seconds of the phases of an update on all of `draws`, rollouts and refit left out."""
    stage = counting.heaviest(actor.shape, actor.parallel)
    samples = sum(draw.samples for draw in draws)
    steps = -(-samples // (role.samples_per_optimizer_step or samples))
    batches = [batch_of(role, draw, draw.samples) for draw in draws]
    forward = sum(compute.pass_seconds(actor, cluster, batch, backward=False) for batch in batches)
    weights = actor.numbers.width * (actor.held(stage) if actor.lora is None else actor.adapters(stage))
    phases: dict[str, float] = {}
    if role.loss.kl_coef > 0:
        phases["reference log-probs"] = forward + 4 * weights / HOST
    if steps > 1:
        phases["old log-probs"] = forward
    again, each = memory.recomputed(role.model), [batch_of(role, draw, -(-draw.samples // steps)) for draw in draws]
    passed = [compute.pass_seconds(actor, cluster, batch, backward=True, recompute=again) for batch in each]
    phases["forward and backward"] = steps * sum(passed)
    phases["optimizer"] = steps * compute.optimizer_seconds(actor, cluster)
    if role.sleep:
        phases["sleep and wake"] = 2 * memory.optimizer_bytes(actor, stage) / HOST
    return phases


def micro_batch(role: RoleConfig, draw: Draw | None) -> MicroBatchLoad:
    """Returns a full micro-batch, and how many tokens of shared prompts its samples see beside their own: where what
    stands behind a prompt of mean length is half as long as in the mean. There are fewer where it is longer."""
    tokens, behind = role.micro_batch_tokens * role.layout.cp, 0.0
    if role.shared_prefixes and draw is not None:
        batch = batch_of(role, draw, draw.samples)
        batch = replace(batch, length=(batch.prompt + batch.length) / 2)
        behind = tokens * batch.repeated * batch.prompt / batch.tokens
    return MicroBatchLoad(tokens=tokens, behind=round(behind), recompute=memory.recomputed(role.model))
