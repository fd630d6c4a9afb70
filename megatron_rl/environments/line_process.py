"""A child process that exchanges lines of JSON with this process. Ending the child process also ends all of its
descendants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.lib.regular_files import regular

MARK = "MEGATRON_RL_EPISODES"  # environment variable by which the descendants of the process are found
GRACE_S = 15.0  # seconds to wait for the exit status of a process that has closed its output or was killed
LOOK_S = 0.2  # seconds between two checks of whether the process has ended
SHOWN_BYTES = 4000  # maximum number of bytes from the end of the log that an error message shows
MOST_BYTES = 1 << 30  # maximum size of a line


class LineProcess:
    """A child process that writes JSON lines to its standard output. Its standard error is appended to the file `log`.
    All coroutine methods must be called in the same event loop.

    `mark`: {name: value} of an environment variable, which the program must pass to the processes that it starts. `end`
    kills all processes that have this variable, including processes in other POSIX sessions.
    """

    def __init__(self, log: Path) -> None:
        self.mark = {MARK: secrets.token_hex(16)}
        self._log, self._started = log, time.time()

    async def start(self, words: Sequence[str]) -> None:
        """Starts a program. `words`: the program and its arguments. Raises OSError if the program does not exist."""
        with open(self._log, "ab", opener=regular) as errors:
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                limit=MOST_BYTES,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    def say(self, line: Mapping[str, Any]) -> None:
        """Sends a JSON object as a line. If the process has ended, nothing is sent; `hear` then raises EOFError."""
        self._in.write(json.dumps(line).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        """Returns the next line, parsed.

        Raises EOFError if the process has ended (the message contains the end of the log) or if the line is not a JSON
        object.
        """
        reading = asyncio.ensure_future(self._out.readline())
        while not (await asyncio.wait([reading], timeout=LOOK_S))[0]:
            if self.ended:  # stop reading, because a child of the process may keep the standard output open
                reading.cancel()
                break
        line = b"" if reading.cancelled() or not reading.done() else reading.result()
        if not line:
            await self._wait(GRACE_S)
            tail = self._log.read_bytes()[-SHOWN_BYTES:].decode(errors="replace").strip() or "(it is empty)"
            raise EOFError(f"it ended with status {self._process.returncode}; the end of its log:\n{tail}")
        with contextlib.suppress(ValueError):
            if isinstance(message := json.loads(line), dict):
                return message
        raise EOFError(f"it wrote {line.decode(errors='replace')[:200]!r}, which is no line of its protocol")

    async def end(self, grace_s: float) -> None:
        """Closes the standard input, waits up to `grace_s` seconds, and kills the process and its descendants."""
        self._in.close()
        await self._wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # raised if the process has ended or belongs to another user
                if process.create_time() > self._started - 1 and process.environ().get(MARK) == self.mark[MARK]:
                    process.kill()
        await self._wait(GRACE_S)

    async def _wait(self, timeout_s: float) -> None:
        """Waits until the process has ended, at most `timeout_s` seconds."""
        if not self.ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
