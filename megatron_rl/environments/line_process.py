"""A child process that exchanges lines of JSON with this process. When the child is ended, all of its descendants are
ended as well."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

MARK = "MEGATRON_RL_EPISODES"  # environment variable by which the descendants of the process are found
GRACE_S = 15.0  # seconds between closing the standard input and killing the process
SHOWN_BYTES = 4000  # maximum number of bytes of the end of the log in error messages


class LineProcess:
    """A child process that writes JSON lines to its standard output. Its standard error is appended to the file `log`.

    `mark`: an environment variable and its value, which the program must pass to the processes that it starts. `end`
    kills all processes with this variable, including processes in other sessions.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        """Starts a program. `words`: the program and its arguments. Raises OSError if the program does not exist."""
        self.mark = {MARK: secrets.token_hex(16)}
        self._log, self._started = log, time.time()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8",
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def say(self, line: Mapping[str, Any]) -> None:
        """Sends a JSON object as a line. If the process has ended, nothing is sent; `hear` then raises EOFError."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._in.write(json.dumps(line) + "\n")
            self._in.flush()

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Returns the next line, parsed; None if no line arrives within `timeout_s`.

        Raises EOFError if the process has ended (the message contains the end of its log) or if the line is not a JSON
        object.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            if not self.ended:
                return None
            line = None  # a child of the process may keep the standard output open
        if line is None:
            self._lines.put(None)  # for the next call of `hear`
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            raise EOFError(f"it ended with status {self._process.poll()}; the end of its log:\n{self.tail()}")
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise EOFError(f"it wrote {line[:200]!r}, which is no line of its protocol")
        return said

    def end(self, grace_s: float = GRACE_S) -> None:
        """Closes the standard input, waits up to `grace_s` seconds, and kills the process and its descendants."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._in.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # the process is gone, or belongs to another user
                if process.create_time() > self._started - 1 and process.environ().get(MARK) == self.mark[MARK]:
                    process.kill()

    def tail(self) -> str:
        """Returns the last SHOWN_BYTES bytes of the log as text."""
        return self._log.read_bytes()[-SHOWN_BYTES:].decode(errors="replace").strip() or "(it is empty)"

    def _read(self, lines: IO[str]) -> None:
        with contextlib.suppress(ValueError):  # output that is not UTF-8 is treated as the end of the output
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)
