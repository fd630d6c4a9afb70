"""The processes that look after a run's own servers, one `megatron-rl serve` each."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_rl.engines import server_log
from megatron_rl.session.control_protocol import ControlClient

LEAVE_S = 60.0  # a server that is told to leave has so long


class Supervisor:
    """`megatron-rl serve` for one server. It ends the server when this process is gone, however that comes."""

    def __init__(self, run: Path, role: str, replica: int, *, gpus: Sequence[int] = ()) -> None:
        """`gpus`: the GPUs of this host that the server takes; none: those that engine.gpus says."""
        self.role, self.name = role, f"{role}-{replica}"
        words = [
            sys.executable,
            "-m",
            "megatron_rl.main",
            "serve",
            str(run / "config.yaml"),
            f"--role={role}",
            f"--replica={replica}",
            *([f"--gpus={','.join(map(str, gpus))}"] if gpus else []),
        ]
        self.log = run / "logs" / f"serve_{role}_{replica}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        own, other = socket.socketpair()
        # in a session of its own: Ctrl-C is for the run, which needs its servers until the iteration's end
        with self.log.open("ab", buffering=0) as out, other:
            out.write(server_log.start_line())
            self._process = subprocess.Popen(
                [*words, "--with-parent"], stdin=other.fileno(), stdout=out, stderr=out, start_new_session=True
            )
        self.line = ControlClient(own)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask_to_leave(self) -> None:
        self.line.close()

    def wait(self, timeout_s: float) -> None:
        """Waits until it has left; kills it after that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_supervisors(started: Mapping[str, Sequence[Supervisor]]) -> None:
    supervisors = [supervisor for each in started.values() for supervisor in each]
    for supervisor in supervisors:
        supervisor.ask_to_leave()
    end = time.monotonic() + LEAVE_S
    for supervisor in supervisors:
        supervisor.wait(max(0.1, end - time.monotonic()))


def hopeless(supervisors: Sequence[Supervisor], leave: Callable[[], bool]) -> str | None:
    """Why not to wait for a server any more: the run was asked to leave, or started some and gave up on all of them."""
    if leave():
        return "asked to leave while it waited for a server: the same command goes on from the last checkpoint"
    if not supervisors or not all(supervisor.ended() for supervisor in supervisors):
        return None
    return f"no server runs, and none is started again (engine.restarts); {server_log.end_of(supervisors[0].log)}"
