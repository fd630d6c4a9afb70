"""Runs a command of megatron-rl in a separate process, shows its output, and replies to the events that it sends.

The process imports megatron-rl and nothing of the calling program. A script therefore needs no `if __name__` guard, and
the memory, signals and GPU of a notebook's kernel are not affected.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from megatron_rl.config.base import ConfigError

LEFT = 130  # exit status of a run that was stopped and has saved
WRONG_CONFIG = 2  # exit status for an invalid config
LOOK_S = 0.1  # seconds between two checks whether the process has ended
SHOWN = 1500  # maximum number of characters of the output in an error message
LINES = 20  # number of the last lines of the output that the cell of a notebook shows
Event = dict[str, Any]


class RunFailed(RuntimeError):
    """Raised when a run ends with an error. `kind`: class name of this error, such as RewardFailure; "" if unknown."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def start(words: Sequence[str], output: int | None) -> subprocess.Popen[bytes]:
    """Starts `megatron-rl *words` with this process's module search path.

    `output`: file descriptor for the new process's standard output and error; None: the new process uses the standard
    output and error of this process. The new process has a separate session, so it does not receive Ctrl-C of the
    terminal; `run` forwards Ctrl-C.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_rl", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        env=environment | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
    )  # fmt: skip


def run(words: Sequence[str], on_event: Callable[[Event], bool] | None = None, *, show: bool = True) -> int:
    """Runs `megatron-rl *words` to its end. Returns the exit status: 0, or 130 if the run was stopped and has saved.

    `on_event`: function that is called with each event of a training run (session.parent_events), while the run waits.
    The function returns whether the run should stop. `show`: whether the output is shown; if not, the message of an
    error contains the end of the output. A KeyboardInterrupt asks the run to save and exit, and is raised again after
    the run has exited; a second KeyboardInterrupt kills the run. Raises ConfigError or RunFailed with the run's error
    message. Exceptions of `on_event` are raised after the run's exit.
    """
    with contextlib.ExitStack() as stack:
        call = _Call(words, on_event, stack, show=show)
        try:
            call.serve()
        except BaseException as error:
            call.leave(interrupted=isinstance(error, KeyboardInterrupt))
            raise
    return _status(words, call)


class _NotebookOutput:
    """The output of a command in the cell of a notebook: one display that is updated in place and has the last LINES
    lines."""

    def __init__(self) -> None:
        self._text, self._display = "", None

    def write(self, text: str) -> None:
        """Appends text, which the next `flush` shows."""
        self._text = "".join((self._text + text).splitlines(keepends=True)[-LINES:])

    def flush(self) -> None:
        """Shows the last lines: the first call makes the display, and further calls update it."""
        from IPython.display import display  # there is no IPython outside of notebooks

        shown = {"text/plain": self._text.rstrip("\n")}
        if self._display is None:
            self._display = display(shown, raw=True, display_id=True)
        else:
            self._display.update(shown, raw=True)


class _Call:
    """A running command: its process, its output and its event connections."""

    def __init__(
        self, words: Sequence[str], on_event: Callable[[Event], bool] | None, stack: contextlib.ExitStack, *, show: bool
    ) -> None:  # fmt: skip
        self.error: Event | None = None  # the event that reports the run's error
        self.output_end = ""  # the last SHOWN characters of the output
        self._on_event, self._shown = on_event, show
        in_notebook = type(sys.stdout).__module__.startswith("ipykernel.")
        self._screen = _NotebookOutput() if in_notebook else sys.stdout
        # Watches the output of the process, the socket for events, and the connections to this socket. The data of each
        # entry is the method that reads from the entry.
        self._sources = stack.enter_context(selectors.DefaultSelector())
        if on_event is not None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron_rl_"))
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address := f"{directory}/events")
            server.listen()
            self._sources.register(server, selectors.EVENT_READ, self._accept)
            words = [*words, "--events", address]
        output, write_end = (None, None) if show and sys.stdout.isatty() else os.pipe()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.process = start(words, write_end)
        stack.callback(self._close)
        if write_end is not None and output is not None:
            os.close(write_end)
            self._sources.register(output, selectors.EVENT_READ, self._show)

    def serve(self) -> None:
        """Shows the output and answers events until the process has ended."""
        ready, ended = [], False
        while ready or not ended:
            ended = self.process.poll() is not None
            ready = self._sources.select(0 if ended else LOOK_S)
            for key, _ in ready:
                key.data(key.fileobj)

    def leave(self, *, interrupted: bool) -> None:
        """Asks the run to save and exit, and waits for its end. If another KeyboardInterrupt arrives, the run is
        killed."""
        self._on_event = None
        self._drop(connection.Connection)  # the run stops because its event connections are closed
        try:
            if interrupted and self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
            self.serve()
        except KeyboardInterrupt:
            self._kill()

    def _accept(self, server: socket.socket) -> None:
        accepted, _ = server.accept()
        self._sources.register(connection.Connection(accepted.detach()), selectors.EVENT_READ, self._answer)

    def _show(self, output: int) -> None:
        data = os.read(output, 1 << 16)
        if not data:
            self._drop(int)
        text = self._decode(data, final=not data)
        self.output_end = (self.output_end + text)[-SHOWN:]
        if self._shown:
            self._screen.write(text)
            self._screen.flush()

    def _answer(self, program: connection.Connection) -> None:
        try:
            event = json.loads(program.recv_bytes())
        except (EOFError, OSError):
            self._sources.unregister(program)
            program.close()
            return
        if event["event"] == "error":
            self.error = event
        stop = self._on_event(event) if self._on_event is not None else True
        with contextlib.suppress(OSError):  # the process has ended
            program.send_bytes(json.dumps({"stop": stop}).encode())

    def _drop(self, kind: type) -> None:
        """Closes the sources of one type. `kind`: int for the file descriptor of the output, Connection for the event
        connections of the run's processes."""
        for source in [key.fileobj for key in self._sources.get_map().values() if isinstance(key.fileobj, kind)]:
            self._sources.unregister(source)
            if isinstance(source, int):
                os.close(source)
            elif isinstance(source, connection.Connection):
                source.close()

    def _close(self) -> None:
        if self.process.poll() is None:
            self._kill()
        self._drop(connection.Connection)
        self._drop(int)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _status(words: Sequence[str], call: _Call) -> int:
    """Returns the exit status if the command succeeded or was stopped. Raises ConfigError or RunFailed if it failed."""
    status, mark = call.process.returncode, f"megatron-rl {words[0]}: "
    if status in (0, LEFT):
        return status
    if call.error is not None:
        kind, message = call.error["type"], call.error["message"]
    elif status == WRONG_CONFIG and mark in call.output_end:
        kind, message = ConfigError.__name__, call.output_end.rpartition(mark)[2].strip()
    else:
        shown = f":\n{call.output_end.strip()}" if call.output_end.strip() else "; its output says why"
        kind, message = "", f"megatron-rl {words[0]} ended with status {status}{shown}"
    raise ConfigError(message) if kind == ConfigError.__name__ else RunFailed(message, kind)


def refuse_ranks() -> None:
    """Raises ConfigError if torchrun or srun started this process as one of several ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"this process is one of WORLD_SIZE = {os.environ['WORLD_SIZE']} ranks, and a Trainer starts its ranks "
            "itself: run the program once, without torchrun, with ranks=...; or write the config by "
            "trainer.config.to_yaml and give it to `megatron-rl train` under torchrun"
        )
