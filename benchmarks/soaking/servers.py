"""A server of rollouts without a model that misbehaves at random, as a program: vLLM's routes, real refits, wrong
answers.

The misbehaviour is at its socket, after the answer is known. KINDS says what may happen to an answer; each is written
to a file of the directory that SOAK_FAULTS names, as one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]
from fake_vllm import GENERATE, JOIN, PAUSE, UPDATE, Handler  # noqa: E402
from refitted_servers import RefittedVllm  # noqa: E402

from megatron_rl.engines.auth_middleware import TOKEN_FILE  # noqa: E402
from megatron_rl.lib.frames import pack_parts, unpack_parts  # noqa: E402

FAULTS, SHARE = "SOAK_FAULTS", "SOAK_SHARE"  # the directory; the share of answers that something happens to
LIES = ("nan", "positive", "vocabulary", "few", "long")
BROKEN = ("drop", "half", "garbage", "error", "busy", "huge")
DRIP, DRIP_S, DRIP_END_S = "drip", 0.25, 60.0
KINDS = (*LIES, *BROKEN, DRIP)
WEIGHTS = [4.0] * len(LIES) + [4.0] * len(BROKEN) + [1.0]  # a drip costs the run a whole time-out
CONTROL_SHARE = 0.05  # of SHARE, for the routes of a refit: a server that fails there is out for a while
HUGE = 1 << 42  # bytes


class Server(RefittedVllm):
    """Remembers nothing of what it was asked, so that its memory can be watched."""

    def __init__(self, token: str, *, host: str, port: int, vocab: int, share: float, diary: Path) -> None:
        self._rng, self._share, self._diary = random.Random(f"{host}:{port}:{os.getpid()}"), share, diary
        super().__init__(token, host=host, port=port, vocab=vocab)

    def handler(self) -> type[Handler]:
        return Hostile

    def misbehave(self, path: str) -> str | None:
        """Draws what happens to an answer, and writes it down; None where nothing does."""
        with self._change:
            del self.prompts[:], self.seen[:], self.scored[:]
            share = self._share * {GENERATE: 1.0, JOIN: CONTROL_SHARE, PAUSE: CONTROL_SHARE, UPDATE: CONTROL_SHARE}.get(
                path, 0.0
            )
            if self._rng.random() >= share:
                return None
            kind = self._rng.choices(KINDS, WEIGHTS)[0] if path == GENERATE else self._rng.choice(("drop", "error"))
            with self._diary.open("a") as file:
                file.write(json.dumps({"kind": kind, "path": path}) + "\n")
            return kind


class Hostile(Handler):
    """Answers of a server, some of which are lost, broken, endless or wrong."""

    fake: Server

    def _send(self, status: int, content: bytes) -> None:
        kind = self.fake.misbehave(urlsplit(self.path).path) if status == 200 else None
        if kind is None:
            return super()._send(status, content)
        if kind in LIES:
            return super()._send(status, lie(kind, content, self.fake.vocab))
        if kind == "garbage":
            return super()._send(status, os.urandom(len(content) + 5))
        if kind in ("error", "busy"):
            return super()._send({"error": 500, "busy": 503}[kind], b"Internal\nServer Error")
        self.close_connection = True
        with contextlib.suppress(OSError):  # whoever asked may have gone
            self._break(kind, status, content)
        return None

    def _break(self, kind: str, status: int, content: bytes) -> None:
        if kind == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(HUGE if kind == "huge" else len(content)))
        self.end_headers()
        if kind != DRIP:
            self.wfile.write(content[: len(content) // 2])
            return
        end = time.monotonic() + DRIP_END_S
        for i in range(len(content) - 1):
            if time.monotonic() > end:
                break
            self.wfile.write(content[i : i + 1])
            time.sleep(DRIP_S)


def lie(kind: str, frame: bytes, vocab: int) -> bytes:
    """Returns a well-formed answer to a request for completions that cannot be true."""
    parts = unpack_parts(frame)
    arrays = parts[0][1]
    if kind == "few":
        parts = parts[1:]
    elif kind == "long":
        arrays["tokens"] = np.append(arrays["tokens"], np.int32(1))
    elif kind == "vocabulary" or "logprobs" not in arrays:
        arrays["tokens"][-1:] = vocab + 7
    else:
        arrays["logprobs"][:1] = np.nan if kind == "nan" else 0.5
    return bytes(pack_parts(parts))


def main() -> None:
    """Options as vLLM's; what else is on the command line does not matter."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_known_args()[0]
    token = Path(os.environ[TOKEN_FILE]).read_text().strip()
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    diary = Path(os.environ[FAULTS]) / f"{os.getpid()}.jsonl"
    Server(
        token, host=options.host, port=options.port, vocab=vocab, share=float(os.environ[SHARE]), diary=diary
    )  # it listens from here on
    signal.pause()


if __name__ == "__main__":
    main()
