"""Starts a rollout server as a process, waits until it is ready, and stops it with all its child processes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import megatron_rl
from megatron_rl.engines import server_log, shared_memory_cleanup
from megatron_rl.engines.kind import Command
from megatron_rl.engines.protocol import EngineError
from megatron_rl.lib import processes
from megatron_rl.lib.regular_files import read_own, regular
from megatron_rl.run.parent_death import end_with_parent

GRACE_S = 20.0  # seconds between SIGTERM and SIGKILL when a server is stopped
TIDY_S = 5.0  # seconds that the process which removes a stopped server's shared memory gets before it is killed
TIDY_POLL_S = 0.05
NOTE_S = 5.0  # seconds between two checks of a starting server's shared memory
POLL_S = 0.2
# Environment variables of torchrun. A server must not inherit them, because a server is not a rank.
# With TORCHELASTIC_USE_AGENT_STORE, the processes of a server would wait forever for torchrun's store.
LAUNCHER = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|ROLE)_.*")
METADATA = "Metadata-Version: 2.1\nName: megatron-rl-plugin\nVersion: 0\n"


class StartError(EngineError):
    """Raised when a server does not start. The message has the last lines of the server's log, and the first error in
    the log.
    """


class ServerProcess:
    """One server process. Its output is appended to `log`. The server leads a separate process session; all processes
    of the session are killed when the server is stopped. The server receives SIGTERM when the thread that created this
    object ends, so the thread must live as long as the server.

    `stop` removes the server's shared memory. The constructor removes shared memory left by servers whose owner
    processes were killed.
    """

    def __init__(self, command: Command, log: Path, inherited: Mapping[str, str], *, imports: Path) -> None:
        """`inherited`: environment variables of the server; the variables of `command` override them.
        `imports`: a directory, created here, from which the server imports this package.

        Raises StartError if the program of `command` cannot be started.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        own = str(_only_this_package(imports, command.entry_points))
        path = os.pathsep.join(filter(None, (own, inherited.get("PYTHONPATH"))))
        kept = {name: value for name, value in inherited.items() if not LAUNCHER.fullmatch(name)}
        # The fault handler writes the stack of a crash in compiled code to the log.
        environment = {**kept, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": path, **command.environment}
        shared_memory_cleanup.clear()
        self._segments = shared_memory_cleanup.Segments()
        with open(log, "ab", buffering=0, opener=regular) as out:
            out.write(server_log.start_line())
            try:
                self._process = subprocess.Popen(
                    command.words,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=functools.partial(end_with_parent, signal.SIGTERM, os.getpid()),
                )
            except OSError as error:
                raise StartError(
                    f"cannot start {command.words[0]}: {error}; set engine.python to the engine's interpreter"
                ) from error
        self._stopped = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """Returns the exit status, or None while the process is running."""
        return self._process.poll()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Returns True when the server is ready, False if `stop` returns True first. Raises StartError, after stopping
        the server, if the server ends or is not ready within `timeout_s`.
        """
        end, note = time.monotonic() + timeout_s, time.monotonic() + NOTE_S
        while True:
            # Call `ready` first: a response after the server has ended comes from another server at the same port.
            answers, status = ready(), self.ended()
            if (answers and status is None) or time.monotonic() > note:
                self._segments.note(processes.members(self.pid))
                note = time.monotonic() + NOTE_S
            if answers and status is None:
                return True
            if stop():
                return False
            if status is not None or time.monotonic() > end:
                self.stop()
                what = (
                    f"did not answer within {timeout_s:g} s"
                    if status is None
                    else f"ended with status {status} while it started"
                )
                raise StartError(f"the server {what}; {server_log.end_of(self.log)}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Sends SIGTERM to the server's session, and kills the remaining processes of the session after GRACE_S
        seconds. A second call is a no-op, because the session id may have been reused.
        """
        if self._stopped:
            return
        self._stopped = True
        self._segments.note(processes.members(self.pid))
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._kill_and_let_tidy()
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._segments.remove()

    def _kill_and_let_tidy(self) -> None:
        """Kills the remaining processes of the session, except for the processes that remove shared memory, which get
        TIDY_S seconds.
        """
        end = time.monotonic() + TIDY_S
        while (left := processes.members(self.pid)) and time.monotonic() < end:
            for pid in left:
                if not processes.is_tracker(pid):
                    processes.kill(pid)
            time.sleep(TIDY_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def make_token(path: Path) -> str:
    """Returns the job's token, a secret that servers require from clients. The first caller creates the file `path`
    with a random token. Only the owner of the file can read the file.

    Raises UntrustedFile if the file is a link or belongs to another user.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # atomic: the file either has the whole token or does not exist
    finally:
        draft.unlink()
    return read_own(path).strip()


def _only_this_package(directory: Path, entry_points: str) -> Path:
    """Creates a directory from which a server can import this package, but not the packages installed beside it,
    because the server's Python environment has another torch. Returns the directory. The package gets the given entry
    points, as if pip had installed it.
    """
    package, link = Path(megatron_rl.__file__).resolve().parent, directory.resolve() / "megatron_rl"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.resolve() != package:
        draft = link.with_name(f".{secrets.token_hex(8)}")
        draft.symlink_to(package, target_is_directory=True)
        draft.replace(link)
    about = link.parent / "megatron_rl_plugin-0.dist-info"
    about.mkdir(exist_ok=True)
    files = {"METADATA": METADATA, "entry_points.txt": entry_points}
    for name, text in files.items():
        draft = about / f".{secrets.token_hex(8)}"
        draft.write_text(text)
        draft.replace(about / name)
    return link.parent
