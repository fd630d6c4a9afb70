"""A server that speaks those routes of SGLang 0.5.23 by which memory is given back and taken again, without a model.

It fails where SGLang's scheduler would end (managers/scheduler_components/weight_updater.py): at a release of memory
that is released, or while it has something to do, and at a return of memory that is there.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_rl.engines.auth_middleware import HEADER

MEMORY = {"kv_cache", "weights"}
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class FakeSglang:
    """Listens from its making to `close`. `running`: requests that generate; the next pause ends them, and the last
    batch then leaves after `flushes` refusals of /flush_cache.
    """

    def __init__(self, token: str, *, running: int = 0, flushes: int = 0) -> None:
        self.released: set[str] = set()
        self.paused, self.crashed = False, ""
        self.seen: list[tuple[str, Any]] = []  # path and body of each request, in order
        self._running, self._flushes = running, flushes
        self._faults: dict[str, list[tuple[int, str]]] = defaultdict(list)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, text = fake.answer(self.path, json.loads(body) if body else None)
                self.send_response(401 if self.headers[HEADER] != token else status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, path: str, *statuses: int) -> None:
        """The next requests to `path` are answered with these statuses, and nothing is done."""
        self._faults[path] += [(status, json.dumps({"error": {"message": "no"}})) for status in statuses]

    def bodies(self, path: str) -> list[Any]:
        """Returns the bodies of all requests to a path."""
        return [body for address, body in self.seen if address == path]

    def answer(self, path: str, body: Any) -> tuple[int, str]:
        """Returns the status and the text of an answer. SGLang's is `null` where memory was released or resumed."""
        self.seen.append((path, body))
        if self._faults[path]:
            return self._faults[path].pop(0)
        match path:
            case "/ping":
                pass
            case "/model_info":
                return 200, json.dumps({"weight_version": "default"})
            case "/pause_generation":
                self.paused, self._running = True, 0
            case "/continue_generation":
                self.paused = False
                self._fault_if(bool(self.released), f"goes on without {sorted(self.released)}")
            case "/flush_cache":
                self._flushes -= 1
                return (400, "Flush cache failed.\n") if self._flushes >= 0 else (200, "Cache flushed.\n")
            case "/release_memory_occupation":
                self._fault_if(bool(self._running) or self._flushes > 0, "released while it is not idle")
                self._fault_if(bool(self.released & {*body["tags"]}), "released twice")
                self.released |= {*body["tags"]}
            case "/resume_memory_occupation":
                self._fault_if(not self.released >= {*body["tags"]}, "resumed what is there")
                self.released -= {*body["tags"]}
            case _:
                return 404, "{}"
        return 200, "null"

    def _fault_if(self, wrong: bool, what: str) -> None:
        if wrong:
            self.crashed = self.crashed or what
