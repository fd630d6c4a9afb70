"""Builds the collector of a training run and the store of its rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.config import sources
from megatron_rl.config.engines import Embedded
from megatron_rl.data.problems import Draw
from megatron_rl.run.input_digests import Input
from megatron_rl.session import builders
from megatron_rl.session.run_parts import RunParts
from megatron_rl.session.run_timeline import Timeline
from megatron_rl.texts.text import decode
from megatron_rl.training.collector import Collector, IterationMaker, ReplayMaker, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.iteration_engines import GradeTurns, OpenSessions
from megatron_rl.training.store import ROLLOUTS, IterationStore, fingerprint, open_replay

# Settings in the config's section `run` that do not affect rollouts. Stored rollouts are reused even if they changed.
FREE_RUN_SETTINGS = (
    "iterations", "keep", "save_every", "async_save", "save_rollouts_every", "resume", "hang_after_s", "profile",
)  # fmt: skip


def open_collector(
    parts: RunParts, context: RolloutContext, store: IterationStore, timeline: Timeline, *, turns: GradeTurns,
    idle: Callable[[], None],
) -> Collector:  # fmt: skip
    """Creates the collector, which generates the rollouts of each training iteration. Used on the driver (rank 0).

    `turns`: the grader of `context`, which one thread uses at a time; the waiting thread with the earliest iteration is
    next. `idle`: function that the collector calls while it waits."""
    spec, driver = parts.spec, parts.driver
    recipe, ahead = spec.recipe, spec.loop.rollouts.ahead
    kinds = {roles for cycle in spec.loop.schedule for roles in cycle}
    scored = any(recipe.scores_of(roles) for roles in kinds)
    credit = CreditStage(recipe, lag=ahead, after_scores=scored, recipe_at=lambda number: spec.at(number).recipe)
    if parts.recipe_states:
        credit.restore(parts.recipe_states, parts.progress.number)
    maker: IterationMaker
    if spec.data.replay is not None:
        recorded = open_replay(spec.data.replay, own=driver.directory.path)
        maker = ReplayMaker(readers=parts.readers, recorded=recorded)
    else:
        sessions, makers = OpenSessions(), dict[int, RolloutMaker]()
        for own in (spec, *(stage.spec for stage in spec.stages)):
            longest = own.roles[next(iter(recipe.roles()))].max_prompt_tokens
            of_stage = builders.context(
                own.roles, own.reward, own.loop.rollouts, context.engines, parts.tokenizers, context.grade,
                context.watch, seed=own.run.seed,
            )  # fmt: skip
            makers[id(own)] = RolloutMaker(
                recipe=own.recipe, readers=parts.readers, prompts_per_iteration=own.run.prompts_per_iteration,
                context=of_stage,
                draw=Draw(weights=own.data.weights or None, max_prompt_tokens=longest), max_staleness=ahead,
                sessions=sessions, turns=turns, ahead=store.ahead,
                generated=None if isinstance(spec.engine.settings, Embedded) else timeline.generated,
            )  # fmt: skip
        maker = dataclasses.replace(makers[id(spec)], at=lambda number: makers[id(spec.at(number))])
    iterations = upcoming(spec.loop.schedule, parts.progress.state_dict())
    return Collector(maker, credit, iterations, store, max_staleness=ahead, watch=driver.watch, idle=idle)


def open_store(parts: RunParts, *, fresh: bool) -> IterationStore:
    """Opens the store of rollouts, grouped by training iteration, and prints how many iterations are reused. Used on
    the driver (rank 0).

    Rollouts are not reused if they were stored in another file format, or generated with different settings, code,
    prompts or data. Settings that only describe the machine may differ. If `fresh` is True, no rollouts are reused.
    """
    driver = parts.driver
    store = IterationStore(
        driver.directory.path / ROLLOUTS, run_fingerprint(parts.spec.settings, driver.record.inputs),
        keep_every=parts.spec.run.save_rollouts_every,
        decode=lambda role, tokens: decode(parts.tokenizers[role], tokens),
    )  # fmt: skip
    left = store.clean(parts.progress.number, fresh=fresh)
    if left.kept:
        driver.say(
            f"{left.kept} iterations come from the store, where the run collected them before it stopped; --fresh "
            "collects them again"
        )
    if left.begun:
        driver.say(f"{left.begun} iterations continue with the samples that were finished when the run stopped")
    if left.dropped:
        driver.say(
            f"{left.dropped} iterations that the run collected before it stopped are collected again: "
            + ("--fresh asks for it" if fresh else "its settings, code, prompts or data have changed since")
        )
    return store


def run_fingerprint(settings: Mapping[str, Any], inputs: Mapping[str, Input]) -> str:
    """Returns a fingerprint (digest) of everything that may affect rollouts.

    The fingerprint covers the settings (except settings about the machine or about saving), the `inputs` that the run
    reads, and the code of this package.
    """
    plain = {name: section for name, section in settings.items() if name not in ("launch", "sinks", "job")}
    plain["run"] = {name: value for name, value in settings["run"].items() if name not in FREE_RUN_SETTINGS}
    plain["roles"] = {name: {**role, "mean_tokens": None, "ranks": None} for name, role in settings["roles"].items()}
    return fingerprint(f"{plain}\n{sorted(map(repr, inputs.items()))}\n{sources.own_code()}")
