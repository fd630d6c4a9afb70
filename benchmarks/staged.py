"""Refits of real vLLM servers that generate meanwhile (refit.staging): how long they pause, that staging changes no
token, and that nothing is lost with a server that is killed between staging and the pause. Part of refit.py.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import served
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_rl.cluster.host_address import free_port
from megatron_rl.config.schema import RefitConfig
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.weights import hf_model, rank_layouts
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout

BARS = {"staged/unchanged_tokens": 1.0, "staged/answered_after_kill": 1.0}
LIMITS = {"staged/pause_of_transfer": 0.1}
REPLICAS, VOCAB = 2, 8192
SAMPLING = Sampling(max_tokens=24, n=1)


@dataclass
class Stream:
    """Asks a pool for completions of some prompts, one after the other, in a thread, until it is left."""

    pool: Pool
    prompts: list[list[int]]
    found: list[tuple[int, Completion]] = field(default_factory=list)  # (index of the prompt, completion)
    asked: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def answered(self) -> int:
        return len(self.found)

    def __enter__(self) -> Stream:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            i = self.asked % len(self.prompts)
            self.asked += 1
            self.found.append((i, answer(self.pool, i, self.prompts[i])))


def answer(pool: Pool, i: int, prompt: list[int]) -> Completion:
    """Returns a completion of prompt i. Its random numbers depend on i alone."""
    session = pool.session()
    session.ask(i, prompt, SAMPLING)
    ((_, [completion]),) = session.answers()
    return completion


class Trainer:
    """A trainer of one rank with random weights, and the refits of a pool's servers."""

    def __init__(self, sizes: Any, staging: Literal["off", "host"], bytes_per_s: float = math.inf) -> None:
        self.topology = Topology(
            sizes=sizes, trainer=TrainerLayout(), engines=EngineLayout(replicas=REPLICAS), dtype="float32"
        )
        shapes: dict[str, torch.Size] = {}
        for holding in rank_layouts.trainer(sizes, self.topology.trainer):
            for name, rect in holding.parameters:
                rows, columns = shapes.get(name, torch.Size([0, 0]))
                shapes[name] = torch.Size(
                    [max(rows, rect.at_row + rect.rows), max(columns, rect.at_column + rect.columns)]
                )
        self.weights: dict[str, Tensor] = {name: torch.empty(shape) for name, shape in shapes.items()}
        added = lambda name, part: time.sleep(part.elements * 4 / bytes_per_s)  # noqa: E731  reads at this rate
        self.side = TrainerSide(
            self.topology, RefitConfig(staging=staging), self.weights, group=dist.group.WORLD,
            added=None if bytes_per_s == math.inf else added,
        )  # fmt: skip
        self.staged = staging != "off"

    def draw(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for tensor in self.weights.values():
            tensor.normal_(0.0, 0.05, generator=generator)

    def refit(self, pool: Pool, version: int, before_swap: Any = lambda: None) -> dict[str, float]:
        """Gives the servers the weights of `version`, as PoolRefit does. Returns the metrics."""
        replicas = pool.begin_refit(version, self.side.address, wait_s=60.0, staged=self.staged)
        metrics = self.side(version, replicas)
        if self.staged:
            before_swap()
            pool.swap(version)
        pool.end_refit()
        return metrics | {"refit/pause_seconds": pool.pause_s}


def measure(directory: Path, python: str, *, rounds: int, bytes_per_s: float) -> dict[str, float]:
    """Returns the metrics. `directory`: for the model and logs. `python`: interpreter of vLLM's environment.
    `bytes_per_s`: rate at which the trainer reads its weights in staged refits.
    """
    config = Qwen2Config(
        hidden_size=768, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=4, intermediate_size=3072,
        vocab_size=VOCAB, tie_word_embeddings=False, max_position_embeddings=512, eos_token_id=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port('127.0.0.1')}", rank=0, world_size=1)
    sizes = hf_model.read_architecture(directory / "model")
    prompts = np.random.default_rng(0).integers(2, VOCAB, (4, 12)).tolist()
    settings = Vllm(python=python, replicas=REPLICAS, max_batch=8, wait_s=300.0)
    with served.open_pool(directory, directory / "model", settings, 1) as (pool, victim):
        trainer = Trainer(sizes, "off")
        expected, in_place = [], []
        for version in (1, 2):  # weights 1 and 2, in servers that have never staged anything
            trainer.draw(version)
            in_place.append(trainer.refit(pool, version))
            expected.append([answer(pool, i, prompt) for i, prompt in enumerate(prompts)])
        trainer.side.close()
        metrics = {"in_place_pause_s": in_place[-1]["refit/pause_seconds"]}
        trainer = Trainer(sizes, "host")
        at_full_speed = staged_rounds(pool, trainer, expected, prompts, 1)
        metrics |= {f"full_speed/{name}": at_full_speed[name] for name in ("transfer_s", "pause_s")}
        trainer.side.close()
        trainer = Trainer(sizes, "host", bytes_per_s)
        metrics |= staged_rounds(pool, trainer, expected, prompts, rounds)
        metrics |= killed(pool, trainer, expected, prompts, victim)
        trainer.side.close()
    return {f"staged/{name}": value for name, value in metrics.items()}


def staged_rounds(
    pool: Pool, trainer: Trainer, expected: list[list[Completion]], prompts: list[list[int]], rounds: int
) -> dict[str, float]:
    """Gives the servers weights 1 and 2 in turn while they generate. `expected`: the completions of either weights."""
    refits: list[dict[str, float]] = []
    same = total = 0
    for version in range(pool.version + 1, pool.version + 2 + rounds):
        trainer.draw(2 - version % 2)
        with Stream(pool, prompts) as stream:
            wait(lambda seen=stream.found: len(seen) > 1)
            refits.append(trainer.refit(pool, version))
            wait(lambda seen=stream.found, v=version: seen[-1][1].versions == [(0, v)])
        for i, completion in stream.found:
            a, b = tokens_as_expected(completion, i, expected)
            same, total = same + a, total + b
    refits = refits[1:]  # the first one measures the links and allocates
    transfer, pause = (
        statistics.median(refit[f"refit/{name}"] for refit in refits) for name in ("seconds", "pause_seconds")
    )
    return {
        "gigabytes": refits[0]["refit/gigabytes"], "transfer_s": transfer, "pause_s": pause,
        "pause_of_transfer": pause / transfer, "unchanged_tokens": same / total, "tokens": float(total),
    }  # fmt: skip


def tokens_as_expected(completion: Completion, i: int, expected: list[list[Completion]]) -> tuple[int, int]:
    """Returns (number of tokens that one weight version alone wrote the text up to, and that equal those which this
    version wrote before any staging, bit for bit with their log-probs; number of all such tokens).
    """
    (_, version), *later = completion.versions
    length, wanted_completion = later[0][0] if later else len(completion.tokens), expected[1 - version % 2][i]
    equal = (completion.tokens[:length] == wanted_completion.tokens[:length]) & (
        completion.logprobs[:length] == wanted_completion.logprobs[:length]
    )
    return int(equal.sum()), length


def killed(
    pool: Pool, trainer: Trainer, expected: list[list[Completion]], prompts: list[list[int]], victim: int
) -> dict[str, float]:
    """Kills a server between staging and swap while both servers generate."""
    version = pool.version + 1
    trainer.draw(2 - version % 2)
    with Stream(pool, prompts) as first, Stream(pool, prompts) as second:
        wait(lambda: all(len(stream.found) > 1 for stream in (first, second)))
        trainer.refit(pool, version, lambda: os.killpg(victim, signal.SIGKILL))
        wait(lambda: all(stream.found[-1][1].versions == [(0, version)] for stream in (first, second)))
    counts = [tokens_as_expected(c, i, expected) for stream in (first, second) for i, c in stream.found]
    prompts_asked, answered = (sum(getattr(s, name) for s in (first, second)) for name in ("asked", "answered"))
    assert all(same for same, _ in counts[-2:]), "the server that is left has other weights"
    return {"answered_after_kill": answered / prompts_asked, "servers_after_kill": float(len(pool.members.serving()))}


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("an answer did not come in 120 s")
        time.sleep(0.005)
