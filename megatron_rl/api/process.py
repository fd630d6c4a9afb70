"""Runs a command of megatron-rl in a process of its own, shows what it prints, and answers what it tells.

The process imports megatron-rl and nothing of the program that calls: a script needs no `if __name__` around its calls,
and a notebook's kernel keeps its memory, its signals and its GPU to itself.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from megatron_rl.config.base import ConfigError

LEFT = 130  # exit status of a run that saved and left
WRONG_CONFIG = 2  # exit status for settings that cannot be used
LOOK_S = 0.1  # between two looks at whether the process has ended
SHOWN = 1500  # characters of the output that an error repeats
Event = dict[str, Any]


class RunFailed(RuntimeError):
    """A run that ended with an error. `kind` is the error's name in the run, such as RewardFailure, or none."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def start(words: Sequence[str], output: int | None) -> subprocess.Popen[bytes]:
    """Starts `megatron-rl *words`, which finds modules where this process does. Its output goes to the file descriptor
    `output`, or where this process's goes. A Ctrl-C of a terminal does not reach it: `run` passes it on."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_rl", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        env=environment | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
    )  # fmt: skip


def run(words: Sequence[str], told: Callable[[Event], bool] | None = None, *, show: bool = True) -> int:
    """Runs `megatron-rl *words` to its end. Returns the exit status: 0, or 130 where it saved and left. `show`: what it
    prints is shown; else only an error tells the end of it.

    `told` gets what a training run tells (session.parent_events), while the run waits; it returns whether the run is to
    stop. A KeyboardInterrupt asks the run to save and leave, and is raised again when it has; a second one kills it.
    Raises ConfigError and RunFailed with the run's own words, and whatever `told` raises, once the run has left.
    """
    with contextlib.ExitStack() as stack:
        call = _Call(words, told, stack, show=show)
        try:
            call.serve()
        except BaseException as error:
            call.leave(interrupted=isinstance(error, KeyboardInterrupt))
            raise
    return _status(words, call)


class _Call:
    """One command under way."""

    def __init__(
        self, words: Sequence[str], told: Callable[[Event], bool] | None, stack: contextlib.ExitStack, *, show: bool
    ) -> None:  # fmt: skip
        self.error: Event | None = None  # what the run told of its end
        self.said = ""  # the end of its output
        self._told, self._shown = told, show
        self._server: socket.socket | None = None
        self._programs: list[connection.Connection] = []  # the run's ranks that tell something
        if told is not None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron_rl_"))
            self._server = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._server.bind(address := f"{directory}/events")
            self._server.listen()
            words = [*words, "--events", address]
        self._output, own = (None, None) if show and sys.stdout.isatty() else os.pipe()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.process = start(words, own)
        if own is not None:
            os.close(own)
        stack.callback(self._close)

    def serve(self) -> None:
        """Shows output and answers events until the process has ended."""
        while True:
            ended = self.process.poll() is not None
            waiting: list[Any] = [one for one in (self._output, self._server, *self._programs) if one is not None]
            ready = connection.wait(waiting, timeout=0 if ended else LOOK_S)
            for one in ready:
                self._take(one)
            if ended and not ready:
                return

    def leave(self, *, interrupted: bool) -> None:
        """Has the run save and leave, and waits. A second interrupt kills it."""
        for one in self._programs:  # the run notices that nobody answers
            one.close()
        self._programs, self._told = [], None
        try:
            if interrupted and self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
            self.serve()
        except KeyboardInterrupt:
            self._kill()

    def _take(self, one: Any) -> None:
        if one is self._server:
            accepted, _ = one.accept()
            self._programs.append(connection.Connection(accepted.detach()))
        elif one is self._output:
            self._show(os.read(one, 1 << 16))
        else:
            self._answer(one)

    def _show(self, data: bytes) -> None:
        if not data and self._output is not None:
            os.close(self._output)
            self._output = None
        text = self._decode(data, final=not data)
        self.said = (self.said + text)[-SHOWN:]
        if self._shown:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _answer(self, program: connection.Connection) -> None:
        try:
            event = json.loads(program.recv_bytes())
        except (EOFError, OSError):
            self._programs.remove(program)
            program.close()
            return
        if event["event"] == "error":
            self.error = event
        stop = self._told(event) if self._told is not None else True
        with contextlib.suppress(OSError):  # it has ended
            program.send_bytes(json.dumps({"stop": stop}).encode())

    def _close(self) -> None:
        if self.process.poll() is None:
            self._kill()
        for one in self._programs:
            one.close()
        if self._output is not None:
            os.close(self._output)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _status(words: Sequence[str], call: _Call) -> int:
    """Returns the exit status of a command that did not fail. Raises ConfigError or RunFailed for one that did."""
    status = call.process.returncode
    if status in (0, LEFT):
        return status
    if call.error is not None:
        kind, message = call.error["type"], call.error["message"]
        raise ConfigError(message) if kind == "ConfigError" else RunFailed(message, kind)
    mark = f"megatron-rl {words[0]}: "
    if status == WRONG_CONFIG and mark in call.said:
        raise ConfigError(call.said.rpartition(mark)[2].strip())
    shown = f":\n{call.said.strip()}" if call.said.strip() else "; its output says why"
    raise RunFailed(f"megatron-rl {words[0]} ended with status {status}{shown}")


def refuse_ranks() -> None:
    """Raises ConfigError in a process that torchrun or srun started as one rank of several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"this process is one of WORLD_SIZE = {os.environ['WORLD_SIZE']} ranks, and a Trainer starts its ranks "
            "itself: run the program once, without torchrun, with ranks=...; or write the config by "
            "trainer.config.to_yaml and give it to `megatron-rl train` under torchrun"
        )


def write_config(path: Path, text: str) -> Path:
    """Writes a config for a command, with the directories that it lies in. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
