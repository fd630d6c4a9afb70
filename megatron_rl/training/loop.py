"""The whole of training. Reads top to bottom; knows no Megatron, no engine and no recipe by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np

from megatron_rl.spec.run_spec import first_iterations
from megatron_rl.training import preflight
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.iteration import Collected, Iteration, Recipe, RolloutContext, Schedule
from megatron_rl.training.update import Trainee, update
from megatron_rl.types import Prompt, Rollout
from megatron_rl.world import World

ROUNDING = 1e-6  # the mean of equal rewards may miss them by 1e-16, which a group's std + 1e-6 divides
# Metrics that show why an iteration had nothing to learn from, by the names that recipes log.
TELLING = (
    "groups_without_signal", "alike", "groups_alike", "reward/trained", "outcome_of_all", "samples", "rounds",
    "ungraded", "graded/timeout", "graded/error",
)  # fmt: skip


class NothingTrained(RuntimeError):
    """A run that executed no update: it must not look like a success."""


class IterationSource(Protocol):
    """The giver of the loop's iterations, on the driver: training.collector.Collector, from a recipe or from a
    recording."""

    def take(self, iteration: Iteration) -> Collected:
        """The rollouts of the iteration that is due."""
        ...

    def trained(self) -> None:
        """Tells that the iteration taken last is done and its engines have the new weights."""
        ...

    def saved(self, number: int) -> None:
        """Tells that a checkpoint holds all iterations before `number`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of a run, and how often it evaluates and saves.

    `evaluate_every` and `save_every` count iterations; 0: only at the end.
    """

    iterations: int  # of the whole run
    evaluate_every: int = 0
    evaluate_at_start: bool = True
    save_every: int = 0
    preflight: preflight.PreflightPlan | None = None
    mixed: Literal["keep", "rescore", "drop"] = "keep"  # rollouts that several weight versions wrote
    train_without_signal: bool = False  # true: an update whose advantages are all 0 takes its optimizer steps too


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The actions of a run beside training.

    Every rank calls `save`, `settle`, `log` and `say`; rank 0 alone calls `iteration_done` and `should_stop`.

    `save` begins a checkpoint; it and `settle` (True: wait for it) tell the number of iterations of one that has become
    complete.
    """

    log: Callable[..., None]  # (cycle, scope, metrics, *, iteration)
    save: Callable[[int], int | None] = lambda number: number  # number of iterations done
    settle: Callable[[bool], int | None] = lambda wait: None
    iteration_done: Callable[[int], None] = lambda number: None  # number of iterations done
    # A signal, the time limit or a program that listens asks to save and leave; asked after iterations and evaluations.
    should_stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda text: None  # tells a person what takes time now
    # on the driver alone
    show: Callable[[Iteration, Mapping[str, Sequence[Rollout]]], None] = lambda iteration, rollouts: None


@dataclass(kw_only=True)
class Progress:
    """The place where a run stands: a checkpoint's JSON values. The loop moves it; all but `kept`, which the driver
    has, is the same on every rank."""

    cycle: int = 0
    index: int = 0  # iterations done of this cycle
    number: int = 0  # iterations done in all
    iterations: dict[str, int] = field(default_factory=dict)  # iterations done by role
    updates: dict[str, int] = field(default_factory=dict)  # updates executed by policy: the version of its weights
    evaluated: int = -1  # iterations done at the last evaluation
    saved: int = -1  # iterations done at the last checkpoint
    first_evaluation: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # RolloutContext.kept
    # of each role's last iteration, on the driver
    last_metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "last_metrics"}

    @property
    def cycles_begun(self) -> int:
        """Number of cycles of which at least one iteration is done."""
        return self.cycle + (self.index > 0)

    def next_iteration(self, schedule: Schedule) -> Iteration:
        """Returns the iteration that is due, and moves to its cycle."""
        while self.index >= len(schedule[self.cycle]):
            self.cycle, self.index = self.cycle + 1, 0
        roles = schedule[self.cycle][self.index]
        return Iteration(
            cycle=self.cycle, index=self.index, roles=roles, number=self.number, updates=dict(self.iterations)
        )

    def iteration_done(self, iteration: Iteration) -> None:
        self.index, self.number = self.index + 1, self.number + 1
        for role in iteration.roles:
            self.iterations[role] = self.iterations.get(role, 0) + 1


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run. `memory` has every policy by its name, trained or not; `policy_of` names the policy of each
    trained role (another role's, where two roles share one). `context`, `iterations` and `held_out` are used on rank 0
    alone.
    """

    world: World
    memory: DeviceMemory
    policy_of: Mapping[str, str]
    recipe: Recipe
    context: RolloutContext
    iterations: IterationSource | None  # None on all ranks but the driver
    held_out: Sequence[Prompt] = ()
    hooks: Hooks

    @property
    def trainees(self) -> Mapping[str, Trainee]:
        return self.memory.trainees


def train(setup: Setup, plan: Plan, progress: Progress) -> bool:
    """Collects rollouts, updates and refits iteration by iteration as the recipe's schedule says. Every rank runs this
    same code.

    Goes on from `progress` and moves it. Returns True when all iterations are done, False when asked to leave (after
    saving). Raises NothingTrained when no update was executed, PreflightFailure before the first one, and whatever a
    part raises, on every rank.
    """
    schedule = first_iterations(setup.recipe.schedule(), plan.iterations)
    total = sum(map(len, schedule))
    if not total:
        raise NothingTrained("the run has 0 iterations: set run.iterations or the recipe's updates above 0")
    _start(setup, plan, progress)
    told = False
    while progress.number < total:
        before = progress.evaluated
        if _evaluate_if_due(setup, plan, progress, total) and _asked_to_stop(setup):
            progress.evaluated = before  # a checkpoint comes before the evaluation at the same iteration
            _leave(setup, progress)
            return False
        if not told:
            setup.hooks.say("writing the first rollouts")
            told = True
        _iteration(setup, plan, progress, schedule)
        _settle(setup, wait=False)
        if setup.world.rank == 0:
            setup.hooks.iteration_done(progress.number)
        if _asked_to_stop(setup):
            _leave(setup, progress)
            return False
        if plan.save_every and progress.number % plan.save_every == 0:
            _save(setup, progress)
    if not sum(progress.updates.values()):
        raise NothingTrained(_why_nothing(progress))
    _save(setup, progress)
    _settle(setup, wait=True)
    _evaluate_if_due(setup, plan, progress, total)
    return True


def _asked_to_stop(setup: Setup) -> bool:
    """Returns what the driver's hook says, on every rank."""
    return setup.world.broadcast(setup.hooks.should_stop())


def _leave(setup: Setup, progress: Progress) -> None:
    """Saves what is not saved yet. Before the first iteration there is nothing."""
    if progress.number:
        _save(setup, progress)
    _settle(setup, wait=True)


def never_learned(progress: Progress, policy_of: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each trained role that had iterations, and whose policy had no update."""
    idle = [
        role for role, name in policy_of.items() if progress.iterations.get(role) and not progress.updates.get(name)
    ]
    return [
        f"{role} never learned: {progress.iterations[role]} iterations and no update, as every group of its samples "
        f"had equal rewards, or was left out{_last_metrics(progress, [role])}"
        for role in idle
    ]


def _last_metrics(progress: Progress, roles: Iterable[str]) -> str:
    """Returns the metrics of the roles' last iterations that show why there was nothing to learn from, in brackets."""
    shown = {
        role: ", ".join(f"{name} = {found[name]:.4g}" for name in TELLING if name in found)
        for role in roles
        if (found := progress.last_metrics.get(role))
    }
    metrics = "; ".join(f"{role}: {text}" for role, text in shown.items() if text)
    return f" (the last iteration's metrics: {metrics})" if metrics else ""


def _why_nothing(progress: Progress) -> str:
    """Returns why no iteration had anything to learn from, by the metrics of the last iteration that show it."""
    told = _last_metrics(progress, progress.last_metrics)
    return (
        f"{progress.number} iterations and no update: every group of samples had equal rewards, or was left out{told}. "
        "Where the reward is the least there is, the model solves nothing, or the reward does not understand its "
        "answers; where it is the greatest, the problems are too easy; where graded/error or graded/timeout counts, "
        "the reward failed. The answers stand in the run's rollouts: megatron-rl report RUN"
    )


def _start(setup: Setup, plan: Plan, progress: Progress) -> None:
    """Puts policies to sleep that sleep between their iterations, gives every engine its policy's weights, and tries
    the preflight.
    """
    watch = setup.context.watch
    setup.memory.start()
    setup.hooks.say("giving the engines the policies' weights")
    with watch("refit"):
        setup.memory.clear([name for name, trainee in setup.trainees.items() if trainee.refit is not None])
        for name in setup.trainees:
            _refit(setup, progress, name)
    if plan.preflight is not None:
        setup.hooks.say("preflight: trying the reward and the log-probabilities of the engines")
        with watch("preflight"):
            found = preflight.check(setup.world, setup.context, setup.recipe, setup.memory, plan.preflight)
        if found and progress.number == 0:
            setup.hooks.log(progress.cycle, "preflight", found, iteration=0)


def _iteration(setup: Setup, plan: Plan, progress: Progress, schedule: Schedule) -> None:
    """Takes an iteration's rollouts and updates every policy that has some, in the order of the roles."""
    iteration = progress.next_iteration(schedule)
    due = _Due(setup, plan, iteration)
    setup.memory.generate()
    found = setup.world.from_driver(due.take)
    learning = [name for name, signal in found if signal]
    for name, signal in found:
        version = progress.updates.get(name, 0)
        metrics = {"skipped": 0.0 if signal else 1.0}  # no signal: equal rewards, or no rollouts
        if signal:
            with setup.context.watch("train"), setup.memory.train(name, learning):
                trainee = setup.trainees[name]
                metrics |= update(setup.world, trainee, due.usable.get(name), rescore=plan.mixed == "rescore")
            progress.updates[name] = version + 1
            with setup.context.watch("refit"):
                _refit(setup, progress, name)
        metrics["update"] = float(progress.updates.get(name, 0))  # of the policy, with this one
        for role in (r for r in iteration.roles if setup.policy_of[r] == name):
            shown = due.metrics(role, version)
            progress.last_metrics[role] = shown
            setup.hooks.log(iteration.cycle, role, shown | metrics, iteration=iteration.number)
    if setup.world.rank == 0:
        setup.hooks.show(iteration, due.rollouts)
    progress.iteration_done(iteration)
    if setup.iterations is not None:
        setup.iterations.trained()


class _Due:
    """The iteration that is due: its rollouts and metrics, which stay on the driver."""

    def __init__(self, setup: Setup, plan: Plan, iteration: Iteration) -> None:
        self._setup, self._plan, self._iteration = setup, plan, iteration
        self._collected = Collected(rollouts={}, metrics={})
        self.usable: dict[str, list[Rollout]] = {}  # by policy

    def take(self) -> list[tuple[str, bool]]:
        """Gets the rollouts, on the driver.

        Returns for each policy of the iteration, in order, whether there is something to learn from.
        """
        assert self._setup.iterations is not None, "iterations are taken on the driver"
        self._collected = self._setup.iterations.take(self._iteration)
        for role in self._iteration.roles:
            usable = [r for r in self._collected.rollouts.get(role, ()) if self._is_usable(r)]
            self.usable.setdefault(self._setup.policy_of[role], []).extend(usable)
        return [(name, self._has_signal(name)) for name in self.usable]

    @property
    def rollouts(self) -> Mapping[str, Sequence[Rollout]]:
        """Returns the iteration's rollouts by role; none on other ranks than the driver."""
        return self._collected.rollouts

    def metrics(self, role: str, version: int) -> dict[str, float]:
        """Metrics of the role's rollouts, none on other ranks than the driver.

        `version`: of the policy before its update.
        """
        rollouts = self._collected.rollouts.get(role)
        if rollouts is None:
            return {}
        return {**self._collected.metrics.get(role, {}), **_ages(rollouts, version)}

    def _is_usable(self, rollout: Rollout) -> bool:
        return rollout.num_trainable > 0 and not (self._plan.mixed == "drop" and len(rollout.versions) > 1)

    def _has_signal(self, name: str) -> bool:
        """Returns whether any advantage is more than what rounding leaves of equal rewards; a loss that needs none, and
        a plan that trains without signal, learn from any rollout.
        """
        rollouts = self.usable[name]
        if self._plan.train_without_signal or not self._setup.trainees[name].loss.uses_advantages:
            return bool(rollouts)
        return any(np.abs(np.asarray(r.advantages)).max(initial=0.0) > ROUNDING for r in rollouts)


def _refit(setup: Setup, progress: Progress, name: str) -> None:
    """Brings a policy's engine to its weights."""
    refit = setup.trainees[name].refit
    with setup.memory.refit(name):
        if refit is not None:
            refit(progress.updates.get(name, 0))


def _evaluate_if_due(setup: Setup, plan: Plan, progress: Progress, total: int) -> bool:
    """Evaluates at the start, after every `plan.evaluate_every` iterations, and at the end. Returns whether it did.

    A checkpoint at the same iteration comes first: a run that goes on from the checkpoint evaluates again, with the
    same metrics, so that both runs write the same lines.
    """
    done = progress.number
    at_start, at_end = done == 0 and plan.evaluate_at_start, done >= total
    regular = plan.evaluate_every > 0 and done > 0 and done % plan.evaluate_every == 0
    wanted = progress.evaluated != done and (at_start or at_end or regular)
    if not setup.world.broadcast(wanted and bool(setup.held_out)):
        return False
    context = replace(setup.context, kept=progress.kept)
    setup.memory.generate()
    setup.hooks.say(f"evaluating {len(setup.held_out)} held-out problems after iteration {done}")
    metrics = setup.world.from_driver(setup.recipe.evaluate, setup.held_out, context)
    progress.evaluated, progress.last_evaluation = done, metrics
    if not progress.first_evaluation:
        progress.first_evaluation = metrics
    setup.hooks.log(progress.cycles_begun, "eval", metrics, iteration=done)
    return True


def _save(setup: Setup, progress: Progress) -> None:
    """Saves once per number of iterations."""
    if progress.saved == progress.number:
        return
    progress.saved = progress.number
    with setup.context.watch("save"):
        setup.memory.clear()
        _complete(setup, setup.hooks.save(progress.number))


def _settle(setup: Setup, *, wait: bool) -> None:
    with setup.context.watch("save"):
        _complete(setup, setup.hooks.settle(wait))


def _complete(setup: Setup, number: int | None) -> None:
    """Tells the collector of a complete checkpoint: iterations before it are never collected again."""
    if number is not None and setup.iterations is not None:
        setup.iterations.saved(number)


def _ages(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Mean and greatest age of the rollouts in updates of their policy, and the share of those that several versions
    wrote.
    """
    ages = [float(version - r.version) for r in rollouts if r.num_trainable] or [0.0]
    mixed = fmean(float(len(r.versions) > 1) for r in rollouts) if rollouts else 0.0
    return {"version_lag": fmean(ages), "staleness": max(ages), "mixed_versions": mixed}
