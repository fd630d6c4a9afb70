"""Attacks on the sandbox, as a script: it needs Python and this package's sandbox alone, so that any user can run it.

Argument: a directory of this user. It prints JSON: {attack: what it reached, or how its program ended}, where an attack
that reached nothing and ended as it should is an empty text; where no sandbox can be built, the reason as a text.
"""

import json
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

from megatron_rl.rewards import sandbox

SECRET = "a secret of the trainer"
# What code can do to the audit hook: where there is none, it finds nothing to change.
DISARM = """
import gc, os, sys
main = sys.modules["__main__"]
main.FORBIDDEN = ()
def nothing(event, arguments): return None
for module in list(sys.modules.values()):
    if hasattr(module, "FORBIDDEN"): module.FORBIDDEN = ("nothing",)
for thing in gc.get_objects():
    if type(thing) is type(nothing) and thing.__name__.startswith("_refuse"):
        try: thing.__code__ = nothing.__code__
        except (ValueError, AttributeError): pass
def attempt(what, function, *given):
    try: value = function(*given)
    except BaseException as error: return None
    if value != -1: print("reached", what, repr(value)[:80])
    return value
try:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
except BaseException: libc = None
kept, pids, port, name = sys.argv[1], list(map(int, sys.argv[2].split())), int(sys.argv[3]), sys.argv[4]
places = [kept, *(f"/proc/{pid}/root{kept}" for pid in pids), *(f"/proc/{pid}/cwd/kept" for pid in pids)]
"""
ATTACKS = {
    "files": """
for place in places:
    attempt("emptied", os.open, place, os.O_RDONLY | os.O_TRUNC)
    attempt("opened", os.open, place, os.O_WRONLY)
    attempt("emptied", os.truncate, place, 0)
    attempt("removed", os.unlink, place)
    attempt("moved", os.rename, place, place + ".moved")
    attempt("mode", os.chmod, place, 0)
    attempt("time", os.utime, place)
    attempt("linked", os.link, place, os.path.dirname(kept) + "/hard")
    if libc is not None:
        for flags in (os.O_TRUNC, os.O_WRONLY, os.O_RDWR):
            attempt("emptied by C", libc.open, place.encode(), flags)
            attempt("emptied by a call", libc.syscall, 257 if os.uname().machine == "x86_64" else 56, -100,
                    place.encode(), flags, 0)
        attempt("removed by C", libc.unlink, place.encode())
""",
    "signals": """
import resource, signal, fcntl
x86 = os.uname().machine == "x86_64"
for pid in pids:
    fd = attempt("pidfd", os.pidfd_open, pid)
    if fd is not None: attempt("killed by pidfd", signal.pidfd_send_signal, fd, signal.SIGKILL)
    attempt("killed", os.kill, pid, signal.SIGKILL)
    attempt("killed group", os.killpg, pid, signal.SIGKILL)
    attempt("stopped", os.kill, pid, signal.SIGSTOP)
    attempt("limited", resource.prlimit, pid, resource.RLIMIT_CPU, (0, 0))
    attempt("scheduled", os.sched_setaffinity, pid, {0})
    attempt("slowed", os.setpriority, os.PRIO_PROCESS, pid, 19)
    if libc is not None:
        fd = libc.syscall(434, pid, 0)
        if fd >= 0:
            print("reached pidfd by C")
            attempt("killed by pidfd and C", libc.syscall, 424, fd, 9, None, 0)
        attempt("killed by C", libc.kill, pid, 9)
        attempt("killed by tkill", libc.syscall, 200 if x86 else 130, pid, 9)
        attempt("killed by tgkill", libc.syscall, 234 if x86 else 131, pid, pid, 9)
        info = ctypes.create_string_buffer(128)
        info[8] = 255  # SI_QUEUE, as sigqueue(3) has it
        attempt("killed by a queue", libc.syscall, 129 if x86 else 138, pid, 9, info)
        attempt("traced", libc.ptrace, 16, pid, 0, 0)
    def own(number, pid=pid):
        fcntl.fcntl(0, 8, pid)  # F_SETOWN, and then F_SETSIG: input sends a signal to a process
        return fcntl.fcntl(0, 10, signal.SIGKILL)
    attempt("owned", own, 0)
""",
    "reading": """
for pid in pids:
    for what in ("environ", "maps", "mem"):
        attempt(what, lambda: open(f"/proc/{pid}/{what}", "rb").read(1))
for place in places: attempt("read", lambda: open(place).read())
import socket
def reach(family, address):
    with socket.socket(family) as one:
        one.settimeout(2)
        one.connect(address)
attempt("port", reach, socket.AF_INET, ("127.0.0.1", port))
attempt("name", reach, socket.AF_UNIX, chr(0) + name)
""",
    "forged": """
said = b"ready\\nexit 0 0.0\\n", b'{"isolated": true, "way": "bubblewrap"}\\n'
for text in said:
    for number in range(3, 1024):
        try: os.write(number, text)
        except OSError: pass
for pid in (*pids, os.getppid(), 1):
    for number in range(3, 64):
        try:
            with open(f"/proc/{pid}/fd/{number}", "wb", buffering=0) as file: file.write(said[0])
        except OSError: pass
raise ValueError("of its own")
""",
    "limits": """
import time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(60)
        made += 1
except BaseException: pass
if made > 40: print("reached", made, "processes")
attempt("memory", bytearray, 4 << 30)
attempt("a large file", lambda: open("/tmp/large", "wb").write(b"x" * (64 << 20)))
""",
    "survivors": """
import time
def leave():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            try: os.closerange(0, 64)
            finally: time.sleep(60)
        os._exit(0)
for number in range(3):
    try: leave()
    except BaseException: pass
if libc is not None and os.uname().machine == "x86_64" and libc.syscall(57) == 0:
    os.setsid()
    time.sleep(60)
""",
}


def left(mark):
    """Returns the processes that have a mark in their environment."""
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                pids.append(int(place.name))
        except OSError:
            continue
    return pids


def attack(directory, name):
    """Runs one attack. Returns what is wrong; nothing when the sandbox held."""
    kept = directory / "kept"
    kept.write_text(SECRET)
    kept.chmod(0o666)
    mark = sandbox.ENVIRONMENT["MARK"] = uuid.uuid4().hex
    victim = subprocess.Popen(["sleep", "60"], env={"TOKEN": SECRET}, cwd=directory, start_new_session=True)
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as unix:
        place = uuid.uuid4().hex
        unix.bind("\0" + place)
        unix.listen()
        pids = f"{victim.pid} {os.getpid()}"
        arguments = [str(kept), pids, str(inet.getsockname()[1]), place]
        settings = sandbox.SandboxSettings(timeout_s=20.0)
        affinity = os.sched_getaffinity(0)
        try:
            ran = sandbox.run_program(DISARM + ATTACKS[name], arguments=arguments, settings=settings)
        finally:
            status = victim.poll()
            victim.kill()
            victim.wait()
    wrong = [line for line in ran.output.splitlines() if "reached" in line]
    wrong += [f"the victim ended with {status}"] * (status is not None)
    wrong += ["the file was changed"] * (not kept.exists() or kept.read_text() != SECRET)
    wrong += [f"processes {survivors} are left" for survivors in [left(mark)] if survivors]
    wrong += ["the affinity was changed"] * (affinity != os.sched_getaffinity(0))
    ended = "ValueError: of its own" if name == "forged" else ""
    wrong += [f"it ended with {ran.why!r}, {ran.output[-300:]!r}"] * (ran.why != ended)
    return "; ".join(wrong)


def main():
    try:
        sandbox.require()
    except sandbox.SandboxFailure as error:
        print(json.dumps(str(error)))
    else:
        print(json.dumps({name: attack(Path(sys.argv[1]), name) for name in ATTACKS}))


if __name__ == "__main__":
    main()
