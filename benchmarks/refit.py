"""Times a refit of about 1 GB between four processes, each a trainer and an engine rank: planned, and by gathering.

    gather      every parameter is all-gathered over the ranks of its stage and broadcast from there, so that every
                rank has the whole model and takes its part. Most frameworks do this
    bucketed    the same, with many parameters in one collective of up to 64 MiB
    direct      each engine rank receives its own slices from ranks that hold them (this project): over TCP (used
                between hosts without fast links) and shared memory
    delta       direct over TCP, sending only what changed in a step of 1e-6 in float32
    full        the same step, sending everything
    p2p         messages of the plan's sizes between the plan's pairs, as raw_messages buffers over gloo
    memcpy      a copy in one process while the others copy too

`--staged` instead refits two real vLLM servers on this machine's CPU that generate meanwhile (staged.py). The trainer
reads its weights at --link-gb-per-s then, as if it sent them over such a link: within one machine a transfer takes less
time than vLLM takes on a CPU to repack the weights in the pause (on a GPU, it copies them).

`wire_gb` is what all ranks together receive from other ranks; `bound_gb` is what the engine ranks need and do not hold
themselves. Seconds are those of the fastest of --rounds rounds, each as long as its slowest rank. The direct ways and
p2p take turns and have four times as many rounds. `--gigabytes 0.05` gives a quick look at a narrower model.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.cluster.host_address import free_port
from megatron_rl.config.schema import RefitConfig
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.transport import ParameterPart, Tensors
from megatron_rl.refit.transport_choice import RankLocation, RankLocations
from megatron_rl.weights import rank_layouts
from megatron_rl.weights.parameter_mapping import Rect, Shard, by_tensor, hf_shapes, megatron
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout
from megatron_rl.weights.refit_plan import RefitPlan

RANKS = 4
BUCKET = 64 << 20  # bytes that memcpy copies
BARS = {
    name: bar
    for model in ("dense", "moe")
    for name, bar in {
        f"{model}/bound_over_direct_bytes": 1 / 1.02,
        f"{model}/gather_over_direct_tcp": 4.0,
        f"{model}/direct_tcp_of_p2p": 0.6,
    }.items()
}
TRANSPORTS = ("tcp", "shared_memory")
Shards = dict[str, tuple[Tensor, list[Rect]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model in bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--staged", action="store_true", help="real vLLM servers that generate meanwhile")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="interpreter of vLLM's environment")
    parser.add_argument("--link-gb-per-s", type=float, default=0.1, help="rate of the link that --staged pretends")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    common.add_arguments(parser)
    args = parser.parse_args()
    if args.rank is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=args.rank, world_size=RANKS)
        metrics = {f"{name}/{metric}": value for name in CASES for metric, value in measure(name, args).items()}
        if args.rank == 0:
            args.json.write_text(json.dumps(metrics))
        return
    if args.staged:
        import staged

        with tempfile.TemporaryDirectory() as folder:
            metrics = staged.measure(
                Path(folder), args.python, rounds=args.rounds, bytes_per_s=args.link_gb_per_s * 1e9
            )
        return common.finish(metrics, staged.BARS, args, limits=staged.LIMITS)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port("127.0.0.1")
        common_args = [
            sys.executable,
            __file__,
            "--gigabytes",
            str(args.gigabytes),
            "--rounds",
            str(args.rounds),
            "--port",
            str(port),
        ]
        common_args += ["--bucket-mib", str(args.bucket_mib)]
        ranks = [
            subprocess.Popen([*common_args, "--rank", str(r), "--json", f"{folder}/metrics"], env=os.environ)
            for r in range(RANKS)
        ]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")
        metrics = json.loads((Path(folder) / "metrics").read_text())
    common.finish(metrics, BARS, args)


def narrowing(gigabytes: float, smallest: float) -> int:
    """Returns by what the widths of a model are divided that has two layers and would be of `smallest` GB."""
    return next((part for part in (1, 2, 4, 8) if smallest / part <= gigabytes), 16)


def dense(gigabytes: float) -> Topology:
    """Returns TP2 x PP2 into an engine of four tensor ranks."""
    layers, part = max(2, round(gigabytes * 1e9 / 2 / 62e6) // 2 * 2), narrowing(gigabytes, 0.4)
    width = {"hidden": 2048 // part, "head_dim": 128 // part, "ffn": 8192 // part}
    width |= {"heads": 16, "kv_heads": 8, "vocab": 16000}
    sizes = Sizes(family="qwen2", num_layers=layers, tied=False, **width)
    return Topology(sizes=sizes, trainer=TrainerLayout(tp=2, pp=2), engines=EngineLayout(tp=RANKS), dtype="bfloat16")


def moe(gigabytes: float) -> Topology:
    """Returns TP2 x PP2 with experts over two ranks, into an engine of four ranks that cut every expert."""
    layers, part = max(2, round(gigabytes * 1e9 / 2 / 54e6) // 2 * 2), narrowing(gigabytes, 0.3)
    width = {"hidden": 1024 // part, "head_dim": 64 // part, "ffn": 1024 // part, "expert_ffn": 512 // part}
    width |= {"heads": 16, "kv_heads": 4, "vocab": 16000, "experts": 32}
    sizes = Sizes(family="qwen3_moe", num_layers=layers, tied=False, **width)
    return Topology(
        sizes=sizes, trainer=TrainerLayout(tp=2, pp=2, ep=2), engines=EngineLayout(tp=RANKS), dtype="bfloat16"
    )


CASES: dict[str, Callable[[float], Topology]] = {"dense": dense, "moe": moe}


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Returns the metrics of one case, which are those of the slowest rank. Collective."""
    topology, rank = CASES[name](args.gigabytes), dist.get_rank()
    held, engine = shards(topology, rank), Engine(topology, rank)
    model = 2 * sum(rows * columns for rows, columns in hf_shapes(topology.sizes).values())
    metrics = {"model_gb": model / 1e9, "memcpy_gb_per_s": memcpy(), "gather_wire_gb": (RANKS - 1) * model / 1e9}
    for way, limit in (("gather", 0), ("bucketed", args.bucket_mib << 20)):
        metrics[f"{way}_s"] = best(lambda limit=limit: gather(topology, held, engine, limit), args.rounds)
    reference = {n: t.clone() for n, t in engine.tensors.items()}
    plan, messages = raw_messages(topology, args)
    runs, sides = {"p2p_s": messages}, []
    for transport in TRANSPORTS:
        for tensor in engine.tensors.values():
            tensor.zero_()
        settings = RefitConfig(transport=transport, bucket_mib=args.bucket_mib, verify="off")
        side = TrainerSide(
            topology, settings, {n: t for n, (t, _) in held.items()}, group=dist.group.WORLD, endpoint=engine
        )
        metrics["wire_gb"] = side(0)["refit/gigabytes"]
        if any(not torch.equal(t, engine.tensors[n]) for n, t in reference.items()):
            raise SystemExit(f"{name}: direct over {transport} gave other weights than gathering")
        runs[f"direct_{transport}_s"] = lambda side=side: side(1)
        sides.append(side)
    metrics |= {name: min(seconds) for name, seconds in measure_alternately(runs, 4 * args.rounds).items()}
    for side in sides:
        side.close()
    metrics |= {"bound_gb": plan.lower_bound * 2 / 1e9, "p2p_gb_per_s": plan.sent * 2 / 1e9 / metrics["p2p_s"]}
    metrics["bound_over_direct_bytes"] = metrics["bound_gb"] / metrics["wire_gb"]
    metrics["bucketed_over_direct"] = metrics["bucketed_s"] / metrics["direct_shared_memory_s"]
    for way in TRANSPORTS:
        metrics[f"gather_over_direct_{way}"] = metrics["gather_s"] / metrics[f"direct_{way}_s"]
        metrics[f"direct_{way}_of_p2p"] = metrics["p2p_s"] / metrics[f"direct_{way}_s"]
    return metrics | changes(topology, held, engine, args)


def is_sharded(sizes: Sizes, name: str) -> bool:
    """Returns whether tensor-parallel ranks hold different parts of a Megatron parameter."""
    return megatron(sizes, name, Shard(2, 0)) != megatron(sizes, name, Shard(2, 1))


def shards(topology: Topology, rank: int) -> Shards:
    """Returns a trainer rank's parameters, random, with their rectangles."""
    generator, tensors = torch.Generator().manual_seed(rank), {}
    for name, (shape, rects) in shapes_of(topology, rank).items():
        # All ranks of a stage hold the same values of a parameter that is not sharded.
        seeded = generator if is_sharded(topology.sizes, name) else torch.Generator().manual_seed(len(name))
        tensors[name] = torch.randn(shape, generator=seeded).mul_(0.02).bfloat16(), rects
    return tensors


class Engine:
    """An engine rank's parameters. Implements refit.engine_side.Endpoint."""

    def __init__(self, topology: Topology, rank: int) -> None:
        parameters = rank_layouts.engine_parameters(topology.sizes, topology.engines, rank)
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, (shape, _) in parameters.items()}
        self.targets = Tensors(self.tensors)
        self._wanted = by_tensor(parameters)

    def begin_refit(self) -> None: ...

    def commit_refit(self, version: int) -> None: ...

    def take(self, part: Tensor, rects: list[Rect]) -> None:
        """Copies what overlaps with this rank's parameters."""
        for rect in rects:
            for name, place in self._wanted[rect.tensor]:
                top, start = max(rect.row, place.row), max(rect.column, place.column)
                rows = min(rect.row + rect.rows, place.row + place.rows) - top
                columns = min(rect.column + rect.columns, place.column + place.columns) - start
                if rows > 0 and columns > 0:
                    source = ParameterPart(
                        rect.at_row + top - rect.row, rect.at_column + start - rect.column, rows, columns
                    )
                    target = ParameterPart(
                        place.at_row + top - place.row, place.at_column + start - place.column, rows, columns
                    )
                    self.targets.write(name, target, Tensors({"": part}).read("", source))


def gather(topology: Topology, held: Shards, engine: Engine, limit: int) -> None:
    """Brings the whole model to every rank, stage by stage.

    A collective joins parameters of up to `limit` bytes (0: one each).
    """
    rank, stage_of, groups = dist.get_rank(), dist.get_rank() // 2, process_groups()
    for stage in range(2):
        members = [stage * 2, stage * 2 + 1]
        on_stage = stage_of == stage
        shapes = [shapes_of(topology, m) for m in members]
        for chunk in chunks([*zip(*(s.items() for s in shapes), strict=True)], limit):
            size = sum(shape.numel() for (_, (shape, _)), _ in chunk)
            joined = torch.empty(2, size, dtype=torch.bfloat16)
            if on_stage:
                flat = torch.cat([held[pair[rank % 2][0]][0].view(-1) for pair in chunk])
                dist.all_gather([joined[0], joined[1]], flat, group=groups[f"stage{stage}"])
            dist.broadcast(joined, src=members[rank % 2], group=groups[f"pair{rank % 2}"])
            place = 0
            for pair in chunk:
                count = pair[0][1][0].numel()
                for half, (_, (shape, rects)) in enumerate(pair):
                    engine.take(joined[half, place : place + count].view(shape), rects)
                place += count


@functools.cache
def process_groups() -> dict[str, Any]:
    """Returns the groups of the two stages and of the two pairs of ranks at the same position in them."""
    ranks = {"stage0": [0, 1], "stage1": [2, 3], "pair0": [0, 2], "pair1": [1, 3]}
    return {name: dist.new_group(members, backend="gloo") for name, members in ranks.items()}


@functools.cache
def shapes_of(topology: Topology, rank: int) -> dict[str, tuple[torch.Size, list[Rect]]]:
    """Returns {parameter: (shape, rectangles)} of a trainer rank."""
    parts: dict[str, list[Rect]] = {}
    for holding in rank_layouts.trainer(topology.sizes, topology.trainer):
        if rank in holding.ranks:
            for name, rect in holding.parameters:
                parts.setdefault(name, []).append(rect)
    return {
        name: (torch.Size([max(r.at_row + r.rows for r in rects), max(r.at_column + r.columns for r in rects)]), rects)
        for name, rects in parts.items()
    }


def chunks(pairs: list[Any], limit: int) -> Iterator[list[Any]]:
    """Yields the parameters in runs of up to `limit` bytes."""
    waiting, size = [], 0
    for pair in pairs:
        size_of_pair = pair[0][1][0].numel() * 2
        if waiting and size + size_of_pair > limit:
            yield waiting
            waiting, size = [], 0
        waiting.append(pair)
        size += size_of_pair
    yield waiting


def raw_messages(topology: Topology, args: argparse.Namespace) -> tuple[RefitPlan, Callable[[], None]]:
    """Returns the plan, and a function that sends messages of its sizes between its pairs as raw buffers, over gloo."""
    locations: list[Any] = [None] * RANKS
    dist.all_gather_object(locations, RankLocation.new(torch.device("cpu")))
    plan = topology.plan(RankLocations(locations, dict(enumerate(locations))), args.bucket_mib)
    rank, rounds = dist.get_rank(), 1 + max(b.round_number for b in plan.buckets)
    sending, into = ([torch.zeros(args.bucket_mib << 20, dtype=torch.uint8) for _ in range(2)] for _ in range(2))
    sends = {b.round_number: b for b in plan.buckets if b.source == rank}
    receives = {b.round_number: b for b in plan.buckets if b.destination == rank}

    def run() -> None:
        pending: list[Any] = []
        for number in range(rounds):
            now, half = [], number % 2
            if bucket := sends.get(number):
                now.append(dist.isend(sending[half][: bucket.elements * 2], bucket.destination, tag=number))
            if bucket := receives.get(number):
                now.append(dist.irecv(into[half][: bucket.elements * 2], bucket.source, tag=number))
            for work in pending:
                work.wait()
            pending = now
        for work in pending:
            work.wait()

    return plan, run


def changes(topology: Topology, held: Shards, engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Times refits after a step of 1e-6 in float32: as deltas over TCP, and sending all weights."""
    parameters = {n: t for n, (t, _) in held.items()}
    masters = {n: t.float() + (torch.rand(t.shape) - 0.5) * t.float().abs() * 2**-8 for n, t in parameters.items()}
    metrics: dict[str, float] = {}
    for delta in (False, True):
        settings = RefitConfig(transport="tcp", bucket_mib=args.bucket_mib, verify="off", delta=delta)
        side = TrainerSide(topology, settings, parameters, group=dist.group.WORLD, endpoint=engine)
        side(0)
        for name, master in masters.items():
            master += 1e-6 * torch.randn(master.shape).sign()
            parameters[name].copy_(master)
        dist.barrier()
        start = time.perf_counter()
        figures = side(1)
        metrics[f"{'delta' if delta else 'full'}_s"] = slowest(time.perf_counter() - start)
        if delta:
            metrics["delta_share_of_bytes"] = figures["refit/share_of_full"]
        side.close()
    return metrics | {"full_over_delta": metrics["full_s"] / metrics["delta_s"]}


def memcpy() -> float:
    """Returns GB/s of this process's copies, while the others copy too."""
    source, target = torch.ones(BUCKET, dtype=torch.uint8), torch.ones(BUCKET, dtype=torch.uint8)
    seconds = best(lambda: target.copy_(source), 5)
    return BUCKET / seconds / 1e9


def best(run: Callable[[], Any], rounds: int) -> float:
    """Returns the seconds of the fastest round, each as long as its slowest rank, after one round to warm up."""
    return min(measure_alternately({"": run}, rounds)[""])


def measure_alternately(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every round of several runs. They alternate, so that all meet the machine's other work."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            seconds[name].append(slowest(time.perf_counter() - start))
    return {name: times[1:] for name, times in seconds.items()}


def slowest(seconds: float) -> float:
    """Returns the largest value of all ranks."""
    metric = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(metric, op=dist.ReduceOp.MAX)
    return float(metric)


if __name__ == "__main__":
    main()
