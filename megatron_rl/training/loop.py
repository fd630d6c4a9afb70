"""The whole of training. Reads top to bottom; knows no Megatron, no engine and no recipe by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_rl.run.checkpoint import write_text
from megatron_rl.training import gate
from megatron_rl.training.player import Ahead
from megatron_rl.training.rollouts import trajectories_from_jsonl, trajectories_to_jsonl
from megatron_rl.training.turns import Played, Players, Recipe, Turn
from megatron_rl.types import Batch, BatchLoss, Prompt, Trajectory, pack
from megatron_rl.world import World

SUMMED = (
    "trained_tokens",
    "packed_tokens",
    "micro_batches",
)  # over an update's optimizer steps; other figures are averaged
ROUNDING = 1e-6  # the mean of equal rewards may miss them by 1e-16, which a group's std + 1e-6 divides


class NothingTrained(RuntimeError):
    """A run that executed no update: it must not look like a success."""


class Policy(Protocol):
    """A trained model. Every method is collective."""

    def update(self, batch: Batch, loss: BatchLoss) -> dict[str, float]: ...

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Data(Protocol):
    def take(self, count: int) -> list[Prompt]: ...


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model and what it is trained with. A frozen player has a policy too; it is never updated."""

    policy: Policy
    loss: BatchLoss
    refit: Callable[[int], None] | None = (
        None  # (version): brings its engine to the policy's weights; collective. None: it has no engine
    )
    needs_reference: bool = False  # the loss wants the frozen reference's log-probs (kl_coef > 0)
    samples_per_optimizer_step: int | None = None  # B; None: one optimizer step per update
    sleeps: bool = False  # off-load between this role's turns


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, how often, and on how much. `evaluate_every` and `save_every` count steps; 0: only at the end."""

    steps: int
    prompts_per_step: int  # P, of every turn
    evaluate_every: int = 0
    evaluate_at_start: bool = True
    save_every: int = 0
    gate: gate.GatePlan | None = None
    record: Path | None = None  # directory: keep every turn's trajectories as they are trained on
    replay: Path | None = None  # directory: train on these instead of playing
    mixed: Literal["keep", "rescore", "drop"] = "keep"  # trajectories of two weight versions


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the run does beside training. `save`, `settle` and `log` are called on every rank; the others on rank 0.

    `save` begins a checkpoint; it and `settle` (True: wait for it) tell the number of turns of one that has become complete.
    """

    log: Callable[..., None]  # (step, scope, metrics, *, turn)
    save: Callable[[int], int | None] = lambda number: number  # number of turns done
    settle: Callable[[bool], int | None] = lambda wait: None
    keep_rollouts: Callable[[Turn, Sequence[Trajectory]], None] = lambda turn, trajectories: None
    should_stop: Callable[[], bool] = lambda: False  # a signal or the time limit asks to save and leave


@dataclass(kw_only=True)
class Progress:
    """Where a run stands: a checkpoint's JSON values. The loop moves it; the same on every rank."""

    step: int = 0
    index: int = 0  # turns done of this step
    number: int = 0  # turns done in all
    turns: dict[str, int] = field(default_factory=dict)  # turns done by role
    updates: dict[str, int] = field(default_factory=dict)  # updates executed by role: the version of its weights
    evaluated: int = -1  # step of the last evaluation
    saved: int = -1  # turns done at the last checkpoint
    first_evaluation: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def next_turn(self, role: str) -> Turn:
        return Turn(step=self.step, index=self.index, role=role, number=self.number, update=self.turns.get(role, 0))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run. `players.engines` has an engine for every role; data (by the role whose turn it is; roles may share a
    reader) and held_out are read on rank 0 alone."""

    world: World
    roles: Mapping[str, Role]
    recipe: Recipe
    players: Players
    data: Mapping[str, Data]
    held_out: Sequence[Prompt] = ()
    hooks: Hooks
    ahead: Ahead | None = None  # on the driver: plays turns in the place of recipe and data, maybe before they are due


def train(setup: Setup, plan: Plan, progress: Progress) -> bool:
    """Alternates turns between the roles; a turn is play -> update -> refit. Every rank runs this same code.

    Goes on from `progress` and moves it. True when all steps are done, False when asked to leave (after saving).
    Raises NothingTrained when no update was executed, GateFailure before the first one, and whatever a part raises, on every rank.
    """
    if plan.steps <= 0 or not any(setup.recipe.turns(s) for s in range(plan.steps)):
        raise NothingTrained(f"{plan.steps} steps hold no turn: set run.steps or the recipe's updates above 0")
    _start(setup, plan, progress)
    while progress.step < plan.steps:
        _evaluate_if_due(setup, plan, progress)
        for role in setup.recipe.turns(progress.step)[progress.index :]:
            _turn(setup, plan, progress, role)
            _settle(setup, wait=False)
            if setup.world.broadcast(setup.hooks.should_stop()):
                _end_step(setup, progress)
                _save(setup, progress)
                _settle(setup, wait=True)
                return False
        _end_step(setup, progress)
        if plan.save_every and progress.step % plan.save_every == 0:
            _save(setup, progress)
    if not sum(progress.updates.values()):
        raise NothingTrained(
            f"{progress.number} turns and no update: every group of samples had equal rewards; look at reward/* and groups_without_signal"
        )
    _save(setup, progress)
    _settle(setup, wait=True)
    _evaluate_if_due(setup, plan, progress)
    return True


def update(role: Role, trajectories: Sequence[Trajectory], *, rescore: bool = False) -> dict[str, float]:
    """Trains on [S] trajectories in ceil(S / B) optimizer steps of nearly equal size, in order. Collective.

    `rescore`: those of several versions count as written by the trainer as it is now.
    """
    batch = pack(trajectories)
    if rescore and any(t.versions for t in trajectories):
        mixed = torch.tensor([bool(t.versions) for t in trajectories]).repeat_interleave(batch.cu_seqlens.diff())
        batch = replace(batch, engine_logprobs=torch.where(mixed, role.policy.logprobs(batch), batch.engine_logprobs))
    parts = split(batch.num_sequences, role.samples_per_optimizer_step)
    if role.needs_reference:
        batch = replace(batch, reference_logprobs=role.policy.logprobs(batch, reference=True))
    if len(parts) > 1:
        batch = replace(batch, old_logprobs=role.policy.logprobs(batch))
    steps = [role.policy.update(batch.select(part), role.loss) for part in parts]
    means = {name: fmean(s[name] for s in steps) for name in steps[0]}
    sums = {name: sum(s[name] for s in steps) for name in SUMMED if name in steps[0]}
    return means | sums | {"optimizer_steps": float(len(steps))}


def split(sequences: int, size: int | None) -> list[range]:
    """S sequences -> ceil(S / size) consecutive ranges whose lengths are at most one apart; all in one when `size` is None."""
    count = 1 if size is None else -(-sequences // size)
    return [range(i * sequences // count, (i + 1) * sequences // count) for i in range(count)]


def _start(setup: Setup, plan: Plan, progress: Progress) -> None:
    """A role that sleeps between its turns begins asleep. Every engine gets its model's weights; then the gate."""
    watch, policies = setup.players.watch, {name: role.policy for name, role in setup.roles.items()}
    for role in setup.roles.values():
        if role.sleeps:
            role.policy.sleep()
    with watch("refit"):
        for name in policies:
            _refit(setup, progress, name)
    if plan.gate is not None and plan.replay is None:
        with watch("gate"):
            found = gate.check(setup.world, setup.players, setup.recipe, policies, plan.gate)
        if found and progress.number == 0:
            setup.hooks.log(progress.step, "gate", found, turn=0)


def _turn(setup: Setup, plan: Plan, progress: Progress, name: str) -> None:
    turn, watch = progress.next_turn(name), setup.players.watch
    played: Played = setup.world.from_driver(_play, setup, plan, turn)
    metrics = dict(played.metrics) | _ages(played.trajectories, progress.updates.get(name, 0))
    usable = [t for t in played.trajectories if any(t.trainable) and not (t.versions and plan.mixed == "drop")]
    if _has_signal(usable):
        metrics |= _learn(setup, progress, name, usable, rescore=plan.mixed == "rescore")
        metrics["skipped"] = 0.0
    else:  # all rewards of every group were equal: there is nothing to learn
        metrics["skipped"] = 1.0
    with watch("record"):
        setup.world.from_driver(setup.hooks.keep_rollouts, turn, played.trajectories)
    setup.hooks.log(turn.step, name, metrics, turn=turn.number)
    progress.index, progress.number = progress.index + 1, progress.number + 1
    progress.turns[name] = progress.turns.get(name, 0) + 1
    if setup.ahead is not None:
        setup.ahead.trained()


def _play(setup: Setup, plan: Plan, turn: Turn) -> Played:
    """On the driver: rollouts for the turn, or those of a recorded one."""
    if setup.ahead is not None:
        with setup.players.watch("wait") if setup.ahead.beside else contextlib.nullcontext():
            played = setup.ahead.take(turn)
    else:
        prompts = setup.data[turn.role].take(plan.prompts_per_step)
        played = (
            setup.recipe.play(turn, prompts, setup.players) if plan.replay is None else read_turn(plan.replay, turn)
        )
    if plan.record is not None:
        write_turn(plan.record, turn, played)
    return played


def _learn(
    setup: Setup, progress: Progress, name: str, trajectories: Sequence[Trajectory], *, rescore: bool
) -> dict[str, float]:
    role, watch = setup.roles[name], setup.players.watch
    with watch("train"):
        if role.sleeps:
            role.policy.wake()
        metrics = update(role, trajectories, rescore=rescore)
    progress.updates[name] = progress.updates.get(name, 0) + 1
    with watch("refit"):
        _refit(setup, progress, name)
        if role.sleeps:
            role.policy.sleep()
    return metrics


def _refit(setup: Setup, progress: Progress, name: str) -> None:
    refit = setup.roles[name].refit
    if refit is not None:
        refit(progress.updates.get(name, 0))


def _end_step(setup: Setup, progress: Progress) -> None:
    """Moves to the next step when this one's turns are done."""
    if progress.index >= len(setup.recipe.turns(progress.step)):
        progress.step, progress.index = progress.step + 1, 0


def _evaluate_if_due(setup: Setup, plan: Plan, progress: Progress) -> None:
    """At the start, every so many steps, and at the end. After the step's checkpoint: a run that goes on from it evaluates again,
    with the same figures, so that the two write the same lines."""
    step = progress.step
    at_start, at_end = step == 0 and plan.evaluate_at_start, step >= plan.steps
    regular = plan.evaluate_every > 0 and step > 0 and step % plan.evaluate_every == 0
    wanted = progress.index == 0 and progress.evaluated != step and (at_start or at_end or regular)
    if not setup.world.broadcast(wanted and bool(setup.held_out)):
        return
    figures = setup.world.from_driver(setup.recipe.evaluate, setup.held_out, setup.players, setup.players.seed)
    progress.evaluated, progress.last_evaluation = step, figures
    if not progress.first_evaluation:
        progress.first_evaluation = figures
    setup.hooks.log(step, "eval", figures, turn=progress.number)


def _save(setup: Setup, progress: Progress) -> None:
    """Once per number of turns."""
    if progress.saved == progress.number:
        return
    progress.saved = progress.number
    with setup.players.watch("save"):
        _complete(setup, setup.hooks.save(progress.number))


def _settle(setup: Setup, *, wait: bool) -> None:
    with setup.players.watch("save"):
        _complete(setup, setup.hooks.settle(wait))


def _complete(setup: Setup, number: int | None) -> None:
    """Turns before a complete checkpoint are never played again."""
    if number is not None and setup.ahead is not None:
        setup.ahead.saved(number)


def _has_signal(trajectories: Sequence[Trajectory]) -> bool:
    """Whether any advantage is more than what rounding leaves of equal rewards."""
    return any(abs(a) > ROUNDING for t in trajectories for a in t.advantages)


def _ages(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Mean and greatest age of the rollouts in updates of their role, and the share of those that two versions wrote."""
    ages = [float(version - t.version) for t in trajectories] or [0.0]
    mixed = fmean(float(bool(t.versions)) for t in trajectories) if trajectories else 0.0
    return {"version_lag": fmean(ages), "staleness": max(ages), "mixed_versions": mixed}


def write_turn(directory: Path, turn: Turn, played: Played) -> Path:
    """Writes turn_000012_ROLE.jsonl: a line of metrics, then a line per trajectory."""
    directory.mkdir(parents=True, exist_ok=True)
    path = _turn_file(directory, turn)
    write_text(path, json.dumps(played.metrics) + "\n" + trajectories_to_jsonl(played.trajectories))
    return path


def read_turn(directory: Path, turn: Turn) -> Played:
    """What `write_turn` wrote for this turn. Raises FileNotFoundError for a turn that was not recorded."""
    path = _turn_file(directory, turn)
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path}: turn {turn.number} ({turn.role}) was not recorded there; record one with debug.save_rollouts"
        )
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    return Played(trajectories=trajectories_from_jsonl(rest), metrics=json.loads(first))


def _turn_file(directory: Path, turn: Turn) -> Path:
    return directory / f"turn_{turn.number:06d}_{turn.role}.jsonl"
