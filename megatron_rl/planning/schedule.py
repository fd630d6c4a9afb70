"""Simulates how iterations overlap in time, for different values of the setting rollouts.max_staleness.

The results are iterations per hour, idle shares and staleness (planning/simulation.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from megatron_rl.planning.case import Case, own_cluster
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.phases import IterationPlan, SetWork
from megatron_rl.planning.plan import RunPlan, make
from megatron_rl.planning.simulation import Sample, Schedule, SimulatedIteration, Simulation, Station, simulate
from megatron_rl.planning.workload import cycle_work, models_of
from megatron_rl.run.work_intervals import GENERATING, SCORING, SYNCING, TRAINING
from megatron_rl.spec.run_spec import RunSpec

STALENESS = range(5)  # values of rollouts.max_staleness that a plan compares
NEAR_BEST = 0.95  # `auto` takes the lowest staleness whose rate is at least this share of the best rate
LONGEST_SHARE = 0.01  # assumed share of a role's answers that reach sampling.max_tokens
# approximate maximum number of answers of one simulated iteration: in larger iterations, the numbers of samples and
# the capacities of engines are divided by the same factor
VISITS = 500
KINDS = 8  # approximate maximum number of iterations of a simulated cycle
TIMELINE = 8  # number of iterations of a predicted timeline, in addition to those of a cycle
# the phases of timeline.jsonl by the kinds of simulation.Span
PHASE_OF = {"generation": GENERATING, "scores": SCORING, "update": TRAINING, "refit": SYNCING}
_NORMAL = NormalDist()


def lengths(mean: float, longest: float, count: int, *, seed: int = 0) -> np.ndarray:
    """Returns lengths of answers in tokens as an array of shape [count], in random order. The lengths are quantiles of
    a log-normal distribution whose largest values, a share LONGEST_SHARE, are clipped to `longest`, and whose mean
    after the clipping is `mean`."""
    tail = _NORMAL.inv_cdf(1 - LONGEST_SHARE)
    low, high = 0.0, 6.0  # bounds of the sought standard deviation of log(length); a higher one gives a lower mean
    for _ in range(50):
        middle = (low + high) / 2
        clipped = math.exp(middle * middle / 2 - tail * middle) * _NORMAL.cdf(tail - middle) + LONGEST_SHARE
        low, high = (middle, high) if clipped * longest > mean else (low, middle)
    scores = np.array([_NORMAL.inv_cdf((i + 0.5) / count) for i in range(count)])
    answer_lengths = np.minimum(np.exp((scores - tail) * low), 1.0) * longest
    return np.random.default_rng(seed).permutation(answer_lengths)


def schedules(case: Case, plan: RunPlan) -> list[Schedule]:
    """Simulates a planned run with each value of max_staleness in STALENESS and with the configured value. Returns the
    schedules in ascending order of max_staleness. If the engines cannot generate while the trainer trains, simulates
    max_staleness 0 alone.

    The lengths of answers have the distribution of `lengths`. The times are scaled so that the generation of an
    iteration takes the planned seconds if no other iteration is in flight.
    """
    apart = case.servers is not None and not case.colocated
    stations, cycle = _model(case, plan.iterations)
    chosen = sorted({*(STALENESS if apart else [0]), case.spec.loop.rollouts.ahead})
    return [simulate(stations, cycle, max_staleness=k) for k in chosen]


def simulated(case: Case, plan: RunPlan) -> RunPlan:
    """Returns the plan with `simulated_s`, the simulated seconds of a cycle, if parts of the run overlap: iterations,
    with max_staleness above 0 and engine servers that do not share the trainer's GPUs, or several sets of ranks.
    Otherwise, returns the plan unchanged."""
    ahead = case.spec.loop.rollouts.ahead
    overlaps = ahead and case.servers is not None and not case.colocated
    if not overlaps and len(_sets(plan.iterations)) < 2:
        return plan
    rate = simulate(*_model(case, plan.iterations), max_staleness=ahead).iterations_per_hour
    return replace(plan, simulated_s=3600 / rate * sum(iteration.times for iteration in plan.iterations))


def case_of(spec: RunSpec, device: str = "") -> Case:
    """Returns a run on the cluster that its specification asks for. `device`: name of the cluster's GPUs in
    hardware.DEVICES; "": the GPUs that a plan assumes by default. Raises ConfigError if the sizes of a model are
    unknown."""
    nodes, per_node, assumed = own_cluster(spec.engine, spec.cluster).split("x")
    cluster = parse_cluster(f"{nodes}x{per_node}x{device or assumed}")
    work = cycle_work(spec.recipe, spec.roles, spec.run.prompts_per_iteration)
    return Case(spec=spec, cluster=cluster, models=models_of(spec.roles, ()), work=work)


def predicted(spec: RunSpec, device: str = "") -> tuple[str, list[Schedule], dict[str, Any]]:
    """Returns the name of the cluster that a specification asks for, the simulated schedules on that cluster, and a
    timeline of some iterations with the configured rollouts.max_staleness.

    The timeline has JSON values: {"cycle": number of iterations of a simulated cycle, "ends": seconds at which the
    iterations end, from 0, the end of the iteration before them, "intervals": [iteration, role, phase, begin, end] as
    in timeline.jsonl}. Its first iteration is the first one of a cycle.

    `device`: see `case_of`. Raises ConfigError if the sizes of a model are unknown, or if the layouts do not divide
    the cluster.
    """
    case = case_of(spec, device)
    plan = make(case)
    return str(case.cluster), schedules(case, plan), _timeline(case, plan)


def _timeline(case: Case, plan: RunPlan) -> dict[str, Any]:
    (stations, cycle), ahead = _model(case, plan.iterations), case.spec.loop.rollouts.ahead
    run = Simulation(stations, cycle, ahead, one_at_a_time=False)
    first = -(-2 * (ahead + 1) // len(cycle)) * len(cycle)  # the iterations before it are not like the later ones
    run.until(first + len(cycle) + TIMELINE)
    start = run.ends[first - 1]
    intervals = [
        [i - first, policy, PHASE_OF[kind], round(began - start, 3), round(ended - start, 3)]
        for i, policy, kind, began, ended in run.spans
        if ended > start
    ]
    ends = [round(end - start, 3) for end in run.ends[first - 1 :]]
    return {"cycle": len(cycle), "ends": ends, "intervals": intervals}


def best_staleness(simulations: Sequence[Schedule]) -> int:
    """Returns the lowest max_staleness whose rate is at least NEAR_BEST times the highest rate."""
    best = max(schedule.iterations_per_hour for schedule in simulations)
    return min(schedule.max_staleness for schedule in simulations if schedule.iterations_per_hour >= NEAR_BEST * best)


def _sets(iterations: Sequence[IterationPlan]) -> set[range]:
    return {work.ranks for iteration in iterations for work in iteration.sets}


def _model(case: Case, iterations: Sequence[IterationPlan]) -> tuple[list[Station], list[SimulatedIteration]]:
    """Returns (stations, iterations of a cycle) for the simulation of planned iterations. The numbers of samples and
    the capacities of stations are divided by the same factor, so that an iteration has about VISITS answers at most.
    """
    draws = [draw for iteration in iterations for draw in iteration.generation]
    most = max(sum(draw.samples * draw.answers for draw in iteration.generation) for iteration in iterations)
    scale = max(1.0, most / VISITS)
    stations: dict[str, Station] = {}
    for draw in draws:
        places = max(1, round(draw.places / scale))
        steps = np.linspace(*draw.step_s, places)
        stations.setdefault(draw.engine, Station(places=places, rates=[1.0, *(1 / steps)], role=draw.engine))
        if draw.tool_s:
            calls = max(1, round(draw.calls_at_once / scale))
            stations[f"tools of {draw.role}"] = Station(places=calls, rates=[1.0] * (calls + 1), engine=False)
    share = min(1.0, KINDS / sum(iteration.times for iteration in iterations))
    cycle = list[SimulatedIteration]()
    several, whole = len(_sets(iterations)) > 1, next(iter(_sets(iterations)), range(1))
    for iteration in iterations:
        if several and case.servers is None:
            simulated_iteration = _embedded(case, iteration)
        else:
            simulated_iteration = _simulated(iteration, stations, scale)
            if several:
                simulated_iteration = replace(simulated_iteration, sets=iteration.sets)
            else:
                work = SetWork(
                    ranks=whole, policies=iteration.policies, update_s=simulated_iteration.train_s,
                    refit_s=simulated_iteration.refit_s,
                    shares=next((own.shares for own in iteration.sets), dict[str, float]()),
                )  # fmt: skip
                simulated_iteration = replace(simulated_iteration, sets=[work])
        cycle += [simulated_iteration] * max(1, round(iteration.times * share))
    return [] if several and case.servers is None else list(stations.values()), cycle


def _embedded(case: Case, plan: IterationPlan) -> SimulatedIteration:
    """Converts a planned iteration whose rollouts are generated by the embedded engines of several sets of ranks."""
    generated = list[tuple[range, float]]()
    for draw in plan.generation:
        phase = f"rollout {draw.role}"
        seconds = plan.phases[phase] + plan.phases.get(f"{phase}, waiting for tools", 0.0)
        generated.append((case.role_ranks[draw.role], seconds))
    return SimulatedIteration(
        samples=(), grading_s=plan.phases.get("reward", 0.0), trained=plan.policies, sets=plan.sets,
        generated=generated, writers=[draw.policy for draw in plan.generation],
    )  # fmt: skip


def _simulated(plan: IterationPlan, stations: Mapping[str, Station], scale: float) -> SimulatedIteration:
    """Converts a planned iteration to an iteration for the simulation. The units of work of all samples are multiplied
    by one factor, so that generation takes the planned seconds if no other iteration is in flight.

    `stations`: all stations by name. `scale`: factor by which the number of samples is divided.
    """
    names, samples, predecessors = list(stations), list[Sample](), range(0)
    for draw in plan.generation:
        count = max(1, round(draw.samples / scale))
        indices = range(len(samples), len(samples) + count)
        for i, length in enumerate(lengths(draw.answer, draw.longest, count, seed=len(samples)).tolist()):
            visits = [(names.index(draw.engine), length)]
            if draw.tool_s:
                visits.append((names.index(f"tools of {draw.role}"), draw.tool_s))
            visits = (visits * draw.answers)[: (len(visits) * draw.answers) - (len(visits) - 1)]
            predecessor = predecessors[i * len(predecessors) // count] if predecessors else None
            samples.append(Sample(visits=visits, policy=draw.policy, predecessor=predecessor))
        predecessors = indices
    alone = Simulation(
        list(stations.values()), [SimulatedIteration(samples=samples, train_s=0.0)], 0,
        one_at_a_time=False,
    )  # fmt: skip
    alone.until(1)
    planned = sum(seconds for name, seconds in plan.phases.items() if name.startswith("rollout"))
    ratio = planned / alone.now if alone.now else 0.0
    samples = [replace(sample, visits=[(place, ratio * work) for place, work in sample.visits]) for sample in samples]
    grading, refit = plan.phases.get("reward", 0.0), plan.phases.get("refit", 0.0)
    return SimulatedIteration(
        samples=samples, grading_s=grading, refit_s=refit, trained=plan.policies,
        train_s=sum(plan.phases.values()) - planned - grading - refit,
    )  # fmt: skip
