"""Plans one iteration of the training loop: the seconds of its phases, and the assumptions on multi-turn episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.config.schema import RoleConfig
from megatron_rl.planning import compute, memory
from megatron_rl.planning.case import Case
from megatron_rl.planning.compute import EngineSetup, SequenceBatch
from megatron_rl.planning.hardware import HOST, Cluster
from megatron_rl.planning.memory import Actor, MicroBatchLoad, Precision
from megatron_rl.planning.workload import Draw, IterationWork, ScorePass, longest_context
from megatron_rl.spec.run_spec import RoleSpec
from megatron_rl.weights import counting

GRADING_S = 0.02  # seconds that one of the reward.workers processes needs to grade one response
# assumed seconds of handing the GPUs over between servers and trainer, apart from the time of moving weights
CHANGE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """Assumptions on the episodes of a role (samples in which the role answers several times), and the resulting sizes
    and times.
    """

    role: str
    estimate: EpisodeEstimate
    answer: float  # mean number of tokens of an answer
    longest: int  # number of tokens of the longest sample
    # maximum number of tokens of the role's micro-batches; None if the role has no model in the trainer
    micro_batch: int | None
    kept: bool  # whether the engine keeps the KV cache of an episode between its answers
    waiting: float  # seconds by which tool calls prolong the generation of the role's answers

    def __str__(self) -> str:
        estimate = self.estimate
        parts = [
            f"{self.role} is taken to answer {estimate.answers} times in an episode, in {self.answer:.0f} tokens each",
            f"between two answers it is told {estimate.told} tokens, and its longest sample has {self.longest:,}",
            "an engine keeps what it has read of an episode until the next answer"
            if self.kept
            else "before each answer an engine reads again all that stands before it",
        ]
        if estimate.tool_s:
            beside = f"{self.waiting:,.0f} s longer than generation takes" if self.waiting else "hidden by generation"
            parts.append(
                f"tools take {estimate.tool_s:g} s between two answers, {estimate.calls_at_once} calls at once, beside "
                f"the generation of other episodes: {beside}"
            )
        if self.micro_batch is not None and self.longest > self.micro_batch:
            parts.append(
                f"a sample of more than {self.micro_batch:,} tokens would stop the run: raise "
                f"roles.{self.role}.micro_batch_tokens, or let episodes end before"
            )
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The generation of one role's samples in an iteration, as input of the simulation in planning/schedule.py: numbers
    and lengths of the samples, and capacity and speed of the engines that generate them.
    """

    role: str
    policy: str  # policy that generates the samples
    engine: str  # role whose servers generate the samples
    samples: int
    answer: float  # mean number of tokens of an answer
    longest: int  # maximum number of tokens of an answer
    answers: int  # number of answers of a sample
    tool_s: float  # seconds that tools take between two answers of a sample
    calls_at_once: int  # maximum number of concurrent calls of the environment
    places: float  # number of sequences that all engines can decode at once
    step_s: tuple[float, float]  # seconds of a decoding step with one sequence, and with a full batch


@dataclass(frozen=True, kw_only=True)
class SetWork:
    """The work of one set of ranks in an iteration: the scores and updates of the roles on these ranks, and the refits
    of their engines.
    """

    ranks: range
    policies: Sequence[str] = ()  # policies that the set updates
    scores_s: float = 0.0
    update_s: float
    refit_s: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict[str, float])  # {policy: seconds of its update}
    # roles whose servers pause while the set sends weights; None: all engines pause, as with a single set
    paused: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """The estimate for one iteration: seconds of each phase in order of execution, and token counts."""

    role: str  # roles that the iteration trains, joined by +
    times: int  # number of iterations like this one in a cycle (item of the schedule)
    phases: Mapping[str, float]
    hidden: float  # maximum seconds that may overlap: generation with training, and the work of different sets of ranks
    generated: float  # number of generated tokens
    trained: float  # number of trained tokens
    flops: float  # floating-point operations of the training passes, over all GPUs
    sent: float  # bytes sent by the refit (weight sync to the engines)
    rows: Mapping[str, float]  # role -> number of sequences decoded together by one engine
    longest: Mapping[str, float]  # role -> seconds of generating the role's longest answer in a full batch
    episodes: Sequence[EpisodePlan] = ()  # estimates of the roles that answer several times per sample
    policies: Sequence[str] = ()  # policies that the iteration updates
    generation: Sequence[Generation] = ()  # one item per role whose samples the run's own engines generate
    sets: Sequence[SetWork] = ()  # work of each set of ranks that scores or updates

    @property
    def seconds(self) -> float:
        return sum(self.phases.values()) - self.hidden


def plan_iteration(
    case: Case, work: IterationWork, actors: Mapping[str, Actor], engines: Mapping[str, EngineSetup]
) -> IterationPlan:
    """Estimates an iteration: generation by all roles, and then an update of each policy that the iteration trains, one
    policy after the other.

    `actors`: role -> model of the role in the trainer.
    `engines`: role -> engines that generate the role's answers.
    """
    roles, text_draws = case.roles, _text_draws(case, work)
    costs = {draw.role: _rollout(case, draw, engines[draw.role]) for draw in text_draws}
    phases = _generation(case, work, costs)
    scores = {str(scored): _scoring(case, scored, actors[roles[scored.by].owner]) for scored in work.scores}
    phases |= scores
    updates = updates_of(case, work, actors)
    for update in updates.values():
        phases |= {phase: phases.get(phase, 0.0) + seconds for phase, seconds in update.items()}
    trained, changes_s = list(updates), 0.0
    if case.colocated:
        phases["sleep and wake"] = changes_s = _changes_of_place(case, trained, actors, engines)
        updates = {name: {**update, "sleep and wake": 0.0} for name, update in updates.items()}
    refits = _refits(case, trained, actors, engines)
    if refits:
        phases["refit"] = sum(refit.seconds for refit in refits.values())
    refit_s = {name: refit.seconds for name, refit in refits.items()}
    sets = _set_works(case, work, scores, {name: sum(update.values()) for name, update in updates.items()}, refit_s)
    sets = [replace(part, update_s=part.update_s + changes_s) for part in sets]
    drawn = sum(seconds for name, seconds in phases.items() if name.startswith("rollout"))
    rest, beside = sum(phases.values()) - drawn, 0.0
    if len(sets) > 1:
        beside = rest - phases.get("reward", 0.0) - max(part.scores_s + part.update_s + part.refit_s for part in sets)
    batches = [(d.role, batch_of(roles[d.role], d, d.samples)) for d in work.trained]
    flops = [compute.train_flops(case.models[name], batch, roles[name].lora) for name, batch in batches]
    return IterationPlan(
        role=work.role, times=work.times, phases=phases,
        hidden=beside + (min(drawn, rest - beside) if case.spec.loop.rollouts.ahead > 0 else 0.0),
        generated=sum(d.samples * d.written for d in work.draws if roles[d.role].head is None),
        trained=sum(d.samples * d.length for d in work.trained),
        flops=sum(flops), sent=sum(refit.sent for refit in refits.values()),
        rows={name: cost.rows for name, cost in costs.items()},
        longest={name: cost.longest for name, cost in costs.items()},
        episodes=[_episode(roles[d.role], d, costs[d.role]) for d in text_draws if d.episode.answers > 1],
        policies=trained, sets=sets,
        generation=[_generated(roles[draw.role], draw, costs[draw.role]) for draw in text_draws],
    )  # fmt: skip


def generation_phases(case: Case, work: IterationWork, engines: Mapping[str, EngineSetup]) -> dict[str, float]:
    """Returns {phase: seconds} of the generation and the rewards of an iteration."""
    costs = {draw.role: _rollout(case, draw, engines[draw.role]) for draw in _text_draws(case, work)}
    return _generation(case, work, costs)


def role_seconds(case: Case, work: IterationWork, name: str, actor: Actor) -> dict[str, float]:
    """Returns {phase: seconds} of the scores and updates of a policy in an iteration. `actor`: the policy's model."""
    scores = [scored for scored in work.scores if case.roles[scored.by].owner == name]
    return {str(scored): _scoring(case, scored, actor) for scored in scores} | updates_of(
        case, work, {name: actor}
    ).get(name, {})


def _text_draws(case: Case, work: IterationWork) -> list[Draw]:
    """Returns the draws whose texts the run's own engines generate. Endpoints have no cost, because their hardware is
    unknown. Roles with a value or reward head generate nothing: their samples are those of another role."""
    return [d for d in work.draws if case.roles[d.role].endpoint is None and case.roles[d.role].head is None]


def updates_of(case: Case, work: IterationWork, actors: Mapping[str, Actor]) -> dict[str, dict[str, float]]:
    """Returns {policy that the iteration updates: {phase: seconds}}. Leaves out policies that are not in `actors`."""
    draws: dict[str, list[Draw]] = {}
    for draw in work.trained:
        draws.setdefault(case.roles[draw.role].owner, []).append(draw)
    return {
        name: _training(case.roles[name], case.cluster, own, actors[name])
        for name, own in draws.items()
        if name in actors
    }


def _set_works(
    case: Case, work: IterationWork, scores: Mapping[str, float], updates: Mapping[str, float],
    refits: Mapping[str, float],
) -> list[SetWork]:  # fmt: skip
    """Returns the work of each set of ranks in an iteration. `scores`: score pass -> seconds. `updates`, `refits`:
    policy -> seconds.
    """
    scored = [(case.role_ranks[one.by], scores[str(one)]) for one in work.scores]
    sets = dict.fromkeys([*(ranks for ranks, _ in scored), *(case.role_ranks[name] for name in updates)])
    works = list[SetWork]()
    for ranks in sets:
        policies = [name for name in updates if case.role_ranks[name] == ranks]
        works.append(
            SetWork(
                ranks=ranks, policies=policies, scores_s=sum(seconds for own, seconds in scored if own == ranks),
                update_s=sum(updates[name] for name in policies),
                refit_s=sum(refits.get(name, 0.0) for name in policies),
                paused=[case.roles[name].servers for name in policies],
                shares={name: updates[name] for name in policies},
            )
        )  # fmt: skip
    return works


def _refits(
    case: Case, trained: Sequence[str], actors: Mapping[str, Actor], engines: Mapping[str, EngineSetup]
) -> dict[str, compute.RefitCost]:
    """Returns {role: cost of sending its new weights to its engines} for the roles `trained` that have engines."""
    served = case.servers is not None and case.servers.serves_adapters  # a refit sends the adapter alone
    place = "ranks" if case.servers is None else "gpus" if case.colocated else "elsewhere"
    return {
        name: compute.refit_cost(
            actors[name], engines[name], case.cluster, place=place, adapter=served and actors[name].lora is not None
        )
        for name in trained
        if name in case.spec.engine.opened
    }


def _generation(case: Case, work: IterationWork, costs: Mapping[str, compute.RolloutCost]) -> dict[str, float]:
    """Returns {phase: seconds} of the generation and the rewards in an iteration, with one phase per generating role.

    Each answer is forwarded to the next role as soon as it is generated, so that all roles generate at the same time.
    Therefore, the phase of a later role has only the seconds by which this role takes longer than the earlier roles.
    If a later role uses the same server or the same GPUs as an earlier role, its phase has all its seconds.
    """
    phases, earlier_s, busy_engines = dict[str, float](), 0.0, set[str]()
    apart = case.servers is not None and not case.colocated
    for role, cost in costs.items():
        engine, seconds = case.roles[role].servers, cost.seconds
        if apart and earlier_s and engine not in busy_engines:
            seconds = max(seconds - earlier_s, seconds / max(1.0, cost.waves) / 4)
        busy_engines.add(engine)
        earlier_s += seconds
        waiting = min(cost.waiting, seconds)
        phases[f"rollout {role}"] = seconds - waiting
        if waiting:
            phases[f"rollout {role}, waiting for tools"] = waiting
    if work.draws and case.spec.reward.target:
        reward_s = work.draws[0].samples * GRADING_S / case.spec.reward.workers
        phases["reward"] = reward_s / (1 if case.servers is None else 8)
    return phases


def _changes_of_place(
    case: Case, trained: Sequence[str], actors: Mapping[str, Actor], engines: Mapping[str, EngineSetup]
) -> float:
    """Returns the seconds of handing GPU memory over between colocated servers and the trainer in one iteration.

    `trained`: roles of the models that the iteration trains. The weights and optimizer states of these models are moved
    between GPU and host. Servers of these roles discard their weights, and other servers move their weights to host
    memory.
    """
    moved = 0.0
    for name in trained:
        actor = actors[name]
        stage = counting.heaviest(actor.shape, actor.parallel)
        moved += actor.numbers.width * actor.held(stage) + memory.optimizer_bytes(actor, stage)
    for name in case.spec.engine.server_roles:
        if name not in trained:
            model_bytes = actors[name].numbers.width * counting.total(case.models[name])
            moved += writers_of(case.roles[name]) * model_bytes / engines[name].tp
    return 2 * moved / HOST + 2 * CHANGE_S


def _rollout(case: Case, draw: Draw, engine: EngineSetup) -> compute.RolloutCost:
    """Returns the cost of generating `draw` (a role's samples of one iteration). Tools run while other samples are
    generated.

    In Tandem RL, both the trained senior and the frozen junior model process every token, one after the other. Each
    model gets half of the memory for the KV cache.
    """
    role = case.roles[draw.role]
    width, writers = Precision.gpu(role.model.dtype).width, writers_of(role)
    engine = replace(engine, kv_bytes=engine.kv_bytes / writers)
    alone = compute.rollout_cost(case.models[draw.role], engine, case.cluster, draw, width=width)
    generating, tools = writers * alone.seconds, compute.tool_seconds(draw, writers * alone.alone)
    return replace(
        alone, seconds=max(generating, tools), waiting=max(0.0, tools - generating), longest=writers * alone.longest
    )


def _generated(role: RoleSpec, draw: Draw, cost: compute.RolloutCost) -> Generation:
    return Generation(
        role=draw.role, policy=role.owner, engine=role.servers, samples=draw.samples, answer=draw.response,
        longest=draw.longest, answers=draw.episode.answers, tool_s=draw.episode.tool_s,
        calls_at_once=draw.episode.calls_at_once, places=cost.places, step_s=cost.step_s,
    )  # fmt: skip


def _episode(role: RoleConfig, draw: Draw, cost: compute.RolloutCost) -> EpisodePlan:
    return EpisodePlan(
        role=draw.role, estimate=draw.episode, answer=draw.response, longest=longest_context(role, draw.episode),
        micro_batch=micro_batch(role, draw).tokens if role.has_policy else None, kept=cost.kept, waiting=cost.waiting,
    )  # fmt: skip


def writers_of(role: RoleConfig) -> int:
    """Returns the number of models that generate a role's answers together in one engine: 2 in Tandem RL, otherwise 1.

    In Tandem RL, the frozen junior model is assumed to be as large as the trained senior model.
    """
    return 1 if role.tandem is None else 2


def batch_of(role: RoleConfig, draw: Draw, sequences: int) -> SequenceBatch:
    """Returns the batch of one pass through the model. `draw`: the role's samples of an iteration. `sequences`: number
    of these samples that the pass processes."""
    return SequenceBatch(
        sequences=sequences, length=draw.length, micro_tokens=role.micro_batch_tokens * role.layout.cp,
        prompt=draw.prompt, unwritten=draw.length - draw.prompt - draw.written,
        per_prompt=draw.per_prompt if role.shared_prefixes else 1.0,
    )  # fmt: skip


def _reference_swap(actor: Actor) -> float:
    """Returns the seconds of replacing an actor's weights by the weights of its frozen reference, and of restoring
    them.
    """
    stage = counting.heaviest(actor.shape, actor.parallel)
    return 4 * actor.numbers.width * (actor.held(stage) if actor.lora is None else actor.adapters(stage)) / HOST


def _scoring(case: Case, scored: ScorePass, actor: Actor) -> float:
    """Returns the seconds of a forward pass of the score stage by the model `actor`."""
    batch = batch_of(case.roles[scored.by], scored.draw, scored.draw.samples)
    seconds = compute.pass_seconds(actor, case.cluster, batch, backward=False)
    return seconds + (_reference_swap(actor) if scored.reference else 0.0)


def _training(role: RoleSpec, cluster: Cluster, draws: Sequence[Draw], actor: Actor) -> dict[str, float]:
    """Returns {phase: seconds} of training a role on all of `draws`, without the time of rollouts, scores and weight
    sync."""
    stage = counting.heaviest(actor.shape, actor.parallel)
    samples = sum(draw.samples for draw in draws)
    steps = -(-samples // (role.samples_per_optimizer_step or samples))
    batches = [batch_of(role, draw, draw.samples) for draw in draws]
    forward = sum(compute.pass_seconds(actor, cluster, batch, backward=False) for batch in batches)
    phases: dict[str, float] = {}
    if "reference" in loss_of(role).needs:
        phases["reference log-probs"] = forward + _reference_swap(actor)
    if steps > 1 and role.head is None:
        phases["old log-probs"] = forward
    again, per_step = memory.recomputed(role.model), [batch_of(role, draw, -(-draw.samples // steps)) for draw in draws]
    passed = [compute.pass_seconds(actor, cluster, batch, backward=True, recompute=again) for batch in per_step]
    phases["forward and backward"] = steps * sum(passed)
    phases["optimizer"] = steps * compute.optimizer_seconds(actor, cluster)
    if role.sleep:
        phases["sleep and wake"] = 2 * memory.optimizer_bytes(actor, stage) / HOST
    return phases


def micro_batch(role: RoleConfig, draw: Draw | None) -> MicroBatchLoad:
    """Returns the sizes of a full micro-batch, from which the memory of training is estimated.

    The field `behind` of the result is the number of prompt tokens that need no computation, because another sample of
    the micro-batch has the same prompt. The keys and values of these tokens need memory. So that the memory is not
    underestimated, responses are assumed to have half the mean length: a micro-batch then has more samples that share
    a prompt. Prompts are assumed to have the mean length.
    """
    tokens, behind = role.micro_batch_tokens * role.layout.cp, 0.0
    if role.shared_prefixes and draw is not None:
        batch = batch_of(role, draw, draw.samples)
        batch = replace(batch, length=(batch.prompt + batch.length) / 2)
        behind = tokens * batch.repeated * batch.prompt / batch.tokens
    return MicroBatchLoad(tokens=tokens, behind=round(behind), recompute=memory.recomputed(role.model))
