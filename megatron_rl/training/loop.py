"""The training loop: six stages in the order of the schedule, each a function from values to values. It runs in
the driver (a thread of rank 0) alone, and does not depend on Megatron, on an engine, on a specific recipe or on ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_rl.run.metrics import Stopwatch
from megatron_rl.spec.run_spec import first_iterations
from megatron_rl.training.clock import Clock
from megatron_rl.training.collector import Collector, upcoming
from megatron_rl.training.events import Evaluated, Finished, Measured, Observer, Said, Saved, Trained
from megatron_rl.training.fleet import Checkpoints, Fleet
from megatron_rl.training.held_out_sets import Evaluation, Examiner, followed, ranked, stopped_early
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.lessons import CreditDesk, Credited, Lesson, Metrics, Requests
from megatron_rl.training.progress import NothingTrained, Plan, Progress, why_nothing


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The components of a run that the training loop uses."""

    fleet: Fleet
    rollouts: Collector
    desk: CreditDesk
    examiner: Examiner | None  # None if the run has no held-out problems
    checkpoints: Checkpoints
    observe: Observer
    leave: Callable[[], bool]  # returns True if the run should save a checkpoint and exit (signal, time limit)
    watch: Stopwatch  # measures the seconds of each stage


def train(parts: Parts, plan: Plan, progress: Progress) -> bool:
    """Runs the iterations of the schedule: generates rollouts, updates policies and sends the new weights to the
    engines. Called on the driver, when the engines have the policies' weights (see training.start).

    Continues from `progress` and updates it. Returns True when all iterations are done, or False if `Parts.leave` asked
    to stop; a checkpoint is then saved first. Raises NothingTrained if no update was executed, and any error that a
    component raises.
    """
    schedule = first_iterations(parts.desk.recipe.schedule(), plan.iterations)
    total = sum(map(len, schedule))
    if progress.evaluated == progress.number:  # log again: resuming removed this line from the metrics file
        parts.observe(Measured(progress.cycles_begun, "eval", progress.last_evaluation, progress.number))
    flights = Flights(parts, plan, progress, total)
    for place, iteration in enumerate(upcoming(schedule, progress.state_dict())):
        flights.land_before(iteration)
        if flights.leaving:
            return leave(parts, plan, progress, flights)
        before = progress.of_evaluations()
        evaluation = None if flights else examine_if_due(parts, plan, progress, total)
        if progress.evaluated != before["evaluated"] and parts.leave():
            # the checkpoint was saved before the evaluation, so a run resumed from the checkpoint evaluates again
            vars(progress).update(before)
            return leave(parts, plan, progress, flights)
        if stopped_early(plan.early_stop, progress.early_stop):
            break
        if place == 0:
            parts.observe(Said("writing the first rollouts"))
        flights.begin(iteration, evaluation)
    flights.land(0)
    return leave(parts, plan, progress, flights) if flights.leaving else end(parts, plan, progress, total)


class Updating(NamedTuple):
    """An update that has begun."""

    lesson: Lesson
    version: int  # number of the policy's updates with this one
    metrics: Future[Metrics] | None  # metrics of the update when it is complete; None if the lesson has no signal


@dataclass
class Flight:
    """An iteration whose updates have begun. If `evaluation` is given, it runs beside the iteration: engines get new
    weights only after the evaluation is complete.
    """

    iteration: Iteration
    evaluation: Evaluation | None
    clock: Clock
    credited: Credited
    updates: deque[Updating] = field(default_factory=deque)  # those that are not complete, in the order of training
    state: Mapping[str, Any] | None = None  # of the checkpoint that has begun with the iteration, see `begin_save`


class Flights:
    """The iterations whose updates have begun and that are not complete, in order. Policies whose ranks are apart train
    at the same time, those of one iteration and, if rollouts are generated ahead, those of several. Updates are
    completed in order, each with the refit of its policy: so which weights an update, a score or a rollout has depends
    on the order of iterations alone.
    """

    def __init__(self, parts: Parts, plan: Plan, progress: Progress, total: int) -> None:
        """`total`: number of iterations of the run."""
        self._parts, self._plan, self._progress, self._total = parts, plan, progress, total
        self._flights = deque[Flight]()
        self._in_iteration = False  # whether an iteration has begun since Fleet.end was called
        self.leaving = False  # whether the run should save a checkpoint and exit

    def __len__(self) -> int:
        return len(self._flights)

    def land_before(self, iteration: Iteration) -> None:
        """Completes the iterations that must be complete before an iteration begins: all of them if an evaluation is
        due, and otherwise those that share a rank with it or began too long ago.
        """
        if evaluation_due(self._parts, self._plan, self._progress, self._total, iteration.number) or self.leaving:
            return self.land(0)
        self._finish_what_is_done()
        policies = {self._parts.desk.policy_of[role] for role in iteration.roles}
        shared = [
            place + 1
            for place, flight in enumerate(self._flights)
            if any(self._meets(policy, updating) for policy in policies for updating in flight.updates)
        ]
        self.land(min(self._plan.ahead, len(self._flights) - max(shared, default=0)))

    def begin(self, iteration: Iteration, evaluation: Evaluation | None) -> None:
        """Collects, scores and credits the rollouts of an iteration, and begins its updates."""
        parts, progress = self._parts, self._progress
        fleet, clock = parts.fleet, Clock(parts.watch, parts.fleet.occupied_s)
        fleet.begin(iteration.number)
        self._in_iteration = True
        collected = collect(fleet, parts.rollouts, iteration, clock, meanwhile=self._finish_what_is_done)
        scored = score(fleet, parts.desk.requests(iteration), collected, clock)
        credited = credit(parts, iteration, scored, progress)
        flight = Flight(iteration, evaluation, clock, credited)
        learning = [lesson.policy for lesson in credited.lessons if lesson.signal]
        self._flights.append(flight)
        for lesson in credited.lessons:
            while any(self._meets(lesson.policy, updating) for one in self._flights for updating in one.updates):
                self._finish_one()
            flight.updates.append(begin_update(fleet, lesson, learning, progress))
        if save_due(parts, self._plan, progress, self._total, iteration.number + 1):
            while any(one.state is not None for one in self._flights):  # one checkpoint at a time
                self._complete()
            flight.state = begin_save(parts, progress, iteration.number + 1)

    def land(self, keep: int) -> None:
        """Completes the oldest iterations, until `keep` are left."""
        while len(self._flights) > keep:
            self._complete()
        if self._in_iteration and not self._flights:
            self._parts.fleet.end()
            self._in_iteration = False

    def _meets(self, policy: str, updating: Updating) -> bool:
        return updating.metrics is not None and not self._parts.fleet.apart(policy, updating.lesson.policy)

    def _finish_what_is_done(self) -> None:
        """Completes the updates, and their iterations, that do not have to be waited for."""
        while self._flights:
            updates = self._flights[0].updates
            if updates and updates[0].metrics is not None and not updates[0].metrics.done():
                return
            if updates:
                self._finish(self._flights[0])
            else:
                self._complete()

    def _finish_one(self) -> None:
        """Completes the oldest update, and the iterations before it."""
        while not self._flights[0].updates:
            self._complete()
        self._finish(self._flights[0])

    def _finish(self, flight: Flight) -> None:
        """Completes the oldest update of the oldest iteration: waits for it, and refits the policy's engine."""
        updating, parts, progress = flight.updates.popleft(), self._parts, self._progress
        lesson, credited, iteration = updating.lesson, flight.credited, flight.iteration
        metrics = complete_update(updating, flight.clock)
        if lesson.signal:
            if self._plan.refits_wait:
                parts.rollouts.wait_until_written(iteration.number + self._plan.ahead)
            refit(parts.fleet, updating, flight.evaluation, flight.clock)
        metrics["update"] = float(updating.version)
        for role in lesson.roles:
            progress.last_metrics[role] = credited.metrics.get(role, {})
            is_last = lesson is credited.lessons[-1] and role == lesson.roles[-1]
            shown = {**progress.last_metrics[role], **metrics, **(flight.clock.speed() if is_last else {})}
            parts.observe(Measured(iteration.cycle, role, shown, iteration.number))

    def _complete(self) -> None:
        """Completes the oldest iteration."""
        parts, plan, progress, flight = self._parts, self._plan, self._progress, self._flights[0]
        while flight.updates:
            self._finish(flight)
        self._flights.popleft()
        if flight.evaluation is not None:
            evaluate(parts, plan, progress, flight.evaluation)
        parts.observe(Trained(flight.iteration, flight.credited.rollouts))
        progress.iteration_done(flight.iteration)
        parts.rollouts.trained()
        settle(parts, wait=False)
        parts.observe(Finished(progress.number))
        self.leaving = self.leaving or parts.leave()
        if flight.state is not None:
            save(parts, plan, progress, flight.state)


def collect(
    fleet: Fleet, source: Collector, iteration: Iteration, clock: Clock, meanwhile: Callable[[], None]
) -> Collected:  # fmt: skip
    """Returns the rollouts of the iteration. `meanwhile`: see Collector.take."""
    fleet.generate()
    with clock.waiting():
        return source.take(iteration, meanwhile)


def score(fleet: Fleet, requests: Requests, collected: Collected, clock: Clock) -> Collected:
    """Returns the rollouts with the requested scores added to their `values`."""
    rollouts = dict(collected.rollouts)
    for (role, policy), names in requests.items():
        if not rollouts.get(role):
            continue
        with clock.watch("score"):
            scores = fleet.score(policy, rollouts[role], names)
        rollouts[role] = [
            replace(rollout, values={**rollout.values, **values})
            for rollout, values in zip(rollouts[role], scores, strict=True)
        ]
    return replace(collected, rollouts=rollouts)


def credit(parts: Parts, iteration: Iteration, scored: Collected, progress: Progress) -> Credited:
    """Returns what each policy trains on."""
    credited = scored if scored.credited else parts.rollouts.credit(iteration, scored)
    return parts.desk.lessons(iteration, credited, progress.updates)


def begin_update(fleet: Fleet, lesson: Lesson, learning: Sequence[str], progress: Progress) -> Updating:
    """Begins to train a policy on its lesson, if the lesson has a signal. `learning`: names of all policies that are
    updated in the iteration.
    """
    version = progress.updates.get(lesson.policy, 0)
    if not lesson.signal:
        return Updating(lesson, version, None)
    progress.updates[lesson.policy] = version + 1
    return Updating(lesson, version + 1, fleet.update(lesson, learning))


def complete_update(updating: Updating, clock: Clock) -> Metrics:
    """Waits until an update is complete, and returns its metrics."""
    if updating.metrics is None:  # all rewards are equal, or there are no rollouts
        return {"skipped": 1.0}
    with clock.watch("train"):
        return {"skipped": 0.0, **updating.metrics.result()}


def refit(fleet: Fleet, updating: Updating, evaluation: Evaluation | None, clock: Clock) -> None:
    """Sends the new weights of a policy to its engine, after the evaluation beside training is complete."""
    if evaluation is not None:
        with clock.waiting(), clock.watch("wait"):
            evaluation.result()
    with clock.watch("refit"):
        fleet.refit(updating.lesson.policy, updating.version)


def evaluate(parts: Parts, plan: Plan, progress: Progress, evaluation: Evaluation) -> None:
    """Waits for an evaluation, records it in `progress`, and keeps the best models and checkpoints."""
    number, result = evaluation.number, evaluation.result()
    progress.evaluated = number
    if result is None:
        text = f"the evaluation after iteration {number} is left out: no server has its weights any more"
        return parts.observe(Said(text))
    metrics, answers = result
    progress.last_evaluation, progress.kept = metrics, evaluation.kept
    progress.first_evaluation = progress.first_evaluation or metrics
    parts.observe(Measured(evaluation.cycles_begun, "eval", metrics, number))
    parts.observe(Evaluated(number, answers))
    if plan.best is not None:
        progress.best = ranked(progress.best, number, metrics, plan.best)
        parts.checkpoints.keep_best(number, progress.best)
    if plan.early_stop is not None:
        state = progress.early_stop = followed(progress.early_stop, metrics, plan.early_stop)
        if state is not None and stopped_early(plan.early_stop, state):
            compared = f"{plan.early_stop.metric} was not better than {state[0]:.4g} in {state[1]} evaluations"
            parts.observe(Said(f"ending the run after iteration {number}: {compared} (evaluation.early_stop)"))
    if plan.best is not None and number and progress.saved != number:
        save(parts, plan, progress)
        settle(parts, wait=True)
        parts.checkpoints.remove_surpassed(progress.best)


def evaluation_due(parts: Parts, plan: Plan, progress: Progress, total: int, number: int) -> bool:
    """Returns whether the weights after `number` iterations must be evaluated: at the start, after every
    `plan.evaluate_every` iterations, and at the end. `total`: number of iterations of the run.
    """
    regular = plan.evaluate_every > 0 and number > 0 and number % plan.evaluate_every == 0
    due = regular or number >= total or (number == 0 and plan.evaluate_at_start)
    return parts.examiner is not None and progress.evaluated != number and due


def examine_if_due(parts: Parts, plan: Plan, progress: Progress, total: int) -> Evaluation | None:
    """Evaluates the present weights, if this is due. With `plan.evaluate_beside`, only begins the evaluation and
    returns it.

    Without `plan.best`, a checkpoint that is due after the same iteration is saved before the evaluation. A run resumed
    from this checkpoint evaluates again with the same metrics, so both runs log the same lines. With `plan.best`, the
    checkpoint is saved after the evaluation and contains its result. Earlier checkpoints and models that are no longer
    among the best are removed only when the new checkpoint is completely written.
    """
    if parts.examiner is None or not evaluation_due(parts, plan, progress, total, progress.number):
        return None
    parts.fleet.generate()
    count, number = sum(len(held_out.prompts) for held_out in parts.examiner.sets), progress.number
    parts.observe(Said(f"evaluating {count} held-out problems after iteration {number}"))
    beside = plan.evaluate_beside and number < total
    evaluation = parts.examiner.begin(progress, beside=beside)
    if beside:
        return evaluation
    return evaluate(parts, plan, progress, evaluation)


def save_due(parts: Parts, plan: Plan, progress: Progress, total: int, number: int) -> bool:
    """Returns whether a checkpoint of `number` iterations is due, other than one that an evaluation saves with its
    result. `total`: number of iterations of the run."""
    if not plan.save_every or number % plan.save_every:
        return False
    return plan.best is None or not evaluation_due(parts, plan, progress, total, number)


def begin_save(parts: Parts, progress: Progress, number: int) -> Mapping[str, Any]:
    """Begins the checkpoint of `number` iterations, whose updates have begun. Returns the part of the checkpoint's
    state that later iterations change, because they may begin before these updates are complete: {section of the state:
    its values}.
    """
    settle(parts, wait=True)
    with parts.watch("save"):
        parts.checkpoints.begin(number)
    return {"progress": {"updates": dict(progress.updates)}, **parts.rollouts.state()}


def save(parts: Parts, plan: Plan, progress: Progress, begun: Mapping[str, Any] | None = None) -> None:
    """Saves a checkpoint, unless the current number of finished iterations has already been saved. `begun`: result of
    `begin_save`, if the checkpoint has begun.

    If refits wait for rollouts (Plan.refits_wait), waits for the rollouts that the present engines write: a run that is
    resumed reads them from its store, because its engines have newer weights.
    """
    if progress.saved == progress.number:
        return
    if plan.refits_wait:
        parts.rollouts.wait_until_written(progress.number + plan.ahead - 1)
    progress.saved = progress.number
    with parts.watch("save"):
        begun = {"progress": {}, **parts.rollouts.state()} if begun is None else begun
        state = {**begun, "progress": {**progress.state_dict(), **begun["progress"]}}
        complete(parts, parts.checkpoints.save(progress.number, state))


def settle(parts: Parts, *, wait: bool) -> None:
    """Completes the checkpoint that is being written, if its files are written. With `wait`, waits for them."""
    with parts.watch("save"):
        complete(parts, parts.checkpoints.settle(wait=wait))


def complete(parts: Parts, number: int | None) -> None:
    """Reports a completely written checkpoint, so that the files of the earlier iterations can be removed. `number`:
    number of iterations that the checkpoint covers, or None if no checkpoint was completed.
    """
    if number is not None:
        parts.rollouts.saved(number)
        parts.observe(Saved(number))


def leave(parts: Parts, plan: Plan, progress: Progress, flights: Flights) -> bool:
    """Completes the iterations that have begun, saves a checkpoint of unsaved progress and waits until it is written.
    Does not save before the first iteration. Returns False, the result of a run that was asked to exit.
    """
    flights.land(0)
    if progress.number:
        save(parts, plan, progress)
    settle(parts, wait=True)
    return False


def end(parts: Parts, plan: Plan, progress: Progress, total: int) -> bool:
    """Saves and evaluates the weights of the last iteration. Returns True. Raises NothingTrained if no update was
    executed."""
    if not sum(progress.updates.values()):
        raise NothingTrained(why_nothing(progress))
    if plan.best is None:
        save(parts, plan, progress)
        settle(parts, wait=True)
    examine_if_due(parts, plan, progress, total)
    save(parts, plan, progress)
    settle(parts, wait=True)
    return True
