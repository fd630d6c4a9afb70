"""Starts the server without a model of a checkout's own tests, prints its URL, and serves until its input ends."""

from __future__ import annotations

import sys
from pathlib import Path

from refitted_servers import RefittedVllm

server = RefittedVllm(Path(sys.argv[1]).read_text(), vocab=int(sys.argv[2]))
print(server.url, flush=True)
sys.stdin.read()
server.close()
