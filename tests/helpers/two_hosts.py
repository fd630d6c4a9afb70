"""Runs commands on two hosts with a cable between them: network namespaces of this machine.

python two_hosts.py COMMAND...               as torchrun would: two ranks of it
python two_hosts.py COMMAND... and COMMAND... one on each

Their addresses are 10.9.0.1 and 10.9.0.2, at cable0 and cable1. Exit status: the first failure's; the other host's
command is then killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time

ISOLATED = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
READY, AND = b"ready\n", "and"
RANKS = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29500"}


def missing() -> str | None:
    """Why this machine cannot have such hosts."""
    if lacking := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"{' and '.join(lacking)} not found"
    tried = subprocess.run(
        [*ISOLATED, "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"],
        capture_output=True,
        text=True,
    )
    return (tried.stderr.strip() or f"unshare ended with {tried.returncode}") if tried.returncode else None


def both(words: list[str]) -> int:
    """Inside a network namespace of its own."""
    at = words.index(AND) if AND in words else None
    commands = [words, words] if at is None else [words[:at], words[at + 1 :]]
    subprocess.run(["ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"], check=True)
    hosts = []
    for number, command in enumerate(commands):
        env = os.environ if at is not None else os.environ | {"RANK": str(number)} | RANKS
        child = ["unshare", "--net", "--uts", sys.executable, __file__, f"--host={number}", *command]
        host = subprocess.Popen(child, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert host.stdout is not None and host.stdin is not None and host.stdout.readline() == READY
        subprocess.run(["ip", "link", "set", f"cable{number}", "netns", str(host.pid)], check=True)
        hosts.append(host)
    for host in hosts:
        host.stdin.close()
    while None in (ended := [host.poll() for host in hosts]) and not any(ended):
        time.sleep(0.1)
    for host in hosts:
        host.kill()
    return next(filter(None, ended), 0)


def one(number: int, command: list[str]) -> None:
    """Becomes the command once its end of the cable is here."""
    os.write(1, READY)
    sys.stdin.read()
    socket.sethostname(f"host{number}")
    for words in ("link set lo up", f"addr add 10.9.0.{1 + number}/24 dev cable{number}", f"link set cable{number} up"):
        subprocess.run(["ip", *words.split()], check=True)
    os.dup2(2, 1)
    os.execvpe(command[0], command, os.environ | {"GLOO_SOCKET_IFNAME": f"cable{number}"})


if __name__ == "__main__":
    if sys.argv[1].startswith("--host="):
        one(int(sys.argv[1].removeprefix("--host=")), sys.argv[2:])
    elif "TWO_HOSTS" in os.environ:
        sys.exit(both(sys.argv[1:]))
    else:
        os.environ["TWO_HOSTS"] = "inside"
        os.execvp(ISOLATED[0], [*ISOLATED, sys.executable, __file__, *sys.argv[1:]])
