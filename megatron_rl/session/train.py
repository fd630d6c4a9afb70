"""`megatron-rl train`: builds the parts of a reinforcement-learning run and hands them to the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import checks as config_checks
from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config.schema import Launch, Sinks, TrainConfig, Use
from megatron_rl.data.problems import PromptReader
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.rewards.pool import Graded, GradePool
from megatron_rl.run.checkpoint import STATE, read_json
from megatron_rl.run.directory import Interrupts
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.session import parts
from megatron_rl.session.common import Driver, Saver, export_model, open_driver, open_world
from megatron_rl.session.fleet import Fleet, open_fleet
from megatron_rl.session.launch import Place, run_directory
from megatron_rl.text import decode_all, load_tokenizer
from megatron_rl.training import loop
from megatron_rl.training.gate import GatePlan
from megatron_rl.training.player import Ahead, Shelf, schedule
from megatron_rl.training.rollouts import ROWS
from megatron_rl.training.turns import Grade, Played, Players, Recipe, Turn
from megatron_rl.types import Prompt
from megatron_rl.world import TorchWorld


def run(config: TrainConfig, place: Place) -> int:
    """Every rank runs it. Returns 0 when all steps are done, 130 when a signal asked to leave (everything is saved)."""
    recipe: Recipe = plugins.build(config.recipe)
    plugins.build(
        Use(target=config.reward.target, args=config.reward.args)
    )  # the workers build their own: here for its error
    config_checks.check_recipe(config, recipe)
    with open_world(place, run_directory(config), deterministic=config.run.deterministic) as world:
        return _run(config, place, world, recipe)


def _run(config: TrainConfig, place: Place, world: TorchWorld, recipe: Recipe) -> int:
    steps = recipe.num_steps() if config.run.steps is None else config.run.steps
    turns = sum(len(recipe.turns(s)) for s in range(steps))
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(announce=place.rank == 0))
        driver = stack.enter_context(open_driver(config, world, place, total_turns=turns))
        if driver.finished:
            return 0
        driver.summary({"planned": turns, "finished": False})  # one that was finished goes on, with more steps
        pool = stack.enter_context(GradePool(config.reward))
        for line in config_checks.explain_recipe(config, recipe, place.world_size):
            driver.say(line)
        tokenizers = {
            name: load_tokenizer(role.model.tokenizer or role.model.path) for name, role in config.roles.items()
        }
        readers, held_out = parts.prompts(config, recipe, tokenizers)
        policies = parts.policies(config, recipe)
        progress = _restore(driver, recipe, readers, policies)
        fleet = open_fleet(
            config, world, tokenizers, policies, driver, stack, lambda: interrupts.requested or driver.leave.asked()
        )
        players = parts.players(config, fleet.engines, tokenizers, _one_at_a_time(pool.grade), driver)
        replay = Path(config.debug.replay) if config.debug.replay else None
        game = _Game(recipe, readers, players, config.run.prompts_per_step, replay)
        ahead = _ahead(config, game, fleet, driver, loop_steps=steps, progress=progress) if world.rank == 0 else None
        if ahead is not None:
            stack.callback(ahead.close)
        setup = loop.Setup(
            world=world,
            roles={name: parts.role(config, name, policy, fleet.refits.get(name)) for name, policy in policies.items()},
            recipe=recipe,
            players=players,
            data=readers,
            held_out=held_out,
            hooks=_hooks(config, world, driver, _Saved(recipe, policies, progress, ahead), tokenizers, interrupts),
            ahead=ahead,
        )
        started, before = time.monotonic(), driver.directory.read_summary().get("seconds", {}).get("wall", 0.0)
        driver.leave.begin()
        stack.enter_context(_what_is_there_stays())
        finished = loop.train(setup, _plan(config, steps, held_out, readers[recipe.prompt_role]), progress)
        driver.summary(_summary(progress, before + time.monotonic() - started))
        if not finished:
            driver.say(f"saved after turn {progress.number} of {turns}; the same command goes on from there")
        else:
            for name in recipe.trained:
                export_model(
                    world, policies[name].weights(), config.roles[name].model, driver.directory.path / "models" / name
                )
            driver.summary({"finished": True})
            driver.say(f"done: {driver.directory.path} (megatron-rl report {driver.directory.path})")
    return 0 if finished else 130


@contextlib.contextmanager
def _what_is_there_stays() -> Iterator[None]:
    """Python's garbage collector looks at libraries and models no more: it did at least once a turn, for half a second, while all threads
    waited."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds beside the files of the policies."""

    recipe: Recipe
    policies: Mapping[str, MegatronPolicy]
    progress: loop.Progress
    ahead: Ahead | None  # on the driver: only it reads data and plays

    def state(self) -> dict[str, Any]:
        """Of rank 0; empty on the others, whose state nobody writes."""
        if self.ahead is None:
            return {}
        return {"progress": self.progress.state_dict(), **self.ahead.state()}


@dataclasses.dataclass(frozen=True)
class _Game:
    """Implements ahead.Game: the recipe on the run's data."""

    recipe: Recipe
    readers: Mapping[str, PromptReader]  # by role; roles may share one
    players: Players
    prompts: int
    replay: Path | None = None  # directory: recorded turns instead
    own_watch: Stopwatch | None = None  # beside training: what was measured goes with the turn

    def play(self, turn: Turn) -> Played:
        prompts = self.readers[turn.role].take(self.prompts)
        if self.replay is not None:
            return loop.read_turn(self.replay, turn)
        if self.own_watch is None:
            return self.recipe.play(turn, prompts, self.players)
        played = self.recipe.play(turn, prompts, dataclasses.replace(self.players, watch=self.own_watch))
        return dataclasses.replace(played, metrics={**played.metrics, **self.own_watch.take()})

    def state(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.state_dict(),
            "data": {name: reader.state_dict() for name, reader in self.readers.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recipe.load_state_dict(state["recipe"])
        for name, reader in self.readers.items():
            reader.load_state_dict(state["data"][name])


def _ahead(
    config: TrainConfig, game: _Game, fleet: Fleet, driver: Driver, *, loop_steps: int, progress: loop.Progress
) -> Ahead:
    """On the driver. Turns played under other settings are not taken from the shelf: all that is not of the machine counts, and
    the form of the rows."""
    settings = dataclasses.replace(
        config, launch=Launch(), sinks=Sinks(), run=dataclasses.replace(config.run, steps=None, keep=2)
    )
    fingerprint = hashlib.sha256(f"{ROWS}\n{config_files.dump(settings)}".encode()).hexdigest()[:16]
    shelf = Shelf(driver.directory.path / "ahead", fingerprint)
    turns = schedule(game.recipe.turns, loop_steps, progress.state_dict())
    if config.rollouts.max_staleness > 0:
        game = dataclasses.replace(game, own_watch=Stopwatch(driver.watch.beat))
    return Ahead(game, turns, max_staleness=config.rollouts.max_staleness, shelf=shelf, idle=fleet.tend)


def _one_at_a_time(grade: Grade) -> Grade:
    """Rollouts ahead of training and an evaluation may want it at once."""
    lock = threading.Lock()

    def locked(responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        with lock:
            return grade(responses, payloads)

    return locked


def _plan(config: TrainConfig, steps: int, held_out: list[Prompt], reader: PromptReader) -> loop.Plan:
    debug, evaluation = config.debug, config.evaluation
    probes = held_out or reader.restarted().take(config.gate.num_prompts)
    return loop.Plan(
        steps=steps,
        prompts_per_step=config.run.prompts_per_step,
        evaluate_every=evaluation.every,
        evaluate_at_start=evaluation.at_start,
        save_every=config.run.save_every,
        gate=_gate(config, probes) if config.gate.enabled else None,
        record=Path(debug.save_rollouts) if debug.save_rollouts else None,
        replay=Path(debug.replay) if debug.replay else None,
        mixed=config.rollouts.mixed,
    )


def _gate(config: TrainConfig, prompts: list[Prompt]) -> GatePlan:
    reward = config.reward
    return GatePlan(
        settings=config.gate, prompts=prompts, wrong_answer=reward.wrong_answer, answer_format=reward.answer_format
    )


def _restore(
    driver: Driver, recipe: Recipe, readers: Mapping[str, PromptReader], policies: Mapping[str, MegatronPolicy]
) -> loop.Progress:
    if driver.resumed is None:
        return loop.Progress()
    state = read_json(driver.resumed / STATE)
    for name in recipe.trained:
        policies[name].load(driver.resumed / name)
    recipe.load_state_dict(state["recipe"])
    for name, reader in readers.items():
        reader.load_state_dict(state["data"][name])
    return loop.Progress(**state["progress"])


def _hooks(
    config: TrainConfig, world: TorchWorld, driver: Driver, saved: _Saved, tokenizers: Mapping[str, Any], interrupts: Interrupts
) -> loop.Hooks:  # fmt: skip
    trained = {name: saved.policies[name] for name in saved.recipe.trained}
    every, saver = config.run.save_rollouts_every, Saver(world, driver, trained, background=config.run.async_save)

    def keep(turn: Turn, trajectories: Any) -> None:
        if every and turn.number % every == 0:
            decode = functools.partial(decode_all, tokenizers[turn.role])
            driver.directory.write_rollouts(turn.number, turn.role, trajectories, decode)

    return loop.Hooks(
        log=driver.log,
        save=lambda number: saver.save(number, saved.state()),
        settle=lambda wait: saver.settle(wait=wait),
        keep_rollouts=keep,
        should_stop=lambda: interrupts.requested or (world.rank == 0 and driver.leave()),
    )


def _summary(progress: loop.Progress, seconds: float) -> dict[str, Any]:
    """Figures of the first and last evaluation as NAME_start and NAME_end, updates by role, wall-clock seconds."""
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
