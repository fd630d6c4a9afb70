"""`megatron-rl watch`: serves the report of a run to a browser on this machine, and keeps the report up to date."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_rl.report.html_page import WATCH
from megatron_rl.report.pages import SCRIPTS, write_report
from megatron_rl.report.shown_rollouts import MAX_ROLLOUTS
from megatron_rl.run.metrics import FILE_NAME

HOST = "127.0.0.1"
CHANGING = (FILE_NAME, f"*/{FILE_NAME}", "summary.json", "evaluations")  # what changes while a run or a sweep goes on


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
    """A server of one report on the loopback interface.

    `address`: the report's address, which has a random part, because other users of the machine can reach the port.
    """

    address: str


def open_server(watched: Path, directory: Path, port: int) -> ReportServer:
    """Opens a server of the report of the run or sweep `watched`. The report is written to `directory`, again whenever
    it is asked for and the run has gone on. `port`: 0 for a free one. Raises OSError if the port is taken."""
    token, lock, page = secrets.token_urlsafe(), threading.Lock(), directory / "report.html"
    written = ""  # version of the run that the page shows

    def version() -> str:
        files = (file.stat() for pattern in CHANGING for file in sorted(watched.glob(pattern)))
        return ".".join(f"{one.st_mtime_ns}-{one.st_size}" for one in files)

    def report() -> bytes:
        nonlocal written
        with lock:
            if (now := version()) != written or not page.exists():
                write_report(watched, page, rollouts=MAX_ROLLOUTS, scripts=(*SCRIPTS, WATCH))
                written = now
            return page.read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {f"/{token}/": report, f"/{token}/version": lambda: version().encode()}
            answer = answers.get(self.path)
            body = b"not found" if answer is None else answer()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", f"text/{'html' if answer is report else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs no requests."""

    server = ReportServer((HOST, port), Handler)
    server.address = f"http://{HOST}:{server.server_port}/{token}/"
    return server
