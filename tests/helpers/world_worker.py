"""One rank of test_world.py: runs the named case and writes what this rank saw."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from megatron_rl.messages.world import DriverError, FollowerError, World


class Asked:
    """A handler that counts what it was asked and fails for a negative number."""

    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def __call__(self, value):
        self.seen.append(value)
        if value == "cannot travel":
            return threading.Lock()
        if value < 0:
            raise ValueError(f"negative: {value}")
        return [self.rank, value * 10]


def told(world, function, *args):
    """Returns what from_driver gave here: its value, or the name and text of the error."""
    try:
        return ["value", world.from_driver(function, *args)]
    except (DriverError, FollowerError, ValueError, TypeError, RuntimeError) as error:
        return [type(error).__name__, str(error)]


def broken(text):
    raise ValueError(text)


def cases(world, calls):
    ranks = list(range(world.size))
    yield told(world, lambda a, b: [world.rank, a + b], 1, 2)
    yield told(world, broken, "the reward broke")
    yield told(world, lambda: [world.call_all("ask", [r + k for r in ranks]) for k in (1, 5)])
    yield told(world, lambda: world.call_all("ask", [-1 if r == world.size - 1 else r for r in ranks]))
    yield told(world, lambda: world.call_all("ask", [-1 for _ in ranks]))
    yield told(world, lambda: world.call_all("ask", ["cannot travel" for _ in ranks]))
    yield told(world, lambda: world.call_all("nobody", ranks))
    yield told(world, lambda: world.call_all("ask", [1]))
    yield told(world, threading.Lock)
    yield told(world, lambda: "still alive")
    yield world.broadcast(world.rank + 7)
    yield calls.seen
    yield told(world, lambda: world.from_driver(lambda: world.call_all("ask", ranks)))
    yield told(world, at_once, world)
    yield told(world, lambda: world.call_all("wrong", ranks))
    yield told(world, lambda: world.call_all("nested", ranks))
    yield told(world, lambda: world.together("nested", ranks, ranks))
    yield told(world, lambda: world.together("echo", threading.Lock, "small") is threading.Lock)
    yield world.work.from_driver(lambda: world.call_all("ask", [5] * world.size))
    yield told(world, lambda: world.work.from_driver(lambda: "never"))
    yield told(world, lambda: world.together("fails", "on rank 0", "elsewhere"))


def at_once(world):
    """Puts the ranks to work from several threads."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda k: world.call_all("ask", [k] * world.size), range(20)))


def serve_collectives(world):
    """Handlers whose ranks talk to one another."""
    world.serve("wrong", lambda _: world.from_driver(lambda: "never"))
    ask = lambda: world.call_all("ask", [7] * world.size)  # noqa: E731
    world.serve("nested", lambda _: [world.work.from_driver(ask), world.work.broadcast(world.rank + 1)])
    world.serve("echo", lambda value: value)
    world.serve("fails", lambda text: world.work.from_driver(broken, text))


def main(output_path):
    dist.init_process_group("gloo")
    world = World()
    calls = Asked(world.rank)
    world.serve("ask", calls)
    serve_collectives(world)
    seen = list(cases(world, calls))
    world.barrier()
    Path(output_path).write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
