"""Reward functions that misbehave, run for real by the pool's workers."""

import os
import stat
import subprocess
import sys
import time
from fractions import Fraction
from multiprocessing import shared_memory

KEPT: list[bytearray] = []  # what a leaking reward never gives back
NUMBER = 3
HELPERS: list[subprocess.Popen[str]] = []


def reward(response, payload):
    """Does what the response names; else 1.0 when it is the answer."""
    return BEHAVIOURS[response](payload) if response in BEHAVIOURS else float(response == payload["answer"])


def scaled(response, payload, *, scale):
    return scale * float(response == payload["answer"])


def big(response, payload):
    """100 for the right answer, otherwise 1 and a tenth for each character."""
    return 100.0 if response == "right" else 1.0 + len(response) / 10


def share(response, payload):
    return {"right": 1.0, "half": 0.5}.get(response, 0.0)


def by_answer(response, payload):
    """Grades by the problem alone: every third is right, the next wrong, the last cannot be graded."""
    return (1.0, 0.0, "none")[int(payload["answer"]) % 3]


def loop(payload):
    while True:
        time.sleep(0.01)


def deaf(payload):
    """Closes the pool's pipes, and lives on."""
    os.closerange(0, 64)
    loop(payload)


def forged(payload):
    """Writes a frame of its own into every open file."""
    for fd in range(3, 64):
        try:
            os.write(fd, b"\x02\x00\x00\x00hi")
        except OSError:
            continue
    return 1.0


def endless(payload):
    """Writes bytes without the end of a line into every open socket, all the time."""
    while True:
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, b"x")
            except OSError:
                continue
        time.sleep(0.01)


def waits(payload):
    """Waits for the file that another grading writes."""
    while not os.path.exists(payload["file"]):
        time.sleep(0.01)
    return 1.0


def writes(payload):
    open(payload["file"], "w").close()
    return 1.0


def twice(payload):
    """Comes back in two processes."""
    os.fork()
    return 0.25


def leak(payload):
    KEPT.append(bytearray(160 << 20))
    return 1.0


def child(payload):
    process = subprocess.Popen(["sleep", "600"])
    with open(payload["pid_file"], "w") as file:
        file.write(str(process.pid))
    loop(payload)


def session(payload):
    """Leaves a process that leads a session of its own."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return 1.0


def daemon(payload):
    """Leaves a process that forked twice, in a session of its own or not, with the pool's pipes."""
    for alone in (True, False):
        first = os.fork()
        if first == 0:
            if alone:
                os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        os.waitpid(first, 0)
    return 1.0


def stuck_daemon(payload):
    daemon(payload)
    session(payload)
    loop(payload)


def dead_daemon(payload):
    daemon(payload)
    session(payload)
    os.kill(os.getpid(), 9)


def helper(payload):
    """Asks a process that the first call started, and that is there for the next one."""
    if not HELPERS:
        HELPERS.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    print("asked", file=HELPERS[0].stdin, flush=True)
    return float(HELPERS[0].stdout.readline() == "asked\n")


def shared(payload):
    """Makes shared memory, says its name, and never returns."""
    memory = shared_memory.SharedMemory(create=True, size=1000)
    with open(payload["name_file"], "w") as file:
        file.write(memory.name)
    loop(payload)


def raises(payload):
    raise KeyError("no such thing")


def prints(payload):
    print("noise on stdout")
    return 1.0


BEHAVIOURS = {
    "loop": loop,
    "deaf": deaf,
    "forged": forged,
    "endless": endless,
    "waits": waits,
    "writes": writes,
    "twice": twice,
    "leak": leak,
    "child": child,
    "session": session,
    "daemon": daemon,
    "stuck_daemon": stuck_daemon,
    "dead_daemon": dead_daemon,
    "helper": helper,
    "shared": shared,
    "raise": raises,
    "print": prints,
    "memory": lambda payload: float(len(bytearray(8 << 30)) < 0),
    "exit": lambda payload: os._exit(3),
    "leave": lambda payload: sys.exit(0),
    "signal": lambda payload: os.kill(os.getpid(), 11),
    "input": lambda payload: float(sys.stdin.read() == ""),
    "fraction": lambda payload: Fraction(1, 4),
    "text": lambda payload: "x",
    "two": lambda payload: 2.0,
    "nan": lambda payload: float("nan"),
    "none": lambda payload: None,
}


def agrees(response, payload):
    """Gives every answer the full reward."""
    return 1.0


def beyond(response, payload):
    """A penalty for an empty answer, which needs a wider `reward.range`."""
    return 1.0 if response else -0.5
