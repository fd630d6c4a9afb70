"""Builds the parts of a reinforcement-learning run, runs the training loop, and exports the trained models."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.base import ConfigError
from megatron_rl.config.engines import Embedded
from megatron_rl.engines.data_parallel_engine import DataParallelEngine
from megatron_rl.lib.leaf_modules import leaf
from megatron_rl.messages.commands import Commands
from megatron_rl.rewards.source_grading import GradePools
from megatron_rl.run.console import before_after
from megatron_rl.run.json_lines import DiskError
from megatron_rl.run.profiling import memory_explained, profiled
from megatron_rl.run.run_directory import Interrupts
from megatron_rl.session import builders, evaluations
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.open_engines import RunEngines, Supervised, open_engines
from megatron_rl.session.parent_events import Listener, listening
from megatron_rl.session.run_checkpoints import RunCheckpoints
from megatron_rl.session.run_collection import open_collector, open_store
from megatron_rl.session.run_observer import run_observer
from megatron_rl.session.run_parts import RunParts, open_parts
from megatron_rl.session.run_setup import open_driver, open_world_for
from megatron_rl.session.run_stages import due_resets, in_stages
from megatron_rl.session.run_timeline import Timeline
from megatron_rl.session.saving import PolicyFiles
from megatron_rl.session.trained import export_model
from megatron_rl.spec.explain import explain_recipe
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.training import loop
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.held_out_sets import Examiner, stopped_early
from megatron_rl.training.iteration_engines import GradeTurns
from megatron_rl.training.lessons import CreditDesk
from megatron_rl.training.progress import Plan, Progress, never_learned
from megatron_rl.training.rank_fleet import RankFleet
from megatron_rl.training.start import start


def run(spec: RunSpec, place: Place, *, fresh: bool = False, events: str | None = None) -> int:
    """Runs `megatron-rl train`. Every rank calls it.

    `fresh`: if True, rollouts that an earlier start of the run stored and did not train on are generated again.
    `events`: path of the Unix socket of a parent program that receives the run's events (session.parent_events).
    Returns 0 if all iterations are done or the parent program asked to stop. Returns 130 if the run was asked to exit
    before, for example by a signal; the run then has saved everything."""
    iterations = spec.loop.num_iterations
    with open_world_for(spec, place) as world, contextlib.ExitStack() as stack:
        listener = Listener.at(events) if events is not None and world.rank == 0 else None
        interrupts = stack.enter_context(Interrupts(announce=place.rank == 0))
        driver = stack.enter_context(open_driver(spec, world, place, total_iterations=iterations))
        if driver.finished:
            return 0
        # Sets `finished` to False, because a finished run may be resumed with more iterations.
        driver.summary({"planned": iterations, "finished": False})
        pools = GradePools(stack)
        if world.rank == 0:
            for reward in spec.rewards.values():
                pools.of(reward).start()  # workers import the reward function while this process loads the models
        for line in explain_recipe(spec):
            driver.say(line)
        if world.rank == 0:
            driver.summary({"schedule": _predicted_schedule(spec)})
        parts = open_parts(spec, world, driver, interrupts)
        return _train(parts, pools, stack, fresh=fresh, listener=listener)


def _train(
    parts: RunParts, pools: GradePools, stack: contextlib.ExitStack, *, fresh: bool, listener: Listener | None
) -> int:
    """Opens the engines, runs the training loop, and exports the trained models. Returns the exit status: 0 if the run
    is done, 130 if it was asked to exit. Collective."""
    spec, world, driver = parts.spec, parts.world, parts.driver
    leave = lambda: parts.interrupts.requested or driver.leave.asked()  # noqa: E731
    driver.say(f"opening the engines ({spec.engine.settings.kind}) of {', '.join(spec.engine.opened)}")
    commands = Commands(world)
    driver.watchdog.longest = commands.longest
    run_engines = open_engines(
        spec.engine, parts.tokenizers, world, commands, stack, servers=Supervised(driver, leave),
        sources=parts.policies, ranks=parts.ranks,
    )  # fmt: skip
    if driver.tracker is not None:
        driver.tracker.watch(run_engines.loads)
    turns = GradeTurns(builders.grade_with(spec.data.sources, spec.reward, pools))
    context = builders.context(
        spec.roles, spec.reward, spec.loop.rollouts, run_engines.engines, parts.tokenizers, turns.at(0), driver.watch,
        seed=spec.run.seed,
    )  # fmt: skip
    trainees = {name: builders.trainee(spec.roles[name], spec.run, policy) for name, policy in parts.policies.items()}
    memory = DeviceMemory(trainees, colocated=run_engines.colocated is not None)
    fleet, timeline = _fleet(parts, commands, memory, run_engines), _timeline(parts, commands)
    checkpoints = _checkpoints(parts, fleet)
    sets = evaluations.held_out_sets(
        spec.data.held_out, parts.held_out, spec.reward, stack, greedy=spec.loop.evaluation.greedy
    )

    def drive() -> tuple[bool, bool]:
        store = open_store(parts, fresh=fresh)
        collector = open_collector(parts, context, store, timeline, turns=turns, idle=run_engines.tend)
        stack.callback(collector.close)
        examiner = Examiner(
            recipe=spec.recipe, sets=sets, context=context, rollouts=collector, served=run_engines.served
        )
        loop_parts = _loop_parts(parts, fleet, checkpoints, examiner, listener, timeline)
        plan = _plan(parts)
        start(loop_parts, context, plan, parts.progress)
        finished = loop.train(loop_parts, plan, parts.progress)
        stopped = listener is not None and listener.stopped and not listener.gone
        if finished or stopped:
            fleet.engines.clear()  # the weights are exported then
        return finished, stopped

    owners = {name: policy.memory.held_bytes for name, policy in parts.policies.items()}
    for name, engine in run_engines.engines.items():
        owners |= {f"{name}'s engine": engine.local.held_bytes} if isinstance(engine, DataParallelEngine) else {}
    with memory_explained(driver.directory.path, world.rank, owners):
        return _drive(parts, lambda: commands.drive(drive), listener)


def _timeline(parts: RunParts, commands: Commands) -> Timeline:
    """Returns the record of when the roles work. Roles with a policy or an embedded engine work on ranks."""
    roles, engine = parts.spec.roles, parts.spec.engine
    embedded = engine.opened if isinstance(engine.settings, Embedded) else ()
    ranks = {name: parts.ranks[name] for name, role in roles.items() if role.has_policy or name in embedded}
    timeline = Timeline(parts.driver.directory.timeline, ranks, {name: role.owner for name, role in roles.items()})
    commands.completed = timeline.ran
    return timeline


def _checkpoints(parts: RunParts, fleet: RankFleet) -> RunCheckpoints:
    """Returns the run's checkpoints. Every rank calls it."""
    spec, driver = parts.spec, parts.driver
    files = {
        name: PolicyFiles(
            name, parts.policies[name].state, parts.world_of(name), driver.checkpoints, fleet.memory.weights
        )
        for name in spec.trained_policies
        if name in parts.policies
    }
    return RunCheckpoints(
        fleet, files, spec.trained_policies, driver, spec.loop.evaluation.best, lambda place: _export(parts, place),
        background=spec.run.async_save,
    )  # fmt: skip


def _predicted_schedule(spec: RunSpec) -> dict[str, Any]:
    """Returns what the plan predicts for the run, as JSON values, or {"not_predicted": reason} if it predicts nothing.

    "cluster": name of the cluster. "predicted": a list with the throughput for each value of rollouts.max_staleness.
    "timeline": when each role works, see planning.schedule.predicted.
    """
    if not torch.cuda.is_available():
        return {"not_predicted": "the run has no GPU, and predictions are made for GPUs"}
    gpu = torch.cuda.get_device_properties(0)
    try:
        schedule, hardware = (leaf(f"planning.{name}", "the prediction") for name in ("schedule", "hardware"))
        device = hardware.device_name(gpu.name, gpu.total_memory / (1 << 30))
        cluster, found, timeline = schedule.predicted(spec, device)
    except (ConfigError, ArithmeticError, LookupError, ValueError) as error:
        return {"not_predicted": str(error)}
    return {"cluster": cluster, "predicted": [dataclasses.asdict(one) for one in found], "timeline": timeline}


def _drive(parts: RunParts, drive: Callable[[], tuple[bool, bool]], listener: Listener | None) -> int:
    """Runs the training loop and exports the trained models. Returns the exit status, see `_train`. Collective.

    `drive`: runs the training loop, and returns whether all iterations are done and whether a parent program stopped
    the run."""
    driver, progress, iterations = parts.driver, parts.progress, parts.spec.loop.num_iterations
    seconds = driver.directory.read_summary().get("seconds")  # wall-clock seconds of all earlier starts of the run
    wall = seconds.get("wall") if isinstance(seconds, dict) else None
    started = time.monotonic() - (wall if isinstance(wall, float) else 0.0)
    driver.leave.begin()
    if listener is not None:
        listener.tell("begin", iterations=iterations, iteration=progress.number)
    with frozen_garbage_collector():
        finished, stopped = drive()
        driver.summary(_summary(progress, time.monotonic() - started))
        for sentence in never_learned(progress, parts.spec.policy_of):
            driver.say(f"WARNING: {sentence}")
        early = stopped_early(parts.spec.loop.evaluation.early_stop, progress.early_stop)
        if early or "stopped_early" in driver.directory.read_summary():
            driver.summary({"stopped_early": progress.number if early else None})
        if not finished:
            driver.say(f"saved after iteration {progress.number} of {iterations}; the same command goes on from there")
        if finished or stopped:
            _finish(parts, finished=finished)
    return 0 if finished or stopped else 130


def _finish(parts: RunParts, *, finished: bool) -> None:
    """Exports the trained models at the end of a run, and prints the paths of the outputs. Collective.

    `finished`: True if all iterations are done, False if the parent program stopped the run early."""
    driver, progress, run = parts.driver, parts.progress, parts.driver.directory.path
    _export(parts, run)
    if driver.tracker is not None:
        for name in parts.spec.trained_policies:
            driver.tracker.keep_model(name, run / "models" / name)
    driver.summary({"finished": finished})
    if progress.last_evaluation:
        driver.say(before_after(progress.first_evaluation, progress.last_evaluation))
    if progress.best and (settings := parts.spec.loop.evaluation.best) is not None:
        number, value = progress.best[0]
        place = run / f"best/iteration_{number:06d}/models" if number else "the model that the run was given"
        driver.say(f"best after iteration {number}: {settings.metric} {value:.4g}: {place}")
    driver.done(str(run))
    if parts.world.rank == 0:
        driver.say(_report(run))


def _export(parts: RunParts, place: Path) -> None:
    """Exports the trained models to the directory `place`/models, and LoRA adapters to `place`/adapters. Collective."""
    for name in parts.spec.trained_policies:
        if (policy := parts.policies.get(name)) is None:  # other ranks hold the policy
            continue
        with policy.memory.present():
            export_model(parts.world_of(name), policy.export, parts.spec.roles[name].model, place / "models" / name)
        policy.export.write_adapter(place / "adapters" / name)
    parts.world.barrier()


def _report(run: Path) -> str:
    """Writes the HTML report of a run. Returns a message with the report's path. If the report cannot be written,
    returns a message with the error."""
    try:
        return f"report: {leaf('report.pages', 'the report').write_report(run)}"
    except (ConfigError, OSError, DiskError) as error:
        return f"no report was written ({error}); megatron-rl report {run}"


@contextlib.contextmanager
def frozen_garbage_collector() -> Iterator[None]:
    """Context manager that excludes existing objects, such as libraries and models, from garbage collection.

    Otherwise the garbage collector would scan these objects at least once per iteration, which blocks all threads for
    half a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _plan(parts: RunParts) -> Plan:
    spec, settings = parts.spec, parts.spec.loop
    reader, evaluation = parts.readers[next(iter(spec.recipe.roles()))], settings.evaluation
    preflight = builders.preflight_plan(
        settings.preflight, spec.preflight_set, spec.reward, spec.data.sources, reader, parts.held_out
    )
    return Plan(
        iterations=settings.num_iterations, evaluate_every=evaluation.every, evaluate_at_start=evaluation.at_start,
        evaluate_beside=spec.evaluates_beside, best=evaluation.best, early_stop=evaluation.early_stop,
        mixed=settings.rollouts.mixed, train_without_signal=spec.run.train_without_signal,
        save_every=spec.run.save_every, preflight=preflight, ahead=settings.rollouts.ahead,
        refits_wait=isinstance(spec.engine.settings, Embedded),
    )  # fmt: skip


def _fleet(parts: RunParts, commands: Commands, memory: DeviceMemory, run_engines: RunEngines) -> RankFleet:
    """Returns the fleet of the run's policies, with the settings of the run's stages. Every rank calls it."""
    spec, rank, directory = parts.spec, parts.world.rank, parts.driver.directory.path
    begin = in_stages(spec.stages, spec.roles, spec.reference_resets, parts.policies, memory, parts.driver.say)

    def around(number: int) -> contextlib.AbstractContextManager[None]:
        begin(number)
        return profiled(spec.run.profile, directory, iteration=number, rank=rank)

    return RankFleet(
        commands,
        memory,
        run_engines.refits,
        world_of=parts.world_of,
        ranks=parts.ranks,
        engines=run_engines.colocated,
        rescore=spec.loop.rollouts.mixed == "rescore",
        around=around,
        occupied_s=run_engines.occupied_s,
        resets=lambda number: bool(due_resets(spec.reference_resets, number)),
        profiled=spec.run.profile.iterations,
    )


def _loop_parts(
    parts: RunParts, fleet: RankFleet, checkpoints: RunCheckpoints, examiner: Examiner, listener: Listener | None,
    timeline: Timeline,
) -> loop.Parts:  # fmt: skip
    """Returns the components of the training loop. Used on the driver (rank 0)."""
    spec, driver, progress = parts.spec, parts.driver, parts.progress
    owner_of = {name: role.owner for name, role in spec.roles.items()}
    desk = CreditDesk(
        recipe=spec.recipe,
        policy_of=spec.policy_of,
        owner_of=owner_of,
        mixed=spec.loop.rollouts.mixed,
        loss_of=functools.cache(lambda policy, number: loss_of(spec.at(number).roles[policy])),
        train_without_signal=spec.run.train_without_signal,
    )
    observe = run_observer(driver, parts.tokenizers, spec.data.held_out, timeline, seed=spec.run.seed)

    def leave() -> bool:
        # after the last iteration, a stop request of the parent program has no effect
        unfinished = progress.number < spec.loop.num_iterations
        parent_stops = listener is not None and unfinished and (listener.stopped or listener.gone)
        return parts.interrupts.requested or driver.leave() or parent_stops

    return loop.Parts(
        fleet=fleet, rollouts=examiner.rollouts, desk=desk, examiner=examiner if examiner.sets else None,
        checkpoints=checkpoints, observe=observe if listener is None else listening(observe, listener), leave=leave,
        watch=driver.watch,
    )  # fmt: skip


def _summary(progress: Progress, seconds: float) -> dict[str, Any]:
    """Returns the run's summary. `seconds`: wall-clock seconds of the run.

    The summary contains the metrics of the first and last evaluation as NAME_start and NAME_end, the update count of
    each policy, and `seconds`."""
    metrics: dict[str, Any] = {
        "finished": False,
        "updates": dict(progress.updates),
        "iterations": progress.number,
        "seconds": {"wall": seconds},
    }
    for suffix, evaluation in (("start", progress.first_evaluation), ("end", progress.last_evaluation)):
        for name, value in evaluation.items():
            metrics[f"{name.replace('/', '_')}_{suffix}"] = value
    return metrics
