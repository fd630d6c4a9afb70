"""Builds the parts of a reinforcement-learning run, hands them to the loop, and writes the trained models at
its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.chat import tokenizer_of
from megatron_rl.config import sources
from megatron_rl.conversion.trained import export_model
from megatron_rl.data.problems import PromptReader
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.rewards.pool import Graded, GradePool
from megatron_rl.run.checkpoint import STATE, read_json
from megatron_rl.run.console import before_after
from megatron_rl.run.directory import Interrupts
from megatron_rl.run.inputs import Input
from megatron_rl.run.lines import DiskError
from megatron_rl.run.metrics import Sample, Stopwatch
from megatron_rl.session import parts
from megatron_rl.session.common import Driver, Saver, open_driver, open_world_for
from megatron_rl.session.fleet import Fleet, open_fleet
from megatron_rl.session.launch import Place
from megatron_rl.session.listening import Listener, listening
from megatron_rl.spec.explain import explain_recipe
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.text import decode
from megatron_rl.training import loop
from megatron_rl.training.gate import GatePlan
from megatron_rl.training.memory import DeviceMemory
from megatron_rl.training.player import Player, ReplayPlayer, TurnMaker, TurnPlayer, upcoming
from megatron_rl.training.prompts import check_juniors
from megatron_rl.training.store import ROLLOUTS, TurnStore, fingerprint, open_replay
from megatron_rl.training.turns import Grade, Recipe, Table, Turn
from megatron_rl.types import Prompt, Rollout
from megatron_rl.weights.plain_data import refuse_code
from megatron_rl.world import TorchWorld

# Settings of `run` that rollouts do not depend on.
FREE_RUN_SETTINGS = (
    "steps", "keep", "save_every", "async_save", "save_rollouts_every", "resume", "hang_after_s",
)  # fmt: skip


def run(spec: RunSpec, place: Place, *, fresh: bool = False, events: str | None = None) -> int:
    """Runs on every rank. `fresh`: turns that were played before the run stopped are played again. `events`: the socket
    of a program that is told of the run (session.listening). Returns 0 when all steps are done or that program asked to
    stop, 130 when a signal asked to leave (everything is saved)."""
    with open_world_for(spec, place) as world:
        listener = Listener.at(events) if events is not None and world.rank == 0 else None
        return _run(spec, place, world, fresh=fresh, listener=listener)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Models:
    """The policies that a run trains and the data that it reads, before anything plays."""

    tokenizers: Mapping[str, Any]
    readers: Mapping[str, PromptReader]  # by role; roles may share one
    held_out: list[Prompt]
    policies: Mapping[str, MegatronPolicy]


def _run(spec: RunSpec, place: Place, world: TorchWorld, *, fresh: bool, listener: Listener | None) -> int:
    turns = spec.loop.num_iterations
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(announce=place.rank == 0))
        driver = stack.enter_context(open_driver(spec, world, place, total_turns=turns))
        if driver.finished:
            return 0
        driver.summary({"planned": turns, "finished": False})  # one that was finished goes on, with more steps
        pool = stack.enter_context(GradePool(spec.reward))
        if world.rank == 0:
            pool.start()  # its workers import the reward while models are read
        for line in explain_recipe(spec):
            driver.say(line)
        models = _open_models(spec, driver, world)
        progress = _restore(driver, spec, models, world)
        leave = lambda: interrupts.requested or driver.leave.asked()  # noqa: E731
        driver.say(f"opening the engines ({spec.engine.settings.kind}) of {', '.join(spec.engine.opened)}")
        fleet = open_fleet(spec.engine, world, models.tokenizers, models.policies, driver, stack, leave)
        if driver.tracker is not None:
            driver.tracker.watch(fleet.loads)
        table = parts.table(spec, fleet.engines, models.tokenizers, _one_at_a_time(pool.grade), driver)
        player = None
        if world.rank == 0:
            store = _store(spec, models, driver, progress, fresh)
            player = _player(spec, models, table, fleet, driver, progress, store)
            stack.callback(player.close)
        trainees = {
            name: parts.trainee(spec.roles[name], spec.run, policy, fleet.refits.get(name))
            for name, policy in models.policies.items()
        }
        memory = DeviceMemory(trainees, next(iter(fleet.colocated), None))
        hooks = _hooks(spec, world, driver, _Saved(spec.recipe, models, progress, player, memory), interrupts)
        setup = loop.Setup(
            world=world,
            memory=memory,
            policy_of=spec.policy_of,
            recipe=spec.recipe,
            table=table,
            turns=player,
            held_out=models.held_out,
            hooks=hooks if listener is None else listening(hooks, listener, progress, turns),
        )
        started, before = time.monotonic(), _seconds_before(driver)
        driver.leave.begin()
        if listener is not None:
            listener.begin(turns=turns, turn=progress.number)
        stack.enter_context(freeze_garbage_collector())
        finished = loop.train(setup, _plan(spec, models), progress)
        driver.summary(_summary(progress, before + time.monotonic() - started))
        whole = finished or world.broadcast(listener is not None and listener.stopped and not listener.gone)
        for sentence in loop.never_learned(progress, setup.policy_of):
            driver.say(f"WARNING: {sentence}")
        if not finished:
            driver.say(f"saved after turn {progress.number} of {turns}; the same command goes on from there")
        if whole:
            memory.clear()
            _finish(spec, world, driver, models, progress, finished=finished)
    return 0 if whole else 130


def _open_models(spec: RunSpec, driver: Driver, world: TorchWorld) -> _Models:
    driver.say(f"reading tokenizers and data: {spec.data.training['data'].path}")
    tokenizers = {n: tokenizer_of(role.model) for n, role in spec.roles.items()}
    check_juniors(spec.roles, tokenizers)
    readers, held_out, rows = parts.prompts(spec, tokenizers)
    world.from_driver(driver.compare, spec.models, rows)
    driver.say(f"reading models: {', '.join(n for n, role in spec.roles.items() if role.has_policy)}")
    return _Models(tokenizers=tokenizers, readers=readers, held_out=held_out, policies=parts.policies(spec))


def _finish(
    spec: RunSpec, world: TorchWorld, driver: Driver, models: _Models, progress: loop.Progress, *, finished: bool,
) -> None:  # fmt: skip
    """Exports the trained models of a run that is finished, or was asked to stop as if it were, and says where things
    are. Collective."""
    for name in spec.trained_policies:
        target = driver.directory.path / "models" / name
        policy = models.policies[name]
        with policy.memory.present():
            export_model(world, policy.export, spec.roles[name].model, target)
        policy.export.write_adapter(driver.directory.path / "adapters" / name)
        if driver.tracker is not None:
            driver.tracker.keep_model(name, target)
    driver.summary({"finished": finished})
    if progress.last_evaluation:
        driver.say(before_after(progress.first_evaluation, progress.last_evaluation))
    driver.done(str(driver.directory.path))
    if world.rank == 0:
        driver.say(_report(driver.directory.path))


def _report(run: Path) -> str:
    """Writes the run's report. Returns a line with its path, or with why there is none: the run is done anyhow."""
    from megatron_rl.report.pages import write_report  # not needed before the end

    try:
        return f"report: {write_report(run)}"
    except (OSError, DiskError) as error:
        return f"no report was written ({error}); megatron-rl report {run}"


@contextlib.contextmanager
def freeze_garbage_collector() -> Iterator[None]:
    """Keeps Python's garbage collector from looking at libraries and models in the block: it did at least once a turn,
    for half a second, while all threads waited.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclasses.dataclass(frozen=True)
class _Saved:
    """The state that a checkpoint holds beside the files of the policies."""

    recipe: Recipe
    models: _Models
    progress: loop.Progress
    player: Player | None  # on the driver: only it reads data and plays
    memory: DeviceMemory

    def state(self) -> dict[str, Any]:
        """The state of rank 0; empty on the others, whose state nobody writes."""
        if self.player is None:
            return {}
        return {"progress": self.progress.state_dict(), **self.player.state()}


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A policy whose weights are on its device while it is saved: implements common.Saves."""

    name: str
    policy: MegatronPolicy
    memory: DeviceMemory

    def save(self, directory: Path, *, background: bool = False) -> None:
        with self.memory.weights(self.name):
            self.policy.state.save(directory, background=background)

    def saved(self, *, wait: bool) -> bool:
        return self.policy.state.saved(wait=wait)


def _player(
    spec: RunSpec, models: _Models, table: Table, fleet: Fleet, driver: Driver,
    progress: loop.Progress, store: TurnStore,
) -> Player:  # fmt: skip
    """Makes the source of the loop's turns, on the driver."""
    recipe, ahead = spec.recipe, spec.loop.rollouts.max_staleness
    maker: TurnMaker
    if spec.data.replay is not None:
        recorded = open_replay(spec.data.replay, own=driver.directory.path)
        maker = ReplayPlayer(recipe=recipe, readers=models.readers, recorded=recorded)
    else:
        maker = TurnPlayer(
            recipe=recipe,
            readers=models.readers,
            table=table,
            prompts_per_step=spec.run.prompts_per_step,
            uncredited=parts.uncredited(spec),
            own_watch=Stopwatch(driver.watch.beat) if ahead else None,
        )
    turns = upcoming(spec.loop.schedule, progress.state_dict())
    return Player(maker, turns, store, max_staleness=ahead, watch=driver.watch, idle=fleet.tend)


def _store(
    spec: RunSpec, models: _Models, driver: Driver, progress: loop.Progress, fresh: bool
) -> TurnStore:  # fmt: skip
    """Opens the store of turns, on the driver, and says how many turns come from it.

    Turns that were played under other settings or by other code are not taken from it, nor any turn where the run is
    to be `fresh`: all that is not of the machine counts, and the form of the file.
    """
    own = _fingerprint(spec.settings, driver.record.inputs)
    store = TurnStore(
        driver.directory.path / ROLLOUTS, own, keep_every=spec.run.save_rollouts_every,
        decode=lambda role, tokens: decode(models.tokenizers[role], tokens),
    )  # fmt: skip
    left = store.clean(progress.number, fresh=fresh)
    if left.kept:
        driver.say(
            f"{left.kept} turns come from the store, where the run played them before it stopped; --fresh plays them "
            "again"
        )
    if left.dropped:
        driver.say(
            f"{left.dropped} turns that the run played before it stopped are played again: "
            + ("--fresh asks for it" if fresh else "its settings, code, prompts or data have changed since")
        )
    return store


def _fingerprint(settings: Mapping[str, Any], inputs: Mapping[str, Input]) -> str:
    """Returns a text that stands for what rollouts may depend on: the settings but those of the machine and of how
    often is saved, the `inputs` that the run reads, and this package's code.
    """
    plain = {name: section for name, section in settings.items() if name not in ("launch", "sinks", "job")}
    plain["run"] = {name: value for name, value in settings["run"].items() if name not in FREE_RUN_SETTINGS}
    plain["roles"] = {name: {**role, "mean_tokens": None} for name, role in settings["roles"].items()}
    return fingerprint(f"{plain}\n{sorted(map(repr, inputs.items()))}\n{sources.own_code()}")


def _one_at_a_time(grade: Grade) -> Grade:
    """Grades for one thread at a time: rollouts ahead of training and an evaluation may want it at once."""
    lock = threading.Lock()

    def locked(responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        with lock:
            return grade(responses, payloads)

    return locked


def _plan(spec: RunSpec, models: _Models) -> loop.Plan:
    settings, gate = spec.loop, None
    if settings.gate.enabled:
        reader = models.readers[next(iter(spec.recipe.roles()))]
        gate = GatePlan(
            settings=settings.gate,
            prompts=models.held_out or reader.restarted().take(settings.gate.num_prompts),
            wrong_answer=spec.reward.wrong_answer,
            answer_format=spec.reward.answer_format,
            bounds=spec.reward.range,
        )
    return loop.Plan(
        steps=len(settings.schedule),
        evaluate_every=settings.evaluation.every,
        evaluate_at_start=settings.evaluation.at_start,
        save_every=spec.run.save_every,
        gate=gate,
        mixed=settings.rollouts.mixed,
        train_without_signal=spec.run.train_without_signal,
    )


def _restore(driver: Driver, spec: RunSpec, models: _Models, world: TorchWorld) -> loop.Progress:
    if driver.resumed is None:
        return loop.Progress()
    state = read_json(driver.resumed / STATE)
    for name in spec.trained_policies:
        place = driver.resumed / name
        world.from_driver(refuse_code, place)
        models.policies[name].state.load(place)
    spec.recipe.load_state_dict(state["recipe"])
    for name, reader in models.readers.items():
        reader.load_state_dict(state["data"][name])
    return loop.Progress(**state["progress"])


def _hooks(
    spec: RunSpec, world: TorchWorld, driver: Driver, saved: _Saved, interrupts: Interrupts
) -> loop.Hooks:  # fmt: skip
    trained = {name: _Placed(name, saved.models.policies[name], saved.memory) for name in spec.trained_policies}
    saver = Saver(world, driver, trained, background=spec.run.async_save)
    return loop.Hooks(
        log=driver.log,
        say=driver.say,
        show=functools.partial(_show, driver, saved.models.tokenizers),
        save=lambda number: saver.save(number, saved.state()),
        settle=lambda wait: saver.settle(wait=wait),
        should_stop=lambda: interrupts.requested or (world.rank == 0 and driver.leave()),
    )


def _show(driver: Driver, tokenizers: Mapping[str, Any], turn: Turn, rollouts: Mapping[str, Sequence[Rollout]]) -> None:
    """Shows some rollouts of a turn to the sinks that want texts."""
    wanted = driver.tracker.num_samples if driver.tracker is not None else 0
    for role, own in rollouts.items():
        samples = [_sample(tokenizers[role], rollout) for rollout in own[:wanted]]
        if samples:
            driver.show(turn.number, role, samples)


def _sample(tokenizer: Any, rollout: Rollout) -> Sample:
    text = lambda tokens: decode(tokenizer, tokens).text  # noqa: E731
    return Sample(
        group=rollout.group, prompt=text(rollout.tokens[: rollout.start]), response=text(rollout.response),
        rewards=rollout.rewards, length=rollout.length,
    )  # fmt: skip


def _seconds_before(driver: Driver) -> float:
    """Returns the wall-clock seconds of the run's earlier starts, as far as its summary tells."""
    seconds = driver.directory.read_summary().get("seconds")
    wall = seconds.get("wall") if isinstance(seconds, dict) else None
    return wall if isinstance(wall, float) else 0.0


def _summary(progress: loop.Progress, seconds: float) -> dict[str, Any]:
    """Figures of the first and last evaluation as NAME_start and NAME_end, updates by policy, wall-clock seconds."""
    figures: dict[str, Any] = {
        "finished": False,
        "updates": dict(progress.updates),
        "turns": progress.number,
        "seconds": {"wall": seconds},
    }
    for suffix, evaluation in (("start", progress.first_evaluation), ("end", progress.last_evaluation)):
        for name, value in evaluation.items():
            figures[f"{name.replace('/', '_')}_{suffix}"] = value
    return figures
