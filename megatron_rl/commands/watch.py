"""`megatron-rl watch`: serves the report of a run to a browser on this machine, and keeps the report up to date."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import socket
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_rl.config.base import ConfigError
from megatron_rl.report.html_page import WATCH
from megatron_rl.report.pages import SCRIPTS, write_report
from megatron_rl.report.shown_rollouts import MAX_ROLLOUTS
from megatron_rl.run.metrics import FILE_NAME

HOST = "127.0.0.1"
MOST_STRANGERS = 64  # number of open connections that have not shown the token; each has a thread
SILENT_S = 10.0  # seconds after which a connection that sends or receives nothing is closed
# Patterns of the files that change while a run, or a sweep of runs, goes on
CHANGING = tuple(f"{place}{name}" for place in ("", "*/") for name in (FILE_NAME, "summary.json", "evaluations"))


def run(args: argparse.Namespace) -> int:
    """Serves the report until Ctrl-C. Returns 0. Raises ConfigError if there is no such run."""
    from megatron_rl.commands.report import refuse_paths

    refuse_paths([args.run])
    with tempfile.TemporaryDirectory() as directory, open_server(args.run, Path(directory), args.port) as server:
        print(f"the report of {args.run}, until Ctrl-C: {server.address}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


class ReportServer(ThreadingHTTPServer):
    """An HTTP server for one report on the loopback interface.

    `address`: the URL of the report. The URL contains a random token, so that other users of the machine cannot read
    the report, although they can reach the port. At most MOST_STRANGERS connections may be open that have not shown the
    token: the oldest one is closed when another one comes.
    """

    address: str
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._strangers: dict[socket.socket, None] = {}  # open connections without the token, the oldest first
        self._change = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a connection in a thread of its own, and closes the oldest stranger if there are too many."""
        with self._change:
            self._strangers[request] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > MOST_STRANGERS else None
            if oldest is not None:
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then reads the end of the connection, and closes it
        super().process_request(request, client_address)

    def trust(self, request: Any) -> None:
        """Notes that a connection has shown the token, or is closed. It does not count as a stranger any more."""
        with self._change:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection, and no longer counts it among the connections without the token."""
        self.trust(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores the error of a browser that closed the connection too early. Prints the traceback of other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def open_server(watched: Path, directory: Path, port: int) -> ReportServer:
    """Opens an HTTP server for the report of the run or sweep `watched`. The report is written to `directory`. When the
    page is requested and the run has changed, the report is written again. `port`: port number; 0 selects a free port.
    Raises ConfigError if the port cannot be used."""
    token, lock, page = secrets.token_urlsafe(), threading.Lock(), directory / "report.html"
    written = ""  # version of the run that the page shows

    def version() -> str:
        files = (file.stat() for pattern in CHANGING for file in sorted(watched.glob(pattern)))
        return ".".join(f"{stat.st_mtime_ns}-{stat.st_size}" for stat in files)

    def report() -> bytes:
        nonlocal written
        with lock:
            if (now := version()) != written or not page.exists():
                write_report(watched, page, rollouts=MAX_ROLLOUTS, scripts=(*SCRIPTS, WATCH))
                written = now
            return page.read_bytes().replace(b"<head>", f'<head><meta name="version" content="{written}">'.encode(), 1)

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_S

        def do_GET(self) -> None:
            if self.path.startswith(f"/{token}/"):
                server.trust(self.connection)
            answers = {f"/{token}/": report, f"/{token}/version": lambda: version().encode()}
            status, kind = 200, "html" if self.path == f"/{token}/" else "plain"
            try:
                body = answers[self.path]()
            except KeyError:
                status, body = 404, b"not found"
            except (OSError, ConfigError) as error:  # the run's directory is gone
                status, kind, body = 500, "plain", str(error).encode()
            self.send_response(status)
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Does nothing, so that requests are not logged."""

    try:
        server = ReportServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port}: {error}; leave it out for a free port") from error
    server.address = f"http://{HOST}:{server.server_port}/{token}/"
    return server
