"""Simulates how iterations overlap in time, for different values of the setting rollouts.max_staleness.

The results are iterations per hour, idle shares and staleness. The simulation goes from event to event. A sample visits
stations, which are engines and tools, one after the other.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from megatron_rl.planning.case import Case, own_cluster
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.phases import IterationPlan
from megatron_rl.planning.plan import RunPlan, make
from megatron_rl.planning.workload import cycle_work, models_of
from megatron_rl.spec.run_spec import RunSpec

STALENESS = range(5)  # values of rollouts.max_staleness that a plan compares
NEAR_BEST = 0.95  # `auto` takes the lowest staleness whose rate is at least this share of the best rate
LONGEST_SHARE = 0.01  # assumed share of a role's answers that reach sampling.max_tokens
# approximate maximum number of answers of one simulated iteration: in larger iterations, the numbers of samples and
# the capacities of engines are divided by the same factor
VISITS = 500
KINDS = 8  # approximate maximum number of iterations of a simulated cycle
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Station:
    """The engines of a role, or the tools of an environment, which work on up to `places` samples at once. Samples of
    older iterations are served first.

    `rates` [places + 1]: rates[i] is the speed of each sample, in units of work per second, while i samples are worked
    on at once. A unit of work is a token for engines and a second for tools.
    """

    places: int
    rates: Sequence[float]
    engine: bool = True  # False for tools: a weight sync does not pause them, and their idle time is not counted


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A simulated sample: the stations (engines and tools) that the sample visits one after the other."""

    visits: Sequence[tuple[int, float]]  # (index of the station, units of work) of each visit, in order
    policy: str = ""  # policy that generates the sample
    predecessor: int | None = None  # index of another sample of the iteration, after whose end this sample begins


@dataclass(frozen=True, kw_only=True)
class SimulatedIteration:
    """A simulated iteration: its samples and the seconds of its other phases. `grading_s`: seconds between the end of
    the last sample and the earliest start of training.
    """

    samples: Sequence[Sample]
    train_s: float
    refit_s: float = 0.0  # seconds of the weight sync after training, in which engines are paused
    grading_s: float = 0.0
    trained: Sequence[str] = ("",)  # policies that the iteration updates


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The simulated rates of a run with one value of rollouts.max_staleness."""

    max_staleness: int
    iterations_per_hour: float
    engines_idle: float  # share of the engines' sequence slots that are empty, averaged over time
    trainer_idle: float  # share of the time in which the trainer neither trains nor sends weights
    # share of the trained samples of each age, for ages 0 to max_staleness
    # A sample's age is the number of updates of its policy between the start of its generation and its training.
    staleness: Sequence[float]


def simulate(
    stations: Sequence[Station], cycle: Sequence[SimulatedIteration], *, max_staleness: int, count: int = 12,
    one_at_a_time: bool = False,
) -> Schedule:  # fmt: skip
    """Simulates a run that repeats one cycle of iterations, and returns the rates of the run. The first
    2 * (max_staleness + 1) iterations are not measured.

    `cycle`: the iterations of the cycle, in order.
    `count`: minimum number of measured iterations. It is rounded up to a multiple of len(cycle) * (max_staleness + 1).
    `one_at_a_time`: whether generation of an iteration begins only when the previous iteration is completely generated.
    """
    # measure only whole periods, because up to max_staleness + 1 iterations may end at almost the same time
    period = len(cycle) * (max_staleness + 1)
    count = -(-count // period) * period
    run = _Simulation([_Servers(station) for station in stations], cycle, max_staleness, one_at_a_time=one_at_a_time)
    run.until(2 * (max_staleness + 1))
    start, occupied, spent = run.now, run.occupied, run.spent_s
    run.ages.clear()
    run.until(run.trained + count)
    seconds, places = run.now - start, sum(station.places for station in stations if station.engine)
    used = (run.occupied - occupied) / (places * seconds) if places else 1.0
    total = max(1, run.ages.total())
    return Schedule(
        max_staleness=max_staleness, iterations_per_hour=3600 * count / seconds, engines_idle=1 - used,
        trainer_idle=1 - (run.spent_s - spent) / seconds,
        staleness=[run.ages[age] / total for age in range(max_staleness + 1)],
    )  # fmt: skip


class _Servers:
    """The state of a station in a simulation. All samples that the station works on advance at the same rate."""

    def __init__(self, station: Station) -> None:
        self.station, self.paused = station, False
        self.done = 0.0  # units of work done so far for a sample that was processed here during the whole simulation
        # Heap of the samples that are being processed: (threshold, iteration, index of the sample).
        # A sample is finished at this station when `done` reaches the sample's threshold.
        self.active: list[tuple[float, int, int]] = []
        self.queue: list[tuple[int, int, int, float]] = []  # waiting samples: (iteration, arrival, index, work)
        self.arrivals = 0

    def seconds(self) -> float:
        """Returns the seconds until the next sample is finished at the station; infinity if none is being processed."""
        if self.paused or not self.active:
            return math.inf
        return max(0.0, self.active[0][0] - self.done) / self.station.rates[len(self.active)]

    def advance(self, seconds: float) -> float:
        """Lets the station work for some seconds. Returns the product of the seconds and the number of samples that the
        station works on, or 0 if the station is paused."""
        if self.paused or not self.active:
            return 0.0
        self.done += seconds * self.station.rates[len(self.active)]
        return seconds * len(self.active)

    def arrive(self, iteration: int, index: int, work: float) -> None:
        self.arrivals += 1
        heapq.heappush(self.queue, (iteration, self.arrivals, index, work))


@dataclass
class _InFlight:
    """An iteration whose generation has begun. `unfinished`: number of unfinished samples. `visits`: for each sample,
    the index in Sample.visits of the current visit; -1 if the sample has not begun.
    """

    work: SimulatedIteration
    unfinished: int
    visits: list[int]
    versions: list[int]  # for each sample: number of updates of the sample's policy before the sample began
    later: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # {sample: samples that wait for its end}


class _Simulation:
    def __init__(
        self, servers: Sequence[_Servers], cycle: Sequence[SimulatedIteration], ahead: int, *, one_at_a_time: bool
    ) -> None:
        self._servers, self._cycle, self._ahead, self._one_at_a_time = servers, cycle, ahead, one_at_a_time
        self.now = self.occupied = self.spent_s = 0.0  # spent_s: seconds of training and weight syncs
        self.trained = 0  # number of trained iterations
        self.ages = Counter[int]()  # {age: number of trained samples}, see Schedule.staleness
        self._versions = Counter[str]()
        self._flying: dict[int, _InFlight] = {}
        self._ready: dict[int, _InFlight] = {}  # iterations that are generated, graded and not yet trained
        self._timers: list[tuple[float, int, str]] = []  # heap of (second, iteration, phase that ends)
        self._admitted, self._training = 0, False

    def until(self, trained: int) -> None:
        """Simulates until `trained` iterations are trained, counted from the beginning of the run."""
        self._proceed()
        while self.trained < trained:
            timer = self._timers[0][0] - self.now if self._timers else math.inf
            waits = [servers.seconds() for servers in self._servers]
            soonest = min(timer, *waits)
            self.now += soonest
            for servers in self._servers:
                occupied = servers.advance(soonest)
                self.occupied += occupied if servers.station.engine else 0.0
            for servers, wait in zip(self._servers, waits, strict=True):
                if wait <= soonest:
                    _, iteration, index = heapq.heappop(servers.active)
                    self._next_visit(iteration, index)
                self._fill(servers)
            if timer <= soonest:
                _, iteration, what = heapq.heappop(self._timers)
                self._end(iteration, what)
                self._proceed()

    def _proceed(self) -> None:
        """Begins the generation of all iterations that may begin now. Begins the training of the next iteration if its
        samples are graded and no other iteration is being trained.
        """
        while self._admitted - self.trained <= self._ahead and not (self._one_at_a_time and self._flying):
            number, work = self._admitted, self._cycle[self._admitted % len(self._cycle)]
            count = len(work.samples)
            in_flight = _InFlight(work, count, [-1] * count, [0] * count)
            self._flying[number], self._admitted = in_flight, number + 1
            for index, sample in enumerate(work.samples):
                if sample.predecessor is not None:
                    in_flight.later.setdefault(sample.predecessor, []).append(index)
            for index, sample in enumerate(work.samples):
                if sample.predecessor is None:
                    self._next_visit(number, index)
            if not count:
                heapq.heappush(self._timers, (self.now + work.grading_s, number, "grading"))
        for servers in self._servers:
            self._fill(servers)
        if self.trained in self._ready and not self._training:
            self._training = True
            work = self._cycle[self.trained % len(self._cycle)]
            heapq.heappush(self._timers, (self.now + work.train_s, self.trained, "training"))

    def _fill(self, servers: _Servers) -> None:
        """Moves waiting samples into free places of a station, samples of older iterations first."""
        while servers.queue and len(servers.active) < servers.station.places:
            iteration, _, index, work = heapq.heappop(servers.queue)
            in_flight = self._flying[iteration]
            if not in_flight.visits[index]:
                in_flight.versions[index] = self._versions[in_flight.work.samples[index].policy]
            heapq.heappush(servers.active, (servers.done + work, iteration, index))

    def _next_visit(self, iteration: int, index: int) -> None:
        """Sends a sample to its next station. After the last station, ends the sample and begins the samples that wait
        for the end of this sample.
        """
        in_flight = self._flying[iteration]
        in_flight.visits[index] += 1
        visits = in_flight.work.samples[index].visits
        if in_flight.visits[index] < len(visits):
            place, work = visits[in_flight.visits[index]]
            self._servers[place].arrive(iteration, index, work)
            self._fill(self._servers[place])
            return
        in_flight.unfinished -= 1
        for successor in in_flight.later.get(index, ()):
            self._next_visit(iteration, successor)
        if not in_flight.unfinished:
            heapq.heappush(self._timers, (self.now + in_flight.work.grading_s, iteration, "grading"))

    def _end(self, iteration: int, what: str) -> None:
        """Ends a phase of an iteration. `what`: "grading", "training" or "refit" (weight sync)."""
        work = self._cycle[iteration % len(self._cycle)]
        if what == "grading":
            self._ready[iteration] = self._flying.pop(iteration)
        elif what == "training":
            for servers in self._servers:
                servers.paused = servers.station.engine
            heapq.heappush(self._timers, (self.now + work.refit_s, iteration, "refit"))
        else:
            for servers in self._servers:
                servers.paused = False
            self._training, in_flight = False, self._ready.pop(iteration)
            self.spent_s += work.train_s + work.refit_s
            self.ages.update(
                self._versions[sample.policy] - version
                for sample, version in zip(work.samples, in_flight.versions, strict=True)
                if sample.policy in work.trained
            )
            self._versions.update(work.trained)
            self.trained += 1


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
    stations, cycle = _model(plan.iterations)
    chosen = sorted({*STALENESS, case.spec.loop.rollouts.ahead}) if apart else [0]
    return [simulate(stations, cycle, max_staleness=k) for k in chosen]


def simulated(case: Case, plan: RunPlan) -> RunPlan:
    """Returns the plan with `simulated_s`, the simulated seconds of a cycle, if iterations overlap: with max_staleness
    above 0 and engine servers that do not share the trainer's GPUs. Otherwise, returns the plan unchanged."""
    ahead = case.spec.loop.rollouts.ahead
    if not ahead or case.servers is None or case.colocated:
        return plan
    rate = simulate(*_model(plan.iterations), max_staleness=ahead).iterations_per_hour
    return replace(plan, simulated_s=3600 / rate * sum(iteration.times for iteration in plan.iterations))


def predicted(spec: RunSpec, device: str = "") -> tuple[str, list[Schedule]]:
    """Returns the name of the cluster that a specification asks for, and the simulated schedules on that cluster.

    `device`: name of the cluster's GPUs in hardware.DEVICES; "": the GPUs that a plan assumes by default. Raises
    ConfigError if the sizes of a model are unknown, or if the layouts do not divide the cluster.
    """
    nodes, per_node, assumed = own_cluster(spec.engine, spec.cluster).split("x")
    cluster = parse_cluster(f"{nodes}x{per_node}x{device or assumed}")
    work = cycle_work(spec.recipe, spec.roles, spec.run.prompts_per_iteration)
    case = Case(spec=spec, cluster=cluster, models=models_of(spec.roles, ()), work=work)
    return str(cluster), schedules(case, make(case))


def best_staleness(simulations: Sequence[Schedule]) -> int:
    """Returns the lowest max_staleness whose rate is at least NEAR_BEST times the highest rate."""
    best = max(schedule.iterations_per_hour for schedule in simulations)
    return min(schedule.max_staleness for schedule in simulations if schedule.iterations_per_hour >= NEAR_BEST * best)


def _model(iterations: Sequence[IterationPlan]) -> tuple[list[Station], list[SimulatedIteration]]:
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
        stations.setdefault(draw.engine, Station(places=places, rates=[1.0, *(1 / steps)]))
        if draw.tool_s:
            calls = max(1, round(draw.calls_at_once / scale))
            stations[f"tools of {draw.role}"] = Station(places=calls, rates=[1.0] * (calls + 1), engine=False)
    share = min(1.0, KINDS / sum(iteration.times for iteration in iterations))
    cycle = list[SimulatedIteration]()
    for iteration in iterations:
        cycle += [_simulated(iteration, stations, scale)] * max(1, round(iteration.times * share))
    return list(stations.values()), cycle


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
    alone = _Simulation(
        [_Servers(station) for station in stations.values()], [SimulatedIteration(samples=samples, train_s=0.0)], 0,
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
