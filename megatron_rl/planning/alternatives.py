"""Plans the same run with other engines, so that the choice of one is seen beside what the others would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.schema import Embedded, Servers
from megatron_rl.planning.case import Case, server_gpus
from megatron_rl.planning.plan import make_or_none
from megatron_rl.planning.search import engine_choices, engine_words, nodes_words

SERVED = 3  # choices of servers that are shown, fastest first
STALENESS = "rollouts.max_staleness"
AHEAD = "iterations generated beside training (rollouts.max_staleness=1)"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The run with one engine: where it stands, what it costs, and the settings that make it of the config asked
    about."""

    engine: str  # in words
    trainer_gpus: int
    engine_gpus: int  # GPUs of servers; 0 of the embedded engine
    cycle_s: float  # seconds of a cycle
    problem: str  # why it does not fit; empty where it does
    overrides: Sequence[str]  # empty of the config as it is


def alternatives(asked: Case) -> list[Alternative]:
    """Returns the run as it is, then the embedded engine, the fastest servers, on GPUs of their own and in the
    trainer's, and the fastest of those on their own while it generates the next iteration beside training.

    Layouts are those of the config. An engine beside which the trainer does not fit is planned with full
    recomputation. Engines that leave GPUs the layouts cannot be cut for are left out, and those that `check` refuses.
    """
    first = _alternative(asked, asked, [])
    if first is None:
        return []
    found, settings, staleness = [first], asked.spec.engine.settings, asked.spec.loop.rollouts.max_staleness
    if isinstance(settings, Servers):
        words = ["engine={kind: embedded}", *([f"{STALENESS}=0"] if staleness else [])]  # which it cannot have
        embedded = _alternative(asked.with_engine(Embedded()).with_staleness(0), asked, words)
        found += [] if embedded is None else [embedded]
    choices = [(case, engine_words(case.servers, settings)) for case in engine_choices(asked) if case.servers]
    others = [
        (case, words)
        for case, words in choices
        if not isinstance(settings, Servers) or case.servers and _anywhere(case.servers) != _anywhere(settings)
    ]
    found += _fastest([_alternative(case, asked, words) for case, words in others], SERVED)
    if not staleness:
        own = [(asked, list[str]())] if isinstance(settings, Servers) else []
        ahead = [
            _alternative(case.with_staleness(1), asked, [*words, f"{STALENESS}=1"])
            for case, words in [*own, *choices]
            if not case.colocated
        ]
        found += _fastest(ahead, 1)
    return found


def _fastest(found: Sequence[Alternative | None], count: int) -> list[Alternative]:
    """Returns the fastest runs that fit."""
    fitting = [one for one in found if one is not None and not one.problem]
    return sorted(fitting, key=lambda one: one.cycle_s)[:count]


def _alternative(case: Case, asked: Case, overrides: Sequence[str]) -> Alternative | None:
    """Returns the plan of a run in short; None where its layouts cannot be cut so, and where `check` refuses it though
    not the run asked about."""
    made = make_or_none(case)
    if made is None:
        return None
    if made.problems and case is not asked:
        names = [name for name in case.held if case.roles[name].model.recompute != "full"]
        smaller = case
        for name in names:
            smaller = smaller.with_role(name, model=replace(case.roles[name].model, recompute="full"))
        other = make_or_none(smaller)
        if other is not None and not other.problems:
            made, case = other, smaller
            overrides = [*overrides, *(f"roles.{name}.model.recompute=full" for name in names)]
    if case is not asked:
        if not case.passes() and asked.passes():
            return None
        overrides = [*overrides, *nodes_words(asked, case)]
    return Alternative(
        engine=_words(case), trainer_gpus=made.ranks, engine_gpus=server_gpus(case.spec.engine), cycle_s=made.cycle_s,
        problem=next(iter(made.problems), ""), overrides=overrides,
    )  # fmt: skip


def _anywhere(engine: Servers) -> Servers:
    """Returns the servers without where they stand and who starts them."""
    return replace(engine, gpus=(), urls={}, start=True)


def _words(case: Case) -> str:
    """Returns the engine in words: `4 vllm servers of 2 GPUs for each role`."""
    engine = case.servers
    if engine is None:
        return "embedded, in the trainer's GPUs"
    many, gpus = "s" * (engine.replicas > 1), f"{engine.tp} GPU{'s' * (engine.tp > 1)}"
    whom = " for each role" if len(case.spec.engine.server_roles) > 1 else ""
    where = ", in the trainer's GPUs" * engine.colocate
    said = f"{engine.replicas} {engine.kind} server{many} of {gpus}{whom}{where}"
    return f"{said}; {AHEAD}" if case.spec.loop.rollouts.max_staleness else said
