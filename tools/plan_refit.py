#!/usr/bin/env python3
"""Shows what a refit would move, before a job is queued: bytes per link, the least that any plan sends, and the time.

    python tools/plan_refit.py --model qwen2.5-7b --trainer tp4,pp2,dp4 --engine tp2x8
    python tools/plan_refit.py --model path/to/config.json --trainer tp4,pp2,dp8,ep16 --engine tp8+ep --together

A trainer layout is tp, pp, dp, ep and etp, each with its number. An engine layout is tpN, with xM for M replicas and
+ep for whole experts per rank. Times are bytes over link speeds and nothing else: a floor, not a forecast. The links
are those of an A100 (NVLink, 300 GB/s a GPU and direction) and the network as given.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.commands.arguments import Families
from megatron_rl.commands.parser import add_arguments
from megatron_rl.config.schema import ConfigError
from megatron_rl.models import registry
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights import rank_layouts, refit_plan
from megatron_rl.weights.parameter_mapping import hf_shapes
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout
from megatron_rl.weights.refit_plan import RankPlacement, RefitPlan

NVLINK = 300e9  # bytes a second, per GPU and direction


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, help=f"a config.json, a model directory, or one of {', '.join(registry.known())}"
    )
    parser.add_argument("--trainer", required=True, help="e.g. tp4,pp2,dp4 or tp4,pp2,dp8,ep16")
    parser.add_argument("--engine", required=True, help="e.g. tp2x8 or tp8+ep")
    parser.add_argument(
        "--together",
        action="store_true",
        help="engine rank r runs on the GPU of trainer rank r (default: engines have nodes of their own)",
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of a node (default: %(default)s)")
    parser.add_argument(
        "--network",
        type=float,
        default=8 * 200,
        help="network of a node in gigabits a second, all adapters together (default: %(default)s)",
    )
    parser.add_argument("--bytes", type=int, default=2, help="bytes of an element (default: %(default)s, bfloat16)")
    parser.add_argument("--bucket", type=int, default=128, help="size of a message in MiB (default: %(default)s)")
    add_arguments(parser, Families)
    parser.add_argument("--json", type=Path, help="a file to write the figures to, besides showing them")
    args = parser.parse_args()
    for name in ("gpus_per_node", "network", "bytes", "bucket"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give more than 0")
    try:
        registry.add(args.family, "--family")
        figures = report(args)
    except ConfigError as error:
        print(f"plan_refit: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the plan, shows its figures as a table, and returns them."""
    sizes, trainer, engine = read_model(args.model), read_trainer(args.trainer), read_engine(args.engine)
    per_node = args.gpus_per_node
    if args.together and engine.world > trainer.world:
        raise ConfigError(f"--together: {engine.world} engine ranks do not fit on {trainer.world} trainer GPUs")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no directory {args.json.parent}")
    first = 0 if args.together else -(-trainer.world // per_node) * per_node
    sending, receiving = placement(trainer.world, 0, per_node), placement(engine.world, first, per_node)
    start = time.perf_counter()
    plan = refit_plan.plan(
        rank_layouts.trainer(sizes, trainer), rank_layouts.engines(sizes, engine), trainer=sending, engine=receiving,
        bucket_elements=args.bucket * 2**20 // args.bytes,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    figures = measure(plan, sizes, sending, receiving, args) | {"plan_s": seconds}
    show(figures, args, f"{args.trainer} ({trainer.world} GPUs) -> {args.engine} ({engine.world} GPUs)")
    return figures


def measure(
    plan: RefitPlan, sizes: Sizes, sending: RankPlacement, receiving: RankPlacement, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the bytes that the plan moves over each kind of link, and the least seconds that this takes."""
    links: Counter[str] = Counter({"same device": args.bytes * sum(plan.held.values())})
    sent, into, node_out, node_in = Counter(), Counter(), Counter(), Counter()
    for bucket in plan.buckets:
        size, nodes = bucket.elements * args.bytes, (sending.nodes[bucket.source], receiving.nodes[bucket.destination])
        sent[bucket.source] += size
        into[bucket.destination] += size
        if nodes[0] == nodes[1]:
            links["within a node"] += size
        else:
            links["between nodes"] += size
            node_out[nodes[0]] += size
            node_in[nodes[1]] += size
    engines = len(receiving.nodes)
    model = args.bytes * sum(rows * columns for rows, columns in hf_shapes(sizes).values())
    network = args.network / 8 * 1e9
    direct = max(most(node_out, node_in) / network, most(sent, into) / NVLINK)
    gathered = max(model * min(args.gpus_per_node, engines) / network, model / NVLINK)
    return {
        "model_gb": model / 1e9,
        "needed_gb_per_engine_rank": args.bytes * max(plan.needed.values()) / 1e9,
        **{f"{link.replace(' ', '_')}_gb": size / 1e9 for link, size in links.items()},
        "sent_gb": args.bytes * plan.sent / 1e9,
        "bound_gb": args.bytes * plan.lower_bound / 1e9,
        "most_sent_by_a_rank_gb": max(sent.values(), default=0) / 1e9,
        "most_received_by_a_rank_gb": max(into.values(), default=0) / 1e9,
        "messages": len(plan.buckets),
        "rounds": 1 + max((b.round_number for b in plan.buckets), default=-1),
        "floor_s": direct,
        "gather_everything_gb": model * engines / 1e9,
        "gather_everything_floor_s": gathered,
    }


def show(figures: dict[str, Any], args: argparse.Namespace, title: str) -> None:
    """Prints the figures as a table."""
    table = Table(title=f"{args.model}: {title}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    table.caption = (
        f"{args.gpus_per_node} GPUs a node, {args.network:g} Gb/s a node, NVLink {NVLINK / 1e9:.0f} GB/s a GPU, "
        f"{args.bytes} bytes an element"
    )
    Console(width=max(100, Console().width)).print(table)


def most(*counts: Counter[int]) -> int:
    """Returns the largest number of all counters."""
    return max((size for count in counts for size in count.values()), default=0)


def placement(world: int, first: int, per_node: int) -> RankPlacement:
    """Returns where `world` ranks run: one per GPU, from GPU `first` on."""
    devices = list(range(first, first + world))
    return RankPlacement([d // per_node for d in devices], devices)


def read_model(name: str) -> Sizes:
    """Returns the sizes of a model by its name, its directory or its config.json. Raises ConfigError."""
    if name in registry.known():
        return registry.known_sizes(name)
    path = Path(name)
    if not path.exists():
        public = ", ".join(registry.known())
        raise ConfigError(f"--model {name}: no such file; give a config.json, a model directory or one of {public}")
    file = path / "config.json" if path.is_dir() else path
    try:
        return registry.read(json.loads(file.read_text(encoding="utf-8")), str(file))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--model {name}: {file} cannot be read as JSON ({error})") from error


def read_trainer(text: str) -> TrainerLayout:
    """Returns the trainer's layout from a text like tp4,pp2,dp4. Raises ConfigError."""
    axes = ("tp", "pp", "dp", "ep", "etp")
    parts = {
        m[1]: int(m[2]) for m in (re.fullmatch(r"([a-z]+)([1-9]\d*)", part.strip()) for part in text.split(",")) if m
    }
    if len(parts) != len(text.split(",")) or any(name not in axes for name in parts):
        raise ConfigError(f"--trainer {text}: give parts like tp4, of {', '.join(axes)}, with commas between")
    return TrainerLayout(**parts)


def read_engine(text: str) -> EngineLayout:
    """Returns the engines' layout from a text like tp2x8+ep. Raises ConfigError."""
    match = re.fullmatch(r"tp([1-9]\d*)(?:x([1-9]\d*))?(\+ep)?", text)
    if match is None:
        raise ConfigError(f"--engine {text}: it has the form tp2, tp2x8 or tp8+ep")
    return EngineLayout(tp=int(match[1]), replicas=int(match[2] or 1), expert_parallel=bool(match[3]))


if __name__ == "__main__":
    sys.exit(main())
