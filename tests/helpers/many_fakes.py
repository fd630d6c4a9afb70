"""Many fake servers in one process, which answer nothing before so many requests are under way at once.

As a program: it prints the servers' URLs, then the number of requests under way when all are there; it lets them go
when a line comes, and ends with its standard input.
"""

from __future__ import annotations

import json
import sys
import time

from fake_vllm import FakeVllm
from limits import PROCESS_S


def main(token: str, servers: int, expected: int) -> None:
    fakes = [FakeVllm(token, stall_after=1) for _ in range(servers)]
    print(json.dumps([fake.url for fake in fakes]), flush=True)
    end = time.monotonic() + PROCESS_S
    while (running := sum(fake.running for fake in fakes)) < expected and time.monotonic() < end:
        time.sleep(0.02)
    print(running, flush=True)
    sys.stdin.readline()
    for fake in fakes:
        fake.release()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
