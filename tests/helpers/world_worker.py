"""One rank of test_world.py: what its collective calls gave, of the world of all ranks and of the world of a set."""

import json
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from megatron_rl.messages.world import DriverError, World


def outcome(function, *args):
    """Returns what a function gave here: its value, or the name and text of its error."""
    try:
        return ["value", function(*args)]
    except (DriverError, ValueError, TypeError) as error:
        return [type(error).__name__, str(error)]


def broken(text):
    raise ValueError(text)


def seen_in(world):
    """Returns what a rank sees in a world."""
    return {
        "place": [world.rank, world.size],
        "value": outcome(world.from_leader, lambda a, b: [world.rank, a + b], 1, 2),
        "error": outcome(world.from_leader, broken, "the reward broke"),
        "does not travel": outcome(world.from_leader, threading.Lock),
        "nested": outcome(world.from_leader, lambda: world.from_leader(lambda: "inner")),
        "broadcast": world.broadcast(world.rank + 7),
        "of the last": world.broadcast([world.rank], source=world.size - 1),
        "everywhere": [world.everywhere(True), world.everywhere(world.rank != world.size - 1)],
    }


def main(output_path):
    dist.init_process_group("gloo")
    world = World()
    seen = {"all": seen_in(world), "set": None}
    group = dist.new_group(range(1, world.size), backend="gloo")
    if world.rank > 0:
        seen["set"] = seen_in(World(group))
    world.barrier()
    Path(output_path).write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
