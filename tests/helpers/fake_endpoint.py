"""An OpenAI-compatible endpoint without a model, which goes wrong as it is told to and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeEndpoint:
    """Writes the tokens 10, 11, ... for every prompt, or the text "abc". Listens from its making to `close`.

    `ids`: it gives token ids. `scores`: it echoes prompts with log-probs. `faults`: (status, headers, body) of the next
    answers. `hidden`: it answers 503 when it is asked for its models, `looked` times so far.
    """

    def __init__(
        self, *, key: str = "sk-secret", ids: bool = True, scores: bool = True, context: int | None = None
    ) -> None:
        self.key, self.ids, self.scores, self.context = key, ids, scores, context
        self.asked: list[dict[str, Any]] = []
        self.hidden, self.looked = False, 0
        self.faults: list[tuple[int, dict[str, str], str]] = []
        self.end: dict[str, Any] = {"finish_reason": "length", "stop_reason": None}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def models(self) -> Any:
        return {"data": [{"id": "other", "max_model_len": 1}, {"id": "judge", "max_model_len": self.context}]}

    def completions(self, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        if body.get("echo"):
            logprobs = [{"token_logprobs": [None, *(-0.5 * t for t in prompt[1:])]} for prompt in body["prompt"]]
            for scores, prompt in zip(logprobs, body["prompt"], strict=True):
                scores["top_logprobs"] = [None, *(self.likeliest(t, body["logprobs"]) for t in prompt[1:])]
            return {
                "choices": [
                    {"index": i, "text": "", "finish_reason": "length", "logprobs": scores if self.scores else None}
                    for i, scores in enumerate(logprobs)
                ]
            }
        tokens = list(range(10, 10 + body["max_tokens"]))
        choices = []
        for index in reversed(range(body["n"])):
            choice = {"index": index, "text": "abc", **self.end}
            if self.ids:
                choice["token_ids"] = tokens
            if "logprobs" in body:
                choice["logprobs"] = {"token_logprobs": [-0.5] * len(tokens)}
            choices.append(choice)
        return {"choices": choices}

    def likeliest(self, token: int, k: int) -> dict[str, float]:
        """The tokens below this one, less than k of them near 0, and this one first, as vLLM tells them."""
        names = [token, *range(token - 1, max(-1, token - 1 - k), -1)]
        return {f"token_id:{t}" if self.ids else chr(97 + t): -0.5 * t for t in names}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeEndpoint
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.fake.looked += 1
        self._send(503 if self.fake.hidden else 200, {}, json.dumps(self.fake.models()))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {self.fake.key}":
            return self._send(401, {}, "{}")
        if self.fake.faults:
            return self._send(*self.fake.faults.pop(0))
        return self._send(200, {}, json.dumps(self.fake.completions(body)))

    def _send(self, status: int, headers: dict[str, str], text: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None: ...
