"""The training loop: six stages in the order of the schedule, each a function from values to values. It runs in
the driver (a thread of rank 0) alone, and does not depend on Megatron, on an engine, on a specific recipe or on ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

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


class Updating(NamedTuple):
    """An update that has begun."""

    lesson: Lesson
    metrics: Future[Metrics] | None  # metrics of the update when it is complete; None if the lesson has no signal


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
    for place, iteration in enumerate(upcoming(schedule, progress.state_dict())):
        before = progress.of_evaluations()
        evaluation = examine_if_due(parts, plan, progress, total)
        if progress.evaluated != before["evaluated"] and parts.leave():
            # the checkpoint was saved before the evaluation, so a run resumed from the checkpoint evaluates again
            vars(progress).update(before)
            return leave(parts, progress)
        if stopped_early(plan.early_stop, progress.early_stop):
            break
        if place == 0:
            parts.observe(Said("writing the first rollouts"))
        with parts.fleet.iteration(iteration.number):
            iterate(parts, plan, progress, iteration, evaluation)
        settle(parts, wait=False)
        parts.observe(Finished(progress.number))
        if parts.leave():
            return leave(parts, progress)
        due = plan.save_every and progress.number % plan.save_every == 0
        if due and not (plan.best and evaluation_due(parts, plan, progress, total)):
            save(parts, progress)
    return end(parts, plan, progress, total)


def iterate(parts: Parts, plan: Plan, progress: Progress, iteration: Iteration, evaluation: Evaluation | None) -> None:
    """Executes one iteration. If `evaluation` is given, it runs beside the iteration: engines get new weights only
    after the evaluation is complete.
    """
    fleet, clock = parts.fleet, Clock(parts.watch, parts.fleet.occupied_s)
    collected = collect(fleet, parts.rollouts, iteration, clock)
    scored = score(fleet, parts.desk.requests(iteration), collected, clock)
    credited = credit(parts, iteration, scored, progress)
    learning = [lesson.policy for lesson in credited.lessons if lesson.signal]

    def finish(updating: Updating) -> None:
        lesson = updating.lesson
        metrics = complete_update(updating, clock)
        if lesson.signal:
            progress.updates[lesson.policy] = progress.updates.get(lesson.policy, 0) + 1
            refit(fleet, lesson, progress.updates[lesson.policy], evaluation, clock)
        metrics["update"] = float(progress.updates.get(lesson.policy, 0))  # number of the policy's updates so far
        for role in lesson.roles:
            progress.last_metrics[role] = credited.metrics.get(role, {})
            is_last = lesson is credited.lessons[-1] and role == lesson.roles[-1]
            shown = {**progress.last_metrics[role], **metrics, **(clock.speed() if is_last else {})}
            parts.observe(Measured(iteration.cycle, role, shown, iteration.number))

    updates = deque[Updating]()  # that are not complete; policies whose ranks are apart train at the same time
    for lesson in credited.lessons:
        while not all(fleet.apart(lesson.policy, updating.lesson.policy) for updating in updates):
            finish(updates.popleft())
        updates.append(begin_update(fleet, lesson, learning))
    while updates:
        finish(updates.popleft())
    if evaluation is not None:
        evaluate(parts, plan, progress, evaluation)
    parts.observe(Trained(iteration, credited.rollouts))
    progress.iteration_done(iteration)
    parts.rollouts.trained()


def collect(fleet: Fleet, source: Collector, iteration: Iteration, clock: Clock) -> Collected:
    """Returns the rollouts of the iteration."""
    fleet.generate()
    with clock.waiting():
        return source.take(iteration)


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


def begin_update(fleet: Fleet, lesson: Lesson, learning: Sequence[str]) -> Updating:
    """Begins to train a policy on its lesson, if the lesson has a signal. `learning`: names of all policies that are
    updated in the iteration.
    """
    return Updating(lesson, fleet.update(lesson, learning) if lesson.signal else None)


def complete_update(updating: Updating, clock: Clock) -> Metrics:
    """Waits until an update is complete, and returns its metrics."""
    if updating.metrics is None:  # all rewards are equal, or there are no rollouts
        return {"skipped": 1.0}
    with clock.watch("train"):
        return {"skipped": 0.0, **updating.metrics.result()}


def refit(fleet: Fleet, lesson: Lesson, version: int, evaluation: Evaluation | None, clock: Clock) -> None:
    """Sends the new weights of the lesson's policy to its engine, after the evaluation beside training is complete."""
    if evaluation is not None:
        with clock.waiting(), clock.watch("wait"):
            evaluation.result()
    with clock.watch("refit"):
        fleet.refit(lesson.policy, version)


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
        save(parts, progress)
        settle(parts, wait=True)
        parts.checkpoints.remove_surpassed(progress.best)


def evaluation_due(parts: Parts, plan: Plan, progress: Progress, total: int) -> bool:
    """Returns whether the present weights must be evaluated: at the start, after every `plan.evaluate_every`
    iterations, and at the end. `total`: number of iterations of the run.
    """
    number = progress.number
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
    if parts.examiner is None or not evaluation_due(parts, plan, progress, total):
        return None
    parts.fleet.generate()
    count, number = sum(len(held_out.prompts) for held_out in parts.examiner.sets), progress.number
    parts.observe(Said(f"evaluating {count} held-out problems after iteration {number}"))
    beside = plan.evaluate_beside and number < total
    evaluation = parts.examiner.begin(progress, beside=beside)
    if beside:
        return evaluation
    return evaluate(parts, plan, progress, evaluation)


def save(parts: Parts, progress: Progress) -> None:
    """Starts a checkpoint, unless the current number of finished iterations has already been saved."""
    if progress.saved == progress.number:
        return
    progress.saved = progress.number
    with parts.watch("save"):
        state = {"progress": progress.state_dict(), **parts.rollouts.state()}
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


def leave(parts: Parts, progress: Progress) -> bool:
    """Saves a checkpoint of unsaved progress and waits until it is written. Does not save before the first iteration.
    Returns False, the result of a run that was asked to exit.
    """
    if progress.number:
        save(parts, progress)
    settle(parts, wait=True)
    return False


def end(parts: Parts, plan: Plan, progress: Progress, total: int) -> bool:
    """Saves and evaluates the weights of the last iteration. Returns True. Raises NothingTrained if no update was
    executed."""
    if not sum(progress.updates.values()):
        raise NothingTrained(why_nothing(progress))
    if plan.best is None:
        save(parts, progress)
        settle(parts, wait=True)
    examine_if_due(parts, plan, progress, total)
    save(parts, progress)
    settle(parts, wait=True)
    return True
