"""Servers that keep the weights they started with, as one engine: for evaluations, which refit nothing."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.config.schema import Servers
from megatron_rl.engines import sampler
from megatron_rl.engines.base import Completion, EngineError, Row, Sampling
from megatron_rl.engines.server import Server, ServerLost

SEEDS = (1 << 62) - 1


class DirectEngine:
    """Implements engines.base.Engine over servers of one model. Each completion is a request of its own, sent to the least busy server;
    one that a server fails goes to the next, `engine.attempts` times in all."""

    def __init__(self, servers: Sequence[Server], settings: Servers) -> None:
        self.version = 0
        self._servers, self._settings = list(servers), settings
        self._load = dict.fromkeys(range(len(self._servers)), 0)
        self._lock = threading.Lock()
        self._requests = concurrent.futures.ThreadPoolExecutor(len(self._servers) * settings.at_once, "requests")

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """[P] prompts -> [P][n] completions, in order. Raises as `generate_rows` does."""
        flat = self.generate_rows(
            [(prompt, i, j) for i, prompt in enumerate(prompts) for j in range(sampling.n)], sampling
        )
        return [flat[i * sampling.n : (i + 1) * sampling.n] for i in range(len(prompts))]

    def generate_rows(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]:
        """One completion per row, in order. Raises EngineError when a request failed too often, RequestRefused for one that is wrong."""
        return list(self._requests.map(self._one, rows, itertools.repeat(sampling)))

    def close(self) -> None:
        self._requests.shutdown(cancel_futures=True)
        for server in self._servers:
            server.close()

    def _one(self, row: Row, sampling: Sampling) -> Completion:
        prompt, i, j = row
        one = replace(sampling, n=1)
        failures: list[str] = []
        for _ in range(self._settings.attempts):
            number = self._take()
            try:
                seed = sampler.stream_key(sampling.seed, i, j) & SEEDS
                return self._servers[number].generate(
                    prompt, one, seed=seed, timeout_s=self._settings.request_timeout_s
                )[0]
            except ServerLost as error:
                failures.append(str(error))
                with self._lock:
                    self._load[number] += self._settings.at_once  # others first, from here on
            finally:
                with self._lock:
                    self._load[number] -= 1
        raise EngineError(f"a request failed {len(failures)} times: {'; '.join(dict.fromkeys(failures))}")

    def _take(self) -> int:
        with self._lock:
            number = min(self._load, key=lambda n: (self._load[n], n))
            self._load[number] += 1
            return number
