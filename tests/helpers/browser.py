"""Pages in a real browser: Chromium without a window, driven through a pipe, so that no port is opened."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--disable-extensions", "--mute-audio"),
]
PIPES = (3, 4)  # the descriptors from which Chromium reads commands, and to which it writes answers
TELLING = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
# Scripts may wait until something is so, for 10 s at most: `await until(() => ...)`.
UNTIL = """
  const pause = (time) => new Promise((done) => setTimeout(done, time));
  const until = async (test) => { for (let i = 0; i < 500 && !test(); i += 1) await pause(20); };
"""


def chromium() -> str | None:
    """Returns the browser's program; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((program for name in names if (program := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """A script that raised in the page, or a browser that does not answer."""


class Browser:
    """One tab of a headless browser, as a context manager.

    `errors` has what pages wrote to the console as errors or warnings, and uncaught exceptions. `requests` has every
    address that was asked for.
    """

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._profile, self._size, self._dark = profile, (width, height), dark
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._buffer = bytearray()
        self._number = 0
        self._loaded = False

    def __enter__(self) -> Self:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (theirs_in, theirs_out)]
        for end in (theirs_in, theirs_out):
            os.close(end)
        words = [str(chromium()), *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        log = (self._profile.parent / f"{self._profile.name}.log").open("wb")
        with log:
            self._process = subprocess.Popen(
                words, close_fds=False, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                preexec_fn=lambda: [os.dup2(end, pipe) for end, pipe in zip(high, PIPES, strict=True)],
            )  # fmt: skip
        for end in high:
            os.close(end)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        width, height = self._size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)

    @property
    def process(self) -> int:
        """Returns the number of the browser's first process."""
        return self._process.pid

    def open(self, page: Path | str, *, timeout_s: float = 60) -> float:
        """Opens a file or an address, and returns the seconds until its scripts have run and it is drawn."""
        start = time.perf_counter()
        with self.loading(timeout_s):
            url = page if isinstance(page, str) else page.resolve().as_uri()
            self.call("Page.navigate", url=url, timeout_s=timeout_s)
        self.run("await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.perf_counter() - start

    @contextlib.contextmanager
    def loading(self, timeout_s: float = 60) -> Iterator[None]:
        """Waits at the end of its block until a page is loaded, which something in the block asked for."""
        self._loaded = False
        yield
        while not self._loaded:
            self._take(timeout_s)

    def run(self, script: str, *, timeout_s: float = 60) -> Any:
        """Runs the body of an async function in the page, which may call `until`, and returns what it returns. Raises
        BrowserError."""
        answer = self.call(
            "Runtime.evaluate", expression=f"(async () => {{ {UNTIL} {script} }})()", awaitPromise=True,
            returnByValue=True, timeout_s=timeout_s,
        )  # fmt: skip
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def shoot(self, path: Path, *, full_page: bool = False) -> Path:
        """Writes a picture of what is to be seen, or of the whole page, and returns its path."""
        screenshot = self.call("Page.captureScreenshot", captureBeyondViewport=full_page)
        path.write_bytes(base64.b64decode(screenshot["data"]))
        return path

    def call(self, method: str, *, timeout_s: float = 60, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        number = self._number
        while (answer := self._take(timeout_s)).get("id") != number:
            pass
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def _take(self, timeout_s: float) -> dict[str, Any]:
        """Returns the next message, and notes what it tells."""
        end = time.monotonic() + timeout_s
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"the browser said nothing for {timeout_s} s")
            chunk = os.read(self._from, 1 << 20)
            if not chunk:
                raise BrowserError("the browser has ended")
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\0")
        self._buffer = bytearray(rest)
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in TELLING and params.get("type") not in ("log", "info", "debug"):
            self.errors.append(json.dumps(params)[:2000])
        return message
