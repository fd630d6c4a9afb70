"""A server that speaks the routes of vLLM that its client uses, without a model: tokens are a function of prompt,
seed and place.

In a thread for most tests; as a program, for those that kill or stop it. It starts in a moment: it needs numpy alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from megatron_rl.engines.auth_middleware import HEADER, TOKEN_FILE
from megatron_rl.engines.vllm.routes import PATH as GENERATE
from megatron_rl.engines.vllm.routes import SCORE_PATH as SCORE
from megatron_rl.lib.frames import CONTENT_TYPE, Arrays, pack, pack_parts, unpack

ERROR = "(EngineCore pid=22706) ERROR 11-26 09:54:38 [core.py:1510] "  # how vLLM's logger begins a line
CAUSE = f"""{ERROR}EngineCore failed to start.
{ERROR}Traceback (most recent call last):
{ERROR}  File "/vllm/amx_mla.py", line 303, in process_weights_after_loading
{ERROR}    self._w_uk_packed = torch.ops._C.convert_weight_packed(w_uk_for_bmm)
{ERROR}                        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{ERROR}  File "/site-packages/torch/_ops.py", line 1279, in __call__
{ERROR}    return self._op(*args, **kwargs)
{ERROR}RuntimeError: expect weight to be bfloat16"""
SAID = "(EngineCore pid=22706) RuntimeError: expect weight to be bfloat16"  # of that cause in a message
JOIN, PAUSE, UPDATE = "/init_weight_transfer_engine", "/pause", "/update_weights"


def token_at(prompt: Sequence[int], seed: int, place: int, vocab: int = 97) -> int:
    return 1 + zlib.crc32(repr((list(prompt), seed, place)).encode()) % (vocab - 1)


def logprob_of(token: int) -> float:
    return -token / 128


def top_of(tokens: np.ndarray, k: int) -> np.ndarray:
    """The likeliest tokens at the places of others: the next numbers. [T] -> [T, k] int32"""
    return (tokens[:, None] + np.arange(1, k + 1)).astype(np.int32)


def likeliest(tokens: np.ndarray, k: int, vocab: int = 97, fault: str | None = None) -> Arrays:
    """The k likeliest tokens at the places of a completion. The last of them is removed by the sampling settings."""
    ids = top_of(tokens, k) % vocab
    logprobs = np.float32(-np.log(k)) - ids.astype(np.float32) / 128
    logprobs[:, -1:] = -np.inf
    return {"top_ids": ids[:, 1:] if fault == "top" else ids, "top": logprobs}


def experts_of(tokens: Sequence[int]) -> np.ndarray:
    """[tokens - 1, 1 layer, 1 expert], the token itself."""
    return np.array(tokens[:-1], np.int16)[:, None, None]


class FakeVllm:
    """Listens from its making to `close`. `stall_after`: generation waits behind so many tokens until it is set to
    None. `vocab`: it writes the tokens from 1 up to below that.
    """

    def __init__(
        self, token: str, *, host: str = "127.0.0.1", port: int = 0, stall_after: int | None = None, vocab: int = 97
    ) -> None:
        self.vocab = vocab
        self.token, self.version, self.context, self.stall_after = token, "default", 200, stall_after
        self.passing: list[list[int]] = []  # prompts that do not stall
        self.joined: dict[str, Any] | None = None
        self.experts = False  # whether it tells which it chose
        self.loaded: list[bool] = [True]  # what its ranks answer when they are to load an adapter
        self.seen: list[str] = []  # paths, without /health
        self.prompts: list[tuple[int, ...]] = []  # that it was asked
        self.priorities: list[int] = []  # of these requests
        self.scored: list[int] = []  # sequences of each request
        self.running = self.most_running = 0  # requests that generate
        self.sleeping: set[str] = set()  # what /sleep has given back: weights, kv_cache
        self.dropped = False  # the weights are gone until an update brings others
        self.crashed = ""  # what a real server's GPU would have failed at
        self.cached = "default"  # the oldest version of the weights that the prefix cache has entries of
        self._faults: dict[str, list[str]] = defaultdict(list)
        self._change = threading.Condition()
        self._paused, self._aborts, self._closed, self._pending = False, 0, False, ""
        self._server = ThreadingHTTPServer((host, port), type("Own", (self.handler(),), {"fake": self}))
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def handler(self) -> type[Handler]:
        """Returns the class that answers requests."""
        return Handler

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def fail(self, path: str, *kinds: str) -> None:
        """The next requests to `path` go wrong in these ways: error, hang, garbage, shape, few, nan, refuse, redirect;
        or not: none.
        """
        with self._change:
            self._faults[path] += kinds

    def release(self) -> None:
        with self._change:
            self.stall_after = None
            self._change.notify_all()

    def count(self, path: str) -> int:
        return self.seen.count(path)

    def fault(self, path: str) -> str | None:
        with self._change:
            if path != "/health":
                self.seen.append(path)
            return self._faults[path].pop(0) if self._faults[path] else None

    def hang(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._closed)

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        status: dict[str, Any] = {"status": "ok"}
        with self._change:
            match path:
                case "/v1/models":
                    return {"data": [{"max_model_len": self.context}]}
                case "/weight_info":
                    return {"weight_version": self.version}
                case "/init_weight_transfer_engine":
                    self.joined = body["init_info"]
                case "/pause":
                    self._pause(query["mode"][0])
                case "/sleep":
                    status = self._sleep(int(query.get("level", ["1"])[0]), query.get("mode", ["abort"])[0])
                case "/wake_up":
                    status = self._wake(query.get("tags"))
                case "/is_sleeping":
                    return {"is_sleeping": self._paused or bool(self.sleeping)}
                case "/update_weights":
                    self._touch("weights", "an update of weights that are not there")
                    self._pending = str(body["update_info"]["version"])
                case "/finish_weight_update":
                    assert body["weight_version"] == self._pending
                    self.version, self.dropped = self._pending, False
                case "/reset_prefix_cache":  # vLLM's answer does not say whether it was done
                    if not self.running or query.get("reset_running_requests") == ["true"]:
                        self.cached = self.version
                case "/resume":
                    self._paused = False
                case "/collective_rpc":  # the real route writes all but null, dicts and lists as texts
                    assert body["method"] == "take_adapter"
                    return {"results": [str(answer) for answer in self.loaded]}
            self._change.notify_all()
        return status

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self._aborts += 1
        if mode == "wait":
            self._change.wait_for(lambda: not self.running or self._closed)
        self._paused = True

    def _sleep(self, level: int, mode: str) -> dict[str, Any]:
        """As EngineCore.sleep of vLLM 0.32: the scheduler pauses and its prefix cache is emptied, then the executor
        gives both kinds of memory back, unless its weights are away."""
        assert level in (1, 2)
        self._pause(mode)
        self.cached = self.version
        if "weights" not in self.sleeping:
            self.sleeping, self.dropped = {"weights", "kv_cache"}, self.dropped or level == 2
        return {"status": "sleeping", "level": level}

    def _wake(self, tags: list[str] | None) -> dict[str, Any]:
        """As Executor.wake_up: with a tag that is awake it does nothing. The scheduler goes on when all is back."""
        if tags is None or set(tags) <= self.sleeping:
            self.sleeping -= {*tags} if tags else self.sleeping.copy()
        if not self.sleeping:
            self._paused = False
        return {"status": "sleeping" if self.sleeping else "awake", "tags": tags}

    def _touch(self, tag: str, what: str) -> None:
        if tag in self.sleeping:
            self.crashed = self.crashed or what

    def abort(self) -> None:
        """Ends all requests as /abort_requests does: without a pause."""
        with self._change:
            self._aborts += 1
            self._change.notify_all()

    def generate(self, frame: bytes, fault: str | None) -> bytes:
        params, arrays = unpack(frame)
        prompt = arrays["tokens"].tolist()
        with self._change:
            self.prompts.append(tuple(prompt))
            self.priorities.append(params["priority"])
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            texts, spans, end = self._write(prompt, params)
            self.running -= 1
            self._change.notify_all()
        texts = texts[1:] if fault == "few" else texts
        about = {"finish_reason": end, "stop_reason": None, "weight_versions": spans}
        parts: list[tuple[Any, Arrays]] = []
        for tokens in texts:
            sample = {"tokens": np.array(tokens, np.int32)}
            if params["logprobs"] is not None:
                sample["logprobs"] = np.array([logprob_of(token) for token in tokens], np.float32)
                sample["logprobs"][:1] = np.nan if fault == "nan" and not parts else sample["logprobs"][:1]
                if params["logprobs"] and tokens:  # as vLLM: no entries of a completion without tokens
                    sample |= likeliest(sample["tokens"], params["logprobs"], self.vocab, fault)
            parts.append((about, sample | ({"experts": experts_of(prompt + tokens)} if self.experts else {})))
        return pack_parts(parts)

    def score(self, frame: bytes, fault: str | None) -> bytes:
        fields, arrays = unpack(frame)
        lengths, tokens = fields["lengths"], arrays["tokens"]
        ids = top_of(tokens, fields["top_k"])
        every = np.concatenate([tokens[:, None], ids], axis=1).tolist()
        scores = np.array([[logprob_of(token) for token in row] for row in every], np.float32)
        starts = np.cumsum([0, *lengths[:-1]])
        scores[starts], ids[starts] = 0.0, 0
        if fault == "nan":
            scores[1] = np.nan
        with self._change:
            self.scored.append(len(lengths))
        return pack(None, {"logprobs": scores[1:] if fault == "few" else scores, "ids": ids})

    def _write(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[list[int]], list[tuple[int, str]], str]:
        """Under the lock, which is free while it waits."""
        texts: list[list[int]] = [[] for _ in range(params["n"])]
        spans: list[tuple[int, str]] = []
        epoch = self._aborts
        for place in range(params["max_tokens"]):
            self._change.wait_for(
                lambda place=place: (
                    self._aborts != epoch or self._closed or not (self._paused or self._stalls(prompt, place))
                )
            )
            if self._aborts != epoch or self._closed:
                return texts, spans, "abort"
            self._touch("kv_cache", "a token without a cache")
            if self.dropped:
                self.crashed = self.crashed or "a token by weights that were dropped"
            if not spans or spans[-1][1] != self.version:
                spans.append((place, self.version))
            for j, text in enumerate(texts):
                text.append(token_at(prompt, params["seed"] + j, place, self.vocab))
        return texts, spans, "length"

    def _stalls(self, prompt: list[int], place: int) -> bool:
        return self.stall_after is not None and place >= self.stall_after and prompt not in self.passing


class Handler(BaseHTTPRequestHandler):
    fake: FakeVllm
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _serve(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        if parts.path != "/health" and self.headers.get(HEADER) != self.fake.token:
            return self._send(401, b"{}")
        fault = self.fake.fault(parts.path)
        match fault:
            case "error":
                return self._send(500, b"Internal\nServer Error")
            case "refuse":
                return self._send(400, b'{"error": "no such token id"}')
            case "redirect":
                return self._send(307, b"")
            case "garbage":
                return self._send(200, b'{"choices": \xff\xfe')
            case "shape":
                return self._send(200, b'{"hello": [1]}')
            case "hang":
                self.fake.hang()
                self.close_connection = True
                return None
        if parts.path in (GENERATE, SCORE):
            assert self.headers["Content-Type"] == CONTENT_TYPE
            verb = self.fake.generate if parts.path == GENERATE else self.fake.score
            return self._send(200, verb(body, fault))
        answer = self.fake.answer(parts.path, parse_qs(parts.query), json.loads(body) if body else None)
        return self._send(200, json.dumps(answer).encode())

    def _send(self, status: int, content: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # whoever asked has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None: ...


def main() -> None:
    """Options as vLLM's; what else is on the command line does not matter. FAKE: how it behaves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--stall-after", type=int)
    options = parser.parse_known_args()[0]
    behaviour = os.environ.get("FAKE", "")
    print(f"the fake starts: {' '.join(sys.argv)}", flush=True)
    if behaviour == "dies":
        print(CAUSE, *(f"line {i}" for i in range(40)), sep="\n")
        sys.exit(3)
    if behaviour == "brood" and os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(os.environ["FAKE_CHILD"]).write_text(str(os.getpid()))
        signal.pause()
    if behaviour == "silent":
        signal.pause()
    token = Path(os.environ[TOKEN_FILE]).read_text().strip()
    fake = FakeVllm(token, host=options.host, port=options.port, stall_after=options.stall_after)
    if behaviour == "sick":
        fake.fail("/health", "none", *["error"] * 999)
    signal.pause()


if __name__ == "__main__":
    main()
