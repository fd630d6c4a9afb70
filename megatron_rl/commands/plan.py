"""`megatron-rl plan`: estimates memory, time and bottleneck of a run on a given cluster, and finds faster layouts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from megatron_rl.commands.settings import METAVAR, load
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.planning import search as searching
from megatron_rl.planning import tables
from megatron_rl.planning.alternatives import alternatives
from megatron_rl.planning.case import Case, own_cluster, trainer_gpus
from megatron_rl.planning.hardware import DEVICES, parse_cluster
from megatron_rl.planning.plan import make
from megatron_rl.planning.workload import (
    FILL,
    cycle_work,
    draws_of,
    episodes_of,
    fills_of,
    guess_notes,
    models_of,
)
from megatron_rl.spec.resolve import engine_of, resolve
from megatron_rl.spec.run_spec import ClusterSpec

DESCRIPTION = f"""Estimates the memory of each GPU by part and the seconds of each phase, and says what to change.
Nothing is started; no GPU is needed.
  megatron-rl plan examples/published/tango_qwen2.5_7b.yaml --cluster 4x8xA100-80
  megatron-rl plan my.yaml --cluster 16x8xH100 --search engine.kind=vllm
Devices: {", ".join(DEVICES)}. Exit status 1: it does not fit. docs/plan.md says how far the figures can be trusted."""


def add_parser(commands: Any) -> None:
    """Adds the argument parser of `megatron-rl plan` to `commands`, the subparsers of the command line."""
    parser = commands.add_parser(
        "plan",
        help="memory, time and bottleneck of a run on a named cluster, before any job",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="+", metavar=METAVAR, help="settings of a `train` run")
    parser.add_argument(
        "--cluster", help="NODESxGPUSxDEVICE (default: job.nodes and the engines' nodes, of 8 A100-80 each)"
    )
    parser.add_argument("--search", action="store_true", help="propose the fastest layouts and engines that fit")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="ROLE=SOURCE",
        help="sizes of a role's model: a config.json, or a public model's name",
    )
    parser.add_argument(
        "--fill",
        action="append",
        default=[],
        metavar="SHARE | ROLE=SHARE",
        help=f"mean lengths as a share of the longest allowed (default: {FILL})",
    )
    parser.add_argument(
        "--draws",
        action="append",
        default=[],
        metavar="ITERATION.ROLE=NUMBER",
        help="samples of a role for each prompt of an iteration, in the mean, over what the recipe says: "
        "generator.verifier=1.5 where not every solution is verified",
    )
    parser.add_argument(
        "--episode",
        action="append",
        default=[],
        metavar="ROLE.NAME=VALUE",
        help="episodes of a role that answers several times, over what the recipe says: answers, told (tokens between "
        "two answers), tool_s (seconds of tools between them), calls_at_once",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")


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
    models = models_of(config.roles, args.shape)
    spec = resolve(config, trainer_gpus(engine, cluster), to_come=True)
    work = cycle_work(
        spec,
        fills=fills_of(spec.roles, args.fill),
        episodes=episodes_of(spec, args.episode),
        draws=draws_of(spec.roles, args.draws),
    )
    case = Case(spec=spec, cluster=cluster, models=models, work=work)
    made = make(case)
    found = searching.search(case) if args.search else []
    said = searching.advice(case, made)
    others = alternatives(case)
    if args.json:
        told = made.to_json() | {
            "advice": said,
            "engines": [asdict(one) for one in others],
            "search": [one.plan.to_json() | {"overrides": [*one.overrides]} for one in found],
        }
        print(json.dumps(told, indent=1))
    else:
        console = Console(soft_wrap=False, width=None if Console().is_terminal else 130)
        tables.show(made, said, console, notes=guess_notes(models))
        tables.show_alternatives(others, console)
        if args.search:
            tables.show_search(found, made, console)
    return int(not found) if args.search else int(bool(made.problems))
