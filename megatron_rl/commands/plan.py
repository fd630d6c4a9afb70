"""`megatron-rl plan`: estimates memory, time and bottleneck of a run on a given cluster, and finds faster layouts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console

from megatron_rl.commands.settings import load
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.planning import search as searching
from megatron_rl.planning import tables, workload
from megatron_rl.planning.alternatives import alternatives
from megatron_rl.planning.case import Case, own_cluster, trainer_gpus
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.plan import make
from megatron_rl.planning.schedule import best_staleness, schedules
from megatron_rl.spec.resolve import engine_of, resolve
from megatron_rl.spec.run_spec import ClusterSpec


def run(args: argparse.Namespace) -> int:
    """Prints the estimated memory, time and bottleneck of a run. Returns 0 if the run fits in memory, otherwise 1.

    With `--search`, returns 0 if any proposed layout fits in memory. Raises ConfigError for an invalid config.
    """
    command, config = load(args.settings)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"this is a config of `{command}`: only runs of `train` are planned")
    engine = engine_of(config)
    asked = ClusterSpec(ranks=1, launch=config.launch, job=config.job)
    cluster = parse_cluster(args.cluster or own_cluster(engine, asked))
    models = workload.models_of(config.roles, args.shape)
    spec = resolve(config, trainer_gpus(engine, cluster), to_come=True)
    work = workload.cycle_work(
        spec,
        fills=workload.fills_of(spec.roles, args.fill),
        episodes=workload.episodes_of(spec, args.episode),
        draws=workload.draws_of(spec.roles, args.draws),
    )
    case = Case(spec=spec, cluster=cluster, models=models, work=work)
    made = make(case)
    found_schedules, auto = schedules(case, made), config.rollouts.max_staleness == "auto"
    if auto:
        case = case.with_staleness(best_staleness(found_schedules))
        made = make(case)
    found = searching.search(case) if args.search else []
    said = searching.advice(case, made)
    others = alternatives(case)
    if args.json:
        told = made.to_json() | {
            "schedules": [asdict(one) for one in found_schedules],
            "max_staleness": case.spec.loop.rollouts.ahead,
            "advice": said,
            "engines": [asdict(one) for one in others],
            "search": [one.plan.to_json() | {"overrides": [*one.overrides]} for one in found],
        }
        print(json.dumps(told, indent=1))
    else:
        console = Console(soft_wrap=False, width=None if Console().is_terminal else 130)
        tables.show(made, said, console, notes=workload.guess_notes(models))
        tables.show_schedules(found_schedules, case.spec.loop.rollouts.ahead, console, auto=auto)
        tables.show_alternatives(others, console)
        if args.search:
            tables.show_search(found, made, console)
    return int(not found) if args.search else int(bool(made.problems))
