"""One rank of test_commands.py: runs the case that is named and writes what this rank saw."""

import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from limits import RUN_S

from megatron_rl.messages.commands import Commands, FollowerError
from megatron_rl.messages.world import DriverError, World

SETS = ([0, 1], [2, 3], [1, 2], [3], [0, 1, 2, 3], [1, 2, 3])
ERRORS = (DriverError, FollowerError, ValueError, TypeError, RuntimeError)


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


def outcome(function, *args):
    """Returns what a function gave here: its value, or the name and text of its error."""
    try:
        return ["value", function(*args)]
    except ERRORS as error:
        return [type(error).__name__, str(error)]


def broken(text):
    raise ValueError(text)


def wait_for(condition):
    end = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def at_once(commands):
    """Puts the ranks to work from several threads."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda k: commands.each("ask", [k] * commands.size), range(20)))


def rules(commands, world, folder):
    """Values, errors and wrong calls, of which none ends the run."""
    ranks, last = [*range(commands.size)], commands.size - 1
    calls = Asked(commands.rank)
    commands.serve("ask", calls)
    commands.serve("posts", lambda _: commands.each("ask", ranks))
    commands.serve("drives", lambda _: commands.drive(lambda: "never"))
    commands.serve("sum", lambda values: sum(world.broadcast(values)))
    commands.serve("echo", lambda value: value)
    drive = lambda function, *args: outcome(commands.drive, function, *args)  # noqa: E731
    return {
        "value": drive(lambda a, b: [commands.rank, a + b], 1, 2),
        "error": drive(broken, "the reward broke"),
        "each": drive(lambda: [commands.each("ask", [r + k for r in ranks]) for k in (1, 5)]),
        "some": drive(lambda: commands.each("ask", [7, 8], [last - 1, last])),
        "fails on the last": drive(lambda: commands.each("ask", [*ranks[:-1], -1])),
        "fails on all": drive(lambda: commands.each("ask", [-1 for _ in ranks])),
        "result does not travel": drive(lambda: commands.each("ask", ["cannot travel" for _ in ranks])),
        "argument does not travel": drive(lambda: commands.each("ask", [threading.Lock() for _ in ranks])),
        "driver's result does not travel": drive(threading.Lock),
        "nobody": drive(lambda: commands.each("nobody", ranks)),
        "too few": drive(lambda: commands.each("ask", [1])),
        "threads": drive(at_once, commands),
        "posts inside a handler": drive(lambda: commands.each("posts", ranks)),
        "drive inside a handler": drive(lambda: commands.each("drives", ranks)),
        "drive inside drive": drive(lambda: commands.drive(lambda: "never")),
        "posts outside of drive": outcome(commands.each, "ask", ranks),
        "together": drive(lambda: commands.together("sum", [3, 4], []).result()),
        "bulk": drive(lambda: commands.together("echo", threading.Lock, "small").result() is threading.Lock),
        "still alive": drive(lambda: "still alive"),
        "asked": calls.seen,
    }


def sets(commands, world, folder):
    """200 commands to nested and disjoint sets, posted at once."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in SETS]
    order = []

    def add(argument):
        number, place, value = argument
        order.append(number)
        total = torch.tensor([value + commands.rank])
        dist.all_reduce(total, group=groups[place])
        return int(total)

    commands.serve("add", add)

    def drive():
        rng, posted = random.Random(3), []
        for number in range(200):
            place, value = rng.randrange(len(SETS)), rng.randrange(1000)
            argument = (number, place, value)
            posted.append((place, value, commands.together("add", argument, argument, SETS[place])))
        right = [len(SETS[place]) * value + sum(SETS[place]) for place, value, _ in posted]
        return [future.result() for _, _, future in posted] == right

    return {"right": commands.drive(drive), "in order": order == sorted(order), "count": len(order)}


def naps(commands, world, folder):
    """Rank 3 does not answer until the driver has heard the other set."""

    def nap(_):
        if commands.rank == 3:
            wait_for((folder / "heard").exists)
        return commands.rank

    commands.serve("nap", nap)
    commands.serve("ask", Asked(commands.rank))
    ran = []
    commands.completed, commands.iteration = ran.append, 5

    def drive():
        nothing_runs = commands.longest() is None
        napping = commands.together("nap", None, None, [2, 3])
        behind = commands.together("ask", 1, 1, [1, 2, 3])  # it waits for its turn, and is not the longest one
        answers = [commands.each("ask", [k, k], [0, 1], iteration=k) for k in range(3)] if not napping.done() else None
        wait_for(lambda: commands.longest() is not None and commands.longest()[1].endswith("answer of 3"))
        seconds, text = commands.longest()
        (folder / "heard").touch()
        results = [napping.result(), behind.result()]
        *answered, nap, last = ran
        times = {
            "iterations": [command.iteration for command in ran], "names": [command.name for command in ran],
            "behind the nap": last.posted < nap.ended[3] == last.begun[3] == last.began <= last.ended[3],
            "each": all(min(c.begun.values()) == c.began <= min(c.ended.values()) for c in answered),
            "waited": last.begun[1] < last.began,
        }  # fmt: skip
        return {
            "nothing runs": nothing_runs and commands.longest() is None, "answers": answers, "results": results,
            "seconds": seconds, "longest": text, "times": times,
        }  # fmt: skip

    return commands.drive(drive)


def death(commands, world, folder):
    """Rank 3 ends in a command, of which rank 2 waits for it."""
    group = dist.new_group([2, 3], backend="gloo")

    def die(_):
        if commands.rank == 3:
            (folder / "rank3.json").write_text(json.dumps("ended"))
            os._exit(0)
        return World(group).broadcast(commands.rank, source=1)

    commands.serve("die", die)
    commands.serve("ask", Asked(commands.rank))

    def drive():
        future, start = commands.together("die", None, None, [2, 3], about="verifier"), time.monotonic()
        error = outcome(future.result, RUN_S)
        seconds = time.monotonic() - start
        answers = commands.each("ask", [4, 4], [0, 1])
        return {
            "error": error,
            "seconds": seconds,
            "answers": answers,
            "again": outcome(commands.each, "ask", [1], [3]),
        }

    return outcome(commands.drive, drive)


def leader(commands, world, folder):
    """The first rank of a command fails in from_leader, and answers after the ranks that follow it."""
    group = dist.new_group([1, 2, 3], backend="gloo")

    def fails(_):
        members = World(group)
        try:
            members.from_leader(broken, "the reward broke")
        except DriverError:
            (folder / f"followed{commands.rank}").touch()
            raise
        finally:
            if members.rank == 0:
                wait_for(lambda: all((folder / f"followed{rank}").exists() for rank in (2, 3)))
                time.sleep(0.2)  # for the answers themselves; without them, the error is the leader's anyway

    commands.serve("fails", fails)
    future = lambda: commands.together("fails", None, None, [1, 2, 3], about="verifier")  # noqa: E731
    return outcome(commands.drive, lambda: future().result())


def frozen(commands, world, folder):
    """Rank 1 stands still, so that it does not receive what is posted, until the watch has seen that."""
    seen = []

    def freeze(_):
        if commands.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return os.getpid()

    commands.serve("freeze", freeze)
    commands.serve("ask", Asked(commands.rank))
    commands.serve("process", lambda _: os.getpid())

    def watch(process):
        wait_for(lambda: "is not received" in (commands.longest() or (0.0, ""))[1])
        seen.append(commands.longest()[1])
        os.kill(process, signal.SIGCONT)

    def drive():
        watcher = threading.Thread(target=watch, args=commands.each("process", [None], [1]))
        watcher.start()
        commands.together("freeze", None, None, [1])
        answers = [commands.together("ask", k, k, [1]) for k in range(4)]
        watcher.join()
        return [answer.result() for answer in answers]

    return {"answers": commands.drive(drive), "seen": seen}


def main(output_path, case):
    dist.init_process_group("gloo")
    world, folder = World(), Path(output_path).parent
    seen = CASES[case](Commands(world), world, folder)
    Path(output_path).write_text(json.dumps(seen))
    if case in ("rules", "sets", "naps", "frozen"):  # in the others, ranks have ended
        world.barrier()
    os._exit(0)


CASES = {"rules": rules, "sets": sets, "naps": naps, "death": death, "leader": leader, "frozen": frozen}

if __name__ == "__main__":
    main(*sys.argv[1:])
