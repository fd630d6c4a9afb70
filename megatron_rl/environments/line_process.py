"""A program that is spoken to in lines of JSON, and of which nothing is left once it is ended."""

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

MARK = "MEGATRON_RL_EPISODES"  # a variable of the environment by which the program's own children are found
GRACE_S = 15.0  # between the end of its standard input and its killing
SHOWN_BYTES = 4000  # of the log's end


class LineProcess:
    """A child process. What it writes to its standard error is in `log`; standard output has its lines.

    `mark` is for the program to put into the environment of what it starts: such processes end with it, also those that
    lead a session of their own.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        """Raises OSError where there is no such program."""
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
        """Sends a line. One that ended meanwhile gets none: `hear` tells."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._in.write(json.dumps(line) + "\n")
            self._in.flush()

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Returns the next line; None where none came in time. Raises EOFError, with the end of the log, when it ended,
        and for a line that is no JSON object."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            if not self.ended:
                return None
            line = None  # a child of its own may hold its standard output
        if line is None:
            self._lines.put(None)  # for the next who asks
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
        """Closes its standard input, and kills what is left after `grace_s`."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._in.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it is gone, or another user's
                if process.create_time() > self._started - 1 and process.environ().get(MARK) == self.mark[MARK]:
                    process.kill()

    def tail(self) -> str:
        """Returns the end of the log."""
        return self._log.read_bytes()[-SHOWN_BYTES:].decode(errors="replace").strip() or "(it is empty)"

    def _read(self, lines: IO[str]) -> None:
        with contextlib.suppress(ValueError):  # bytes that are no text end the conversation
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)
