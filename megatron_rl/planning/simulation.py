"""Simulates a run from event to event: samples visit stations, which are engines and tools, one after the other, and
sets of ranks score, update and send weights. Each rank runs its commands in the order in which they are posted.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.planning.phases import SetWork
from megatron_rl.spec.rank_sets import words

ENGINES = "the engines"


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
    role: str = ""  # role whose servers these are, see SetWork.paused


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
    train_s: float = 0.0
    refit_s: float = 0.0  # seconds of the weight sync after training, in which engines are paused
    grading_s: float = 0.0
    trained: Sequence[str] = ("",)  # policies that the iteration updates
    # the work of each set of ranks, in the order of posting; empty: one set of ranks has train_s and refit_s
    sets: Sequence[SetWork] = ()
    # (ranks, seconds) of each generation by embedded engines, one after the other, in place of `samples`
    generated: Sequence[tuple[range, float]] = ()
    writers: Sequence[str] = ()  # policy of each item of `generated`

    @property
    def works(self) -> Sequence[SetWork]:
        """Returns `sets`, or the work of the only set of ranks."""
        own = SetWork(ranks=range(1), policies=self.trained, update_s=self.train_s, refit_s=self.refit_s)
        return self.sets or [own]


@dataclass(frozen=True, kw_only=True)
class SetSchedule:
    """The simulated time of one set of ranks."""

    ranks: str  # such as 8-15
    busy_s: float  # seconds per iteration in which the set works for its own roles
    idle: float  # share of the time in which a rank of the set does nothing, averaged over the ranks
    # {set of ranks, or ENGINES: share of the time in which the set is idle because it waits for them}
    waits: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The simulated rates of a run with one value of rollouts.max_staleness."""

    max_staleness: int
    iterations_per_hour: float
    # share of the engines' sequence slots that are empty, averaged over time. For embedded engines of several sets of
    # ranks: share of the time in which a rank generates nothing
    engines_idle: float
    trainer_idle: float  # share of the time in which a rank of the trainer neither trains nor sends weights
    # share of the trained samples of each age, for ages 0 to max_staleness
    # A sample's age is the number of updates of its policy between the start of its generation and its training.
    staleness: Sequence[float]
    sets: Sequence[SetSchedule] = ()
    # {set of ranks: share of the time in which no sample is generated because the set has not sent its weights}
    engines_wait: Mapping[str, float] = field(default_factory=dict[str, float])


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
    run = Simulation(stations, cycle, max_staleness, one_at_a_time=one_at_a_time)
    run.until(2 * (max_staleness + 1))
    start, occupied, spent = run.now, run.occupied, dict(run.spent_s)
    run.ages.clear()
    run.waits.clear()
    run.until(run.trained + count)
    seconds, places = run.now - start, sum(station.places for station in stations if station.engine)
    places = places or sum(len(ranks) for ranks in {ranks for work in cycle for ranks, _ in work.generated})
    used = (run.occupied - occupied) / (places * seconds) if places else 1.0
    total, busy = max(1, run.ages.total()), {ranks: own - spent[ranks] for ranks, own in run.spent_s.items()}

    def idle(whole: range) -> float:
        share = {ranks: len({*ranks} & {*whole}) / len(whole) for ranks in busy}
        return 1 - sum(share[ranks] * own for ranks, own in busy.items()) / seconds

    def waits(waiting: str) -> dict[str, float]:
        return {other: waited / seconds for (name, other), waited in run.waits.items() if name == waiting}

    return Schedule(
        max_staleness=max_staleness, iterations_per_hour=3600 * count / seconds, engines_idle=1 - used,
        trainer_idle=idle(range(min(ranks.start for ranks in busy), max(ranks.stop for ranks in busy))),
        staleness=[run.ages[age] / total for age in range(max_staleness + 1)], engines_wait=waits(ENGINES),
        sets=[
            SetSchedule(ranks=words(ranks), busy_s=own / count, idle=idle(ranks), waits=waits(words(ranks)))
            for ranks, own in busy.items()
        ],
    )  # fmt: skip


class Span(NamedTuple):
    """The simulated seconds in which a policy generates, or in which ranks compute its scores, update it or send its
    weights. `kind`: as in _Job."""

    iteration: int
    policy: str
    kind: str
    began: float
    ended: float


class _Servers:
    """The state of a station in a simulation. All samples that the station works on advance at the same rate."""

    def __init__(self, station: Station) -> None:
        self.station, self.paused = station, 0  # paused: number of refits for which the station pauses
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
    generated: int = 0  # number of finished generations by embedded engines, see SimulatedIteration.generated


@dataclass(eq=False)
class _Job:
    """A command of a set of ranks that was posted and is not finished. `kind`: "generation", "scores", "update" or
    "refit" (weight sync)."""

    iteration: int
    kind: str
    ranks: range
    seconds: float
    work: SetWork | None = None  # None for a generation
    running: bool = False


def _follows(job: _Job, earlier: _Job) -> bool:
    """Returns whether a command begins after the end of an earlier one: each rank runs one command at a time, and the
    driver sends the weights of one policy at a time."""
    return _overlap(job.ranks, earlier.ranks) or job.kind == earlier.kind == "refit"


class Simulation:
    """The state of a simulated run."""

    def __init__(
        self, stations: Sequence[Station], cycle: Sequence[SimulatedIteration], ahead: int, *, one_at_a_time: bool
    ) -> None:
        self._servers, self._one_at_a_time = [_Servers(station) for station in stations], one_at_a_time
        self._cycle, self._ahead = cycle, ahead
        self.now = self.occupied = 0.0
        # {set of ranks: seconds of its scores, updates and weight syncs}
        self.spent_s = {work.ranks: 0.0 for iteration in cycle for work in iteration.works}
        # {(idle set of ranks or ENGINES, what it waits for): seconds}, see SetSchedule.waits
        self.waits = defaultdict[tuple[str, str], float](float)
        self.trained = 0  # number of trained iterations
        self.ages = Counter[int]()  # {age: number of trained samples}, see Schedule.staleness
        self._versions = Counter[str]()
        self._flying: dict[int, _InFlight] = {}
        self._ready: dict[int, _InFlight] = {}  # iterations that are generated, graded and not yet trained
        # heap of (second, iteration, phase that ends, number of the timer, its job)
        self._timers: list[tuple[float, int, str, int, _Job | None]] = []
        self._admitted = self._started = self._written = 0  # numbers of iterations and of timers
        self._jobs = list[_Job]()  # commands that are posted and not finished, in the order of posting
        # the iteration whose updates are posted next, and whether its scores are posted already
        self._next, self._scored = 0, False
        self._refits: list[tuple[int, list[_Job]]] = []  # (iteration, weight syncs to be posted)
        self._unfinished = dict[int, int]()  # {iteration: number of sets that have not sent their weights}
        self.spans, self.ends = list[Span](), list[float]()  # ends: the second at which each iteration is trained
        # {(iteration, policy): (begin of the first of its samples, end of the last one)} at stations
        self._generating = dict[tuple[int, str], tuple[float, float]]()

    def until(self, trained: int) -> None:
        """Simulates until `trained` iterations are trained, counted from the beginning of the run."""
        self._proceed()
        while self.trained < trained:
            timer = self._timers[0][0] - self.now if self._timers else math.inf
            waits = [servers.seconds() for servers in self._servers]
            soonest = min([timer, *waits])
            self.now += soonest
            if len(self.spent_s) > 1:
                self._note_waits(soonest)
            for servers in self._servers:
                occupied = servers.advance(soonest)
                self.occupied += occupied if servers.station.engine else 0.0
            for servers, wait in zip(self._servers, waits, strict=True):
                if wait <= soonest:
                    _, iteration, index = heapq.heappop(servers.active)
                    self._next_visit(iteration, index)
                self._fill(servers)
            if timer <= soonest:
                _, iteration, _, _, job = heapq.heappop(self._timers)
                self._end(iteration, job)
                self._proceed()

    def _proceed(self) -> None:
        """Begins the generation of all iterations that may begin now. Posts the commands of the next iterations whose
        samples are graded, and begins the commands that are the first of all their ranks.
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
            if work.generated:
                self._jobs.append(_Job(number, "generation", *work.generated[0]))
            elif not count:
                self._wait(work.grading_s, number, "grading")
        for servers in self._servers:
            self._fill(servers)
        self._post()
        for place, job in enumerate(self._jobs):
            if not job.running and not any(_follows(job, other) for other in self._jobs[:place]):
                job.running = True
                self._wait(job.seconds, job.iteration, job.kind, job)
                self._pause(job, 1)

    def _post(self) -> None:
        """Posts the commands of the iterations whose samples are graded, in the order of the iterations. The updates of
        an iteration follow when all its scores are computed."""
        while self._next in self._ready:
            number, works = self._next, self._cycle[self._next % len(self._cycle)].works
            if not self._scored:
                self._jobs += [_Job(number, "scores", one.ranks, one.scores_s, one) for one in works if one.scores_s]
                self._scored = True
            if any(job.iteration == number and job.kind == "scores" for job in self._jobs):
                break
            self._jobs += [_Job(number, "update", one.ranks, one.update_s, one) for one in works]
            self._refits.append((number, [_Job(number, "refit", one.ranks, one.refit_s, one) for one in works]))
            self._unfinished[number], self._next, self._scored = len(works), number + 1, False
        while self._refits:
            if self._cycle[0].generated and self._written <= self._refits[0][0] + self._ahead:
                break  # embedded engines keep their weights until the rollouts that need them are written
            self._jobs += self._refits.pop(0)[1]

    def _wait(self, seconds: float, iteration: int, what: str, job: _Job | None = None) -> None:
        self._started += 1
        heapq.heappush(self._timers, (self.now + seconds, iteration, what, self._started, job))

    def _pause(self, job: _Job, count: int) -> None:
        """Pauses the engines that a weight sync updates. `count`: 1 at the begin of the sync, -1 at its end."""
        for servers in self._servers if job.kind == "refit" else ():
            paused = None if job.work is None else job.work.paused
            if servers.station.engine and (paused is None or servers.station.role in paused):
                servers.paused += count

    def _note_waits(self, seconds: float) -> None:
        """Adds `seconds` to the waits of the sets of ranks that are idle, and of the engines if they are."""
        running = [job for job in self._jobs if job.running]
        for ranks in self.spent_s:
            if any(_overlap(job.ranks, ranks) for job in running):
                continue
            posted = next((job for job in self._jobs if _overlap(job.ranks, ranks)), None)
            if posted is None:
                whom = self._late(self._next)
            else:
                earlier = [job for job in running if _overlap(job.ranks, posted.ranks)]
                whom = words([*earlier, *running][0].ranks)
            self.waits[words(ranks), whom] += seconds
        generating = any(job.kind == "generation" for job in running) or any(s.active for s in self._servers)
        if not generating and (whom := self._late(self.trained)) != ENGINES:
            self.waits[ENGINES, whom] += seconds

    def _late(self, number: int) -> str:
        """Returns what the updates of iteration `number`, or the next rollouts, wait for: ENGINES or a set of ranks."""
        if number >= self._admitted:
            number = self.trained
        running = [job for job in self._jobs if job.running and job.kind != "generation"]
        whom = [job for job in running if job.iteration == number] or (running if number not in self._flying else [])
        return words(whom[0].ranks) if whom else ENGINES

    def _fill(self, servers: _Servers) -> None:
        """Moves waiting samples into free places of a station, samples of older iterations first."""
        while servers.queue and len(servers.active) < servers.station.places:
            iteration, _, index, work = heapq.heappop(servers.queue)
            in_flight = self._flying[iteration]
            if not in_flight.visits[index]:
                policy = in_flight.work.samples[index].policy
                in_flight.versions[index] = self._versions[policy]
                self._generating.setdefault((iteration, policy), (self.now, self.now))
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
        key = iteration, in_flight.work.samples[index].policy
        self._generating[key] = self._generating.get(key, (self.now,))[0], self.now
        for successor in in_flight.later.get(index, ()):
            self._next_visit(iteration, successor)
        if not in_flight.unfinished:
            self._wait(in_flight.work.grading_s, iteration, "grading")

    def _end(self, iteration: int, job: _Job | None) -> None:
        """Ends a command of an iteration, or its grading if `job` is None."""
        if job is None:
            self._ready[iteration] = self._flying.pop(iteration)
            for key in [key for key in self._generating if key[0] == iteration]:
                self.spans.append(Span(*key, "generation", *self._generating.pop(key)))
            return
        self._jobs.remove(job)
        self._note(job)
        if job.work is None:
            self._end_generation(job, self._flying[iteration])
        elif job.kind == "refit":
            self._pause(job, -1)
            work, in_flight, policies = job.work, self._ready[iteration], job.work.policies
            self.spent_s[work.ranks] += work.scores_s + work.update_s + work.refit_s
            self.ages.update(
                self._versions[sample.policy] - version
                for sample, version in zip(in_flight.work.samples, in_flight.versions, strict=True)
                if sample.policy in policies
            )
            self._versions.update(policies)
            self._unfinished[iteration] -= 1
            while self._unfinished.get(self.trained) == 0:
                del self._unfinished[self.trained], self._ready[self.trained]
                self.trained += 1
                self.ends.append(self.now)

    def _note(self, job: _Job) -> None:
        """Adds the spans of a finished command. A set of ranks works for its policies one after the other."""
        if job.work is not None:
            shares = job.work.shares or dict.fromkeys(job.work.policies, 1.0)
        else:
            work, place = self._flying[job.iteration].work, self._flying[job.iteration].generated
            shares = {policy: 1.0 for policy in work.writers[place : place + 1]}
        began, total = self.now - job.seconds, sum(shares.values())
        for policy, share in shares.items():
            ended = began + job.seconds * share / total if total else began
            self.spans.append(Span(job.iteration, policy, job.kind, began, ended))
            began = ended

    def _end_generation(self, job: _Job, in_flight: _InFlight) -> None:
        """Ends a generation by embedded engines. Posts the next generation of the iteration, or begins the grading."""
        self.occupied += len(job.ranks) * job.seconds
        in_flight.generated += 1
        if in_flight.generated < len(in_flight.work.generated):
            self._jobs.append(_Job(job.iteration, "generation", *in_flight.work.generated[in_flight.generated]))
        else:
            self._written = max(self._written, job.iteration + 1)
            self._wait(in_flight.work.grading_s, job.iteration, "grading")


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
