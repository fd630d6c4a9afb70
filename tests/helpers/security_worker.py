"""One rank of test_security_ranks.py: meets the others as a run does, and says what it saw."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from limits import RUN_S

from megatron_rl.messages.commands import Commands
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.run_setup import open_world


def main(output_path: str, shared: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end = time.monotonic() + RUN_S
    while rank and not Path(shared, "strangers_were_there").exists():  # the others come late
        assert time.monotonic() < end
        time.sleep(0.02)
    place = Place(rank, size, rank, "127.0.0.1", int(os.environ["MASTER_PORT"]))
    with open_world(place, Path(shared)) as world:
        commands = Commands(world)
        commands.serve("double", lambda value: [world.rank, 2 * value])
        answers = commands.drive(lambda: commands.each("double", [*range(size)]))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])
        report = {"answers": answers, "sum": total.item(), "recorded": len(recorded)}
        Path(output_path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
