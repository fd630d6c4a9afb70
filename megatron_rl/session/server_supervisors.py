"""The supervisor processes of a run's servers: one `megatron-rl serve` process for each server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.engines import server_log
from megatron_rl.lib.regular_files import regular
from megatron_rl.session.control_protocol import ControlClient

LEAVE_S = 60.0  # seconds that a server may take to exit after it was asked to, before it is killed


class Supervisor:
    """A `megatron-rl serve` child process, which starts and restarts one server. The child process ends the server when
    this process exits for any reason."""

    def __init__(self, run: Path, role: str, replica: int, *, gpus: Sequence[int] = ()) -> None:
        """`run`: the run directory. `gpus`: indices of the GPUs of this host that the server uses; if empty,
        engine.gpus is used."""
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
        # Starts a new session, so that Ctrl-C does not end the servers; the run needs them until the iteration ends.
        with open(self.log, "ab", buffering=0, opener=regular) as out, other:
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
        """Waits until the supervisor process has exited, and kills it after `timeout_s` seconds."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_supervisors(supervisors: Sequence[Supervisor]) -> None:
    for supervisor in supervisors:
        supervisor.ask_to_leave()
    end = time.monotonic() + LEAVE_S
    for supervisor in supervisors:
        supervisor.wait(max(0.1, end - time.monotonic()))


def hopeless(supervisors: Sequence[Supervisor], leave: Callable[[], bool]) -> str | None:
    """Returns the reason why it is useless to wait for a server, or None if a server may still start.

    Waiting is useless if the run was asked to exit (`leave` returns True), or if all `supervisors` have exited. It is
    not useless if `supervisors` is empty."""
    if leave():
        return "asked to leave while it waited for a server: the same command goes on from the last checkpoint"
    if not supervisors or not all(supervisor.ended() for supervisor in supervisors):
        return None
    return f"no server runs, and none is started again (engine.restarts); {server_log.end_of(supervisors[0].log)}"
