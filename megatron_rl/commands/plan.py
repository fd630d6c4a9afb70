"""`megatron-rl plan`: estimates memory, time and bottleneck of a command on a cluster, and finds faster layouts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from megatron_rl.commands.settings import load
from megatron_rl.config.base import refuse
from megatron_rl.config.schema import JobConfig, TrainConfig
from megatron_rl.models.shape import Shape
from megatron_rl.planning import other_commands, tables, totals, workload
from megatron_rl.planning import search as searching
from megatron_rl.planning.alternatives import alternatives
from megatron_rl.planning.case import Case, own_cluster, trainer_gpus
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.other_commands import Rows
from megatron_rl.planning.plan import RunPlan, make
from megatron_rl.planning.schedule import best_staleness, schedules, simulated
from megatron_rl.planning.simulation import Schedule
from megatron_rl.planning.totals import Totals
from megatron_rl.spec.explain import float32_notes
from megatron_rl.spec.rank_sets import words
from megatron_rl.spec.resolve import engine_of, resolve, specify
from megatron_rl.spec.run_spec import ClusterSpec, EvalSpec, SftSpec, Spec


def run(args: argparse.Namespace) -> int:
    """Prints the estimated memory, time and bottleneck of a run, and the totals. Returns 0 if the run fits in memory,
    otherwise 1.

    With `--search`, returns 0 if any proposed layout fits in memory. Raises ConfigError for an invalid config.
    """
    config = load(args.settings)[1]
    if not isinstance(config, TrainConfig):
        return _other(args)
    engine = engine_of(config)
    cluster_spec = ClusterSpec(ranks=1, launch=config.launch, job=config.job)
    cluster = parse_cluster(args.cluster or own_cluster(engine, cluster_spec))
    models = workload.models_of(config.roles, args.shape)
    spec = resolve(config, trainer_gpus(engine, cluster), to_come=True)
    fills, names = workload.fills_of(spec.roles, args.fill), [held_out.name for held_out in spec.data.held_out]
    rows = _rows(args, spec, models, names)
    draws, prompts = workload.draws_of(spec.roles, args.draws), spec.run.prompts_per_iteration
    episodes = workload.episodes_of(spec.recipe, spec.roles, args.episode)
    work = workload.cycle_work(spec.recipe, spec.roles, prompts, fills=fills, episodes=episodes, draws=draws)
    case = Case(spec=spec, cluster=cluster, models=models, work=work)
    if any(role.ranks == "auto" for role in config.roles.values()):
        case = searching.with_ranks(case, searching.best_ranks(case)[0])
    plan = make(case)
    found_schedules, auto = schedules(case, plan), config.rollouts.max_staleness == "auto"
    case = case.with_staleness(best_staleness(found_schedules)) if auto else case
    plan = simulated(case, make(case) if auto else plan)
    [schedule] = [one for one in found_schedules if one.max_staleness == case.spec.loop.rollouts.ahead]
    run_totals = totals.of_training(case, plan, rows, fills)
    proposals = searching.search(case) if args.search else []
    advice, others = searching.advice(case, plan), alternatives(case)
    if args.json:
        more = {
            "schedules": [asdict(schedule) for schedule in found_schedules],
            "sets": _sets(case, schedule),
            "max_staleness": case.spec.loop.rollouts.ahead,
            "advice": advice,
            "engines": [asdict(alternative) for alternative in others],
            "search": [proposal.plan.to_json() | {"overrides": [*proposal.overrides]} for proposal in proposals],
        }
        print(_json(plan, run_totals, more))
    else:
        console = _console()
        tables.show(plan, advice, console, notes=rows.notes)
        tables.show_schedules(found_schedules, case.spec.loop.rollouts.ahead, console, auto=auto)
        tables.show_sets(schedule, _roles_of_sets(case), console)
        tables.show_alternatives(others, console)
        if args.search:
            tables.show_search(proposals, plan, console)
        console.print(str(run_totals))
    return int(not proposals if args.search else bool(plan.problems))


def _rows(args: argparse.Namespace, spec: Spec, models: Mapping[str, Shape], names: Sequence[str]) -> Rows:
    """Returns the numbers of problems that the user gave. `names`: names of the problem sets."""
    notes = workload.guess_notes(models) + float32_notes(spec)
    return Rows(user_counts=workload.rows_given(names, args.rows), notes=notes)


def _roles_of_sets(case: Case) -> dict[str, list[str]]:
    """Returns {ranks such as 8-15: roles that the trainer holds on these ranks}."""
    roles = dict[str, list[str]]()
    for name, ranks in case.role_ranks.items():
        roles.setdefault(words(ranks), []).extend([name] * (name in case.held))
    return roles


def _sets(case: Case, schedule: Schedule) -> list[dict[str, Any]]:
    return [{**asdict(own), "roles": _roles_of_sets(case)[own.ranks]} for own in schedule.sets]


def _other(args: argparse.Namespace) -> int:
    """Plans `sft`, `generate` or `eval`. Returns 0 if the planned command fits in memory, otherwise 1."""
    command, config = load(args.settings)
    flags = {"--search": args.search, "--draws": args.draws, "--episode": args.episode}
    refuse(*(f"{option} is for runs of `train`; this is a config of `{command}`" for option in flags if flags[option]))
    spec = specify(config, 1)[0]
    run, job = other_commands.as_run(spec), getattr(config, "job", JobConfig())
    cluster_spec = ClusterSpec(ranks=1, launch=config.launch, job=job)
    cluster = parse_cluster(args.cluster or own_cluster(run.engine, cluster_spec))
    ranks = trainer_gpus(run.engine, cluster)  # refuses engines that do not fit
    spec = resolve(config, ranks if isinstance(spec, SftSpec) else 1, to_come=True)
    models, fills = workload.models_of(run.roles, args.shape), workload.fills_of(run.roles, args.fill)
    names = [evaluated.name for evaluated in spec.evaluated] if isinstance(spec, EvalSpec) else ["data"]
    rows = _rows(args, spec, models, names)
    case = Case(spec=run, cluster=cluster, models=models, work=other_commands.work_of(spec, run.roles, rows, fills))
    plan = make(case)
    run_totals = totals.of_command(spec, case, plan, rows)
    if args.json:
        print(_json(plan, run_totals, {"notes": rows.notes}))
    else:
        tables.show_parts(plan, _console(), notes=rows.notes)
        _console().print(str(run_totals))
    return int(bool(plan.problems))


def _json(plan: RunPlan, run_totals: Totals, more: Mapping[str, Any]) -> str:
    return json.dumps({**plan.to_json(), "totals": asdict(run_totals), **more}, indent=1)


def _console() -> Console:
    return Console(soft_wrap=False, highlight=False, width=None if Console().is_terminal else 130)
