"""Estimates a run with other engines, so that the user can compare them with the configured engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.schema import Embedded
from megatron_rl.planning.case import Case, server_gpus
from megatron_rl.planning.plan import make_or_none
from megatron_rl.planning.schedule import simulated
from megatron_rl.planning.search import engine_choices, overrides

SERVED = 3  # maximum number of server configurations that are shown, fastest first
AHEAD = "iterations generated beside training (rollouts.max_staleness={})"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """An estimate of the run with one choice of engine: the number of GPUs, the time, and the config overrides that
    select the engine.
    """

    engine: str  # description of the engine
    trainer_gpus: int
    engine_gpus: int  # number of GPUs on which only servers run; 0 for the embedded engine
    cycle_s: float  # seconds of one cycle (an item of the recipe's schedule)
    problem: str  # reason why the run does not fit into GPU memory; empty if it fits
    # command-line overrides that change the config to this engine; empty for the unchanged config
    overrides: Sequence[str]


def alternatives(base: Case) -> list[Alternative]:
    """Returns estimates of memory and time of the run with different engines, starting with the run as configured.

    The alternatives are, in this order: the embedded engine, the fastest servers (on separate GPUs or on the trainer's
    GPUs), and the fastest servers on separate GPUs that generate the next iteration while the trainer trains.

    The layouts (parallelism) of the roles are those of the config. If the run fits into memory with another engine
    only with full activation recomputation, this recomputation is planned. An engine is left out if the layouts do not
    divide the GPUs that it leaves to the trainer, or if `megatron-rl check` would refuse the config.
    """
    first = _alternative(base, base)
    if first is None:
        return []
    estimates, servers, staleness = [first], base.servers, base.spec.loop.rollouts.ahead
    if servers is not None:  # with it, rollouts ahead of training save no time unless roles have ranks of their own
        embedded = _alternative(base.with_engine(Embedded()).with_staleness(0), base)
        estimates += [] if embedded is None else [embedded]
    choices = [case for case in engine_choices(base) if case.servers]
    place = {} if servers is None else {"gpus": servers.gpus, "urls": servers.urls, "start": servers.start}
    # leave out servers whose settings other than gpus, urls and start are those of the configured servers
    others = [case for case in choices if case.servers and replace(case.servers, **place) != servers]
    estimates += _fastest(others, base, SERVED)
    if not staleness:
        apart = [case for case in [base, *choices] if case.servers and not case.colocated]
        estimates += _fastest([case.with_staleness(1) for case in apart], base, 1)
    return estimates


def _fastest(cases: Sequence[Case], base: Case, count: int) -> list[Alternative]:
    """Returns the `count` fastest alternatives that fit into GPU memory."""
    estimates = [_alternative(case, base) for case in cases]
    fitting = (estimate for estimate in estimates if estimate and not estimate.problem)
    return sorted(fitting, key=lambda estimate: estimate.cycle_s)[:count]


def _alternative(case: Case, base: Case) -> Alternative | None:
    """Returns the estimate for a run with another engine. `case`: this run. `base`: the run as configured.

    Returns None if the layouts of `case` do not divide the models or the cluster, or if `megatron-rl check` would
    refuse `case` although it accepts `base`.
    """
    plan = make_or_none(case)
    if plan is None:
        return None
    if plan.problems and case is not base:
        smaller = case
        for name in case.held:
            smaller = smaller.with_role(name, model=replace(case.roles[name].model, recompute="full"))
        recomputed_plan = make_or_none(smaller)
        if recomputed_plan is not None and not recomputed_plan.problems:
            plan, case = recomputed_plan, smaller
    if case is not base and not case.passes() and base.passes():
        return None
    plan = simulated(case, plan)
    return Alternative(
        engine=_words(case),
        trainer_gpus=plan.ranks,
        engine_gpus=server_gpus(case.spec.engine),
        cycle_s=plan.cycle_s,
        problem=next(iter(plan.problems), ""),
        overrides=[] if case is base else overrides(base, case),
    )


def _words(case: Case) -> str:
    """Returns a description of the engine in words, e.g. `4 vllm servers of 2 GPUs for each role`."""
    engine = case.servers
    if engine is None:
        return "embedded, in the trainer's GPUs"
    many, gpus = "s" * (engine.replicas > 1), f"{engine.tp} GPU{'s' * (engine.tp > 1)}"
    whom = " for each role" if len(case.spec.engine.server_roles) > 1 else ""
    where = ", in the trainer's GPUs" * engine.colocate
    description = f"{engine.replicas} {engine.kind} server{many} of {gpus}{whom}{where}"
    ahead = case.spec.loop.rollouts.ahead
    return f"{description}; {AHEAD.format(ahead)}" if ahead else description
