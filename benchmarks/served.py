"""A pool over one real vLLM server against vLLM's own offline rate: the same requests, both sides in turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import common

from megatron_rl.cluster.host_address import free_port
from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.kind import ModelFacts, ServerStart
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.engines.server_log import end_of
from megatron_rl.engines.server_process import ServerProcess, make_token
from megatron_rl.engines.server_registry import Announcement, Listing, ServerRegistry
from megatron_rl.engines.vllm.client import VllmServer
from megatron_rl.engines.vllm.kind import command
from megatron_rl.engines.vllm.settings import Vllm

OFFLINE = Path(__file__).parent / "vllm_offline.py"
ROLE = "model"
START_S = 600.0
MAX_BATCH = 256  # sequences under way, on both sides
SEED_MASK = (1 << 62) - 1  # as the pool cuts its seeds


@contextlib.contextmanager
def open_pool(
    directory: Path, model: Path, settings: Vllm, eos: int, *, boundaries: Callable[[Any], frozenset[int]] | None = None
) -> Iterator[tuple[Pool, int]]:
    """A pool whose servers (engine.replicas of them) are ready, and the process of the last one. With `boundaries`, of
    its tandem's strategies, the model is its own junior.
    """
    token_file = directory / "token"
    token = make_token(token_file)
    assert settings.python is not None
    tandem: dict[str, Any] = {} if boundaries is None else {"junior": model, "tokenizer": model}
    facts = ModelFacts(ends=frozenset({eos}), boundaries=boundaries)

    def connect(listing: Listing) -> VllmServer:
        return VllmServer(listing.url, token, settings, 60.0, facts)

    registry = ServerRegistry(directory / "engines")
    with contextlib.ExitStack() as stack:
        process = None
        for replica in range(settings.replicas):
            port = free_port(settings.host)
            start = ServerStart(
                python=settings.python, model=model, dtype="float32", port=port, token_file=token_file, on_gpu=False,
                **tandem,
            )  # fmt: skip
            log = directory / f"server_{replica}.log"
            process = ServerProcess(command(settings, start), log, os.environ, imports=directory / f"imports_{replica}")
            stack.callback(process.stop)
            url = f"http://{settings.host}:{port}"
            listing = Listing(role=ROLE, replica=replica, url=url, incarnation=f"start {replica}", log=str(log))
            process.wait_until(connect(listing).ready, START_S)
            stack.enter_context(Announcement(registry, listing, alive=lambda process=process: process.ended() is None))
        assert process is not None
        pool = Pool(ROLE, settings, registry, connect, fixed=True)
        yield pool, process.pid
        pool.close()


class Offline:
    """vLLM's `LLM` in an interpreter of its own."""

    def __init__(self, model: Path, settings: Vllm, log: Path) -> None:
        assert settings.python is not None
        start = ServerStart(python=settings.python, model=model, dtype="float32", port=0, token_file=log, on_gpu=False)
        arguments = {
            "model": str(model), "dtype": "float32", "enforce_eager": True, "max_num_seqs": settings.max_batch,
            "enable_chunked_prefill": False,
            "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
        }  # fmt: skip
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [settings.python, str(OFFLINE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **command(settings, start).environment}, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self._ask(arguments)

    def round(self, prompts: list[list[int]], sampling: Sampling, eos: int) -> dict[str, float]:
        settings = {
            "n": sampling.n, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "logprobs": 0,
            "detokenize": False, "stop_token_ids": [eos],
        }  # fmt: skip
        seeds = [sampling_seeds.stream_key(sampling.seed, i, 0) & SEED_MASK for i in range(len(prompts))]
        return self._ask({"prompts": prompts, "sampling": settings, "seeds": seeds})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        self._process.wait()
        self._log.close()

    def _ask(self, what: Any) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"vLLM ended with status {self._process.wait()}; {end_of(Path(self._log.name))}")
        return json.loads(answer)


def compare(
    directory: Path, model: Path, prompts: list[list[int]], sampling: Sampling, *, python: str, rounds: int, eos: int
) -> dict[str, float]:  # fmt: skip
    """Tokens per second and per CPU-second of both, the medians of the rounds' ratios, and which share of the pool's
    CPU-seconds is spent in this process. `directory`: for logs.
    """
    settings = Vllm(python=python, max_batch=MAX_BATCH, wait_s=60.0)
    offline = Offline(model, settings, directory / "offline.log")
    rows: list[dict[str, float]] = []
    with contextlib.closing(offline), open_pool(directory, model, settings, eos) as (pool, server):
        for number in range(rounds + 1):
            drawn = replace(sampling, seed=number)
            client_cpu, server_cpu, start = time.process_time(), common.cpu_seconds([server]), time.perf_counter()
            groups = complete(pool, prompts, drawn)
            seconds, client_cpu = time.perf_counter() - start, time.process_time() - client_cpu
            spent = common.cpu_seconds([server]) - server_cpu + client_cpu
            tokens = sum(len(completion.tokens) for group in groups for completion in group)
            row = {
                "pool_tokens_per_s": tokens / seconds,
                "pool_tokens_per_cpu_s": tokens / spent,
                "pool_client_share": client_cpu / spent,
            }
            server_cpu = common.cpu_seconds([offline.pid])
            answer = offline.round(prompts, drawn, eos)
            spent = common.cpu_seconds([offline.pid]) - server_cpu
            row |= {
                "offline_tokens_per_s": answer["tokens"] / answer["seconds"],
                "offline_tokens_per_cpu_s": answer["tokens"] / spent,
            }
            if number:  # the first warms up
                rows.append(row)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for name, per in (("ratio", "tokens_per_s"), ("ratio_cpu", "tokens_per_cpu_s")):
        medians[name] = statistics.median(row[f"pool_{per}"] / row[f"offline_{per}"] for row in rows)
    return medians
