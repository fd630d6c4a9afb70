"""`megatron-rl plan`: estimates memory, time and bottleneck of a command on a cluster, and finds faster layouts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from megatron_rl.commands.settings import load
from megatron_rl.config.base import refuse
from megatron_rl.config.schema import JobConfig, TrainConfig
from megatron_rl.planning import other_commands, tables, totals, workload
from megatron_rl.planning import search as searching
from megatron_rl.planning.alternatives import alternatives
from megatron_rl.planning.case import Case, own_cluster, trainer_gpus
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.other_commands import Rows
from megatron_rl.planning.plan import RunPlan, make
from megatron_rl.planning.schedule import best_staleness, schedules, simulated
from megatron_rl.planning.totals import Totals
from megatron_rl.spec.explain import float32_notes
from megatron_rl.spec.resolve import engine_of, resolve, specify
from megatron_rl.spec.run_spec import ClusterSpec, EvalSpec, SftSpec


def run(args: argparse.Namespace) -> int:
    """Prints the estimated memory, time and bottleneck of a run, and the totals. Returns 0 if the run fits in memory,
    otherwise 1.

    With `--search`, returns 0 if any proposed layout fits in memory. Raises ConfigError for an invalid config.
    """
    config = load(args.settings)[1]
    if not isinstance(config, TrainConfig):
        return _other(args)
    engine = engine_of(config)
    asked = ClusterSpec(ranks=1, launch=config.launch, job=config.job)
    cluster = parse_cluster(args.cluster or own_cluster(engine, asked))
    models = workload.models_of(config.roles, args.shape)
    spec = resolve(config, trainer_gpus(engine, cluster), to_come=True)
    fills, names = workload.fills_of(spec.roles, args.fill), [own.name for own in spec.data.held_out]
    notes = workload.guess_notes(models) + float32_notes(spec)
    rows = Rows(given=workload.rows_given(names, args.rows), notes=notes)
    episodes, draws = workload.episodes_of(spec, args.episode), workload.draws_of(spec.roles, args.draws)
    work = workload.cycle_work(spec, fills=fills, episodes=episodes, draws=draws)
    case = Case(spec=spec, cluster=cluster, models=models, work=work)
    made = make(case)
    found_schedules, auto = schedules(case, made), config.rollouts.max_staleness == "auto"
    if auto:
        case = case.with_staleness(best_staleness(found_schedules))
        made = make(case)
    made = simulated(case, made)
    whole = totals.of_training(case, made, rows, fills)
    found = searching.search(case) if args.search else []
    said = searching.advice(case, made)
    others = alternatives(case)
    if args.json:
        more = {
            "schedules": [asdict(one) for one in found_schedules],
            "max_staleness": case.spec.loop.rollouts.ahead,
            "advice": said,
            "engines": [asdict(one) for one in others],
            "search": [one.plan.to_json() | {"overrides": [*one.overrides]} for one in found],
        }
        print(_json(made, whole, more))
    else:
        console = _console()
        tables.show(made, said, console, notes=rows.notes)
        tables.show_schedules(found_schedules, case.spec.loop.rollouts.ahead, console, auto=auto)
        tables.show_alternatives(others, console)
        if args.search:
            tables.show_search(found, made, console)
        console.print(str(whole))
    return int(not found) if args.search else int(bool(made.problems))


def _other(args: argparse.Namespace) -> int:
    """Plans `sft`, `generate` or `eval`. Returns 0 if the planned command fits in memory, otherwise 1."""
    command, config = load(args.settings)
    given = {"--search": args.search, "--draws": args.draws, "--episode": args.episode}
    refuse(*(f"{option} is for runs of `train`; this is a config of `{command}`" for option in given if given[option]))
    spec = specify(config, 1)[0]
    run, job = other_commands.as_run(spec), getattr(config, "job", JobConfig())
    asked = ClusterSpec(ranks=1, launch=config.launch, job=job)
    cluster = parse_cluster(args.cluster or own_cluster(run.engine, asked))
    ranks = trainer_gpus(run.engine, cluster)  # refuses engines that do not fit
    spec = resolve(config, ranks if isinstance(spec, SftSpec) else 1, to_come=True)
    models, fills = workload.models_of(run.roles, args.shape), workload.fills_of(run.roles, args.fill)
    names = [own.name for own in spec.evaluated] if isinstance(spec, EvalSpec) else ["data"]
    notes = workload.guess_notes(models) + float32_notes(spec)
    rows = Rows(given=workload.rows_given(names, args.rows), notes=notes)
    case = Case(spec=run, cluster=cluster, models=models, work=other_commands.work_of(spec, run, rows, fills))
    made = make(case)
    whole = totals.of_command(spec, case, made, rows)
    if args.json:
        print(_json(made, whole, {"notes": rows.notes}))
    else:
        tables.show_parts(made, _console(), notes=rows.notes)
        _console().print(str(whole))
    return int(bool(made.problems))


def _json(made: RunPlan, whole: Totals, more: Mapping[str, Any]) -> str:
    return json.dumps({**made.to_json(), "totals": asdict(whole), **more}, indent=1)


def _console() -> Console:
    return Console(soft_wrap=False, highlight=False, width=None if Console().is_terminal else 130)
