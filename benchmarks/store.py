"""Writes and reads an iteration of the store: seconds, bytes per token, and memory, without texts. Also writes the
samples of an iteration ahead, one after the other, and reads them as a resumed run does.

    python benchmarks/store.py [--rollouts 1024] [--tokens 8192] [--directory /tmp] [--check]

GRPO has one advantage per rollout; Tango one per token, and marked, judged steps. `ahead/share` is the share of a
rollout's time that the write-ahead file costs where engines write 100,000 tokens a second, in CPU-seconds of all
threads; `ahead/wall_share` is the same in seconds, with all that the machine does beside it. The other times are for a
million tokens: CPU-seconds of all threads (`write_s`, `read_s`) and seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import pyarrow as pa

from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore
from megatron_rl.training.write_ahead import LogFile
from megatron_rl.types import STEP, Annotations, Author, Rollout, Stop, spans_of

PROMPT, STEP_TOKENS, GROUP = 256, 256, 16
TOKENS_PER_S, MOST_SHARE = 1e5, 0.01  # of the engines of a large run; share of their time that writing ahead may cost
ITERATION = Iteration(cycle=0, index=0, roles=("generator",), number=0)


def rollouts(count: int, length: int, *, steps: bool) -> list[Rollout]:
    """Token ids as in text (few of them often), log-probs of which four in ten are nearly 0."""
    draw = np.random.default_rng(0)
    spans = spans_of((PROMPT, Author.ENVIRONMENT, -1), (length - PROMPT, Author.POLICY, 3))
    ends = np.arange(PROMPT + STEP_TOKENS, length + 1, STEP_TOKENS)
    samples = []
    for place in range(count):
        annotations = {STEP: Annotations(np.stack([ends - STEP_TOKENS, ends], axis=1), draw.normal(size=len(ends)))}
        per_token = draw.normal(size=length // STEP_TOKENS + 1).astype(np.float32).repeat(STEP_TOKENS)[:length]
        samples.append(
            Rollout(
                role="generator",
                group=f"{place // GROUP}:problem",
                tokens=draw.zipf(1.3, length).clip(0, 150_000),
                logprobs=np.where(draw.random(length) < 0.6, -draw.exponential(0.3, length), 0.0),
                spans=spans,
                payload={"question": "How many? " * 20, "answer": str(place // GROUP)},
                rewards={"outcome": float(place % 2)},
                annotations=annotations if steps else {},
                advantages=per_token if steps else float(draw.normal()),
            )
        )
    return samples


def measured(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns the result, CPU-seconds of all threads and wall-clock seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    return call(), time.process_time() - cpu, time.perf_counter() - wall


def written_ahead(path: Path, samples: list[Completion], prompts: list[np.ndarray], *, stored: bool) -> float:
    """Asks for samples as a session does, GROUP for each prompt. Those that the file has not are added one by one.
    Returns the greatest number of seconds for which one of them waited."""
    file, sampling, longest = LogFile(path, "same"), Sampling(max_tokens=1, n=GROUP, seed=1), 0.0
    log = file.samples("generator")
    for key, prompt in enumerate(prompts):
        address, completions = log.known(key, prompt, sampling)
        assert len(completions) == (GROUP if stored else 0)
        for j in range(GROUP):
            start = time.perf_counter()
            if stored:
                assert completions[j].logprobs.tobytes() == samples[key * GROUP + j].logprobs.tobytes()
            else:
                log.add([(address, j, samples[key * GROUP + j])])
            longest = max(longest, time.perf_counter() - start)
    file.close()
    return longest


def measured_ahead(directory: Path, recorded: list[Rollout]) -> dict[str, float]:
    """Returns the figures of the write-ahead file for the samples of an iteration."""
    recorded = recorded[: len(recorded) // GROUP * GROUP]
    samples = [
        Completion(tokens=r.tokens[PROMPT:], logprobs=r.logprobs[PROMPT:], stop=Stop.EOS, versions=[(0, 3)])
        for r in recorded
    ]
    prompts = [r.tokens[:PROMPT] for r in recorded[::GROUP]]
    millions, path = sum(len(sample.tokens) for sample in samples) / 1e6, directory / "iteration_000000.ahead"
    longest, write_cpu, write_wall = measured(lambda: written_ahead(path, samples, prompts, stored=False))
    size = path.stat().st_size
    _, read_cpu, _ = measured(lambda: written_ahead(path, samples, prompts, stored=True))
    return {
        "ahead/share": write_cpu / (millions * 1e6 / TOKENS_PER_S),
        "ahead/wall_share": write_wall / (millions * 1e6 / TOKENS_PER_S),
        "ahead/write_s": write_cpu / millions,
        "ahead/longest_wait_s": longest,
        "ahead/read_s": read_cpu / millions,
        "ahead/bytes": size / millions / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    common.add_arguments(parser)
    options = parser.parse_args()
    millions = options.rollouts * options.tokens / 1e6
    metrics: dict[str, float] = {}
    for name, steps in (("grpo", False), ("tango", True)):
        collected = Collected(
            rollouts={"generator": rollouts(options.rollouts, options.tokens, steps=steps)}, metrics={}
        )
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            store = IterationStore(Path(directory), keep_every=0)
            store.put(ITERATION, collected, {})  # loads libraries
            path, write_cpu, write_wall = measured(
                lambda store=store, collected=collected: store.put(ITERATION, collected, {})
            )
            collected_again, read_cpu, read_wall = measured(lambda store=store: store.get(ITERATION))
            size = os.stat(path).st_size
            stored, loaded = collected.rollouts["generator"], collected_again[0].rollouts["generator"]
            assert all(a.tokens.tobytes() == b.tokens.tobytes() for a, b in zip(loaded, stored, strict=True))
            if not steps:
                metrics |= measured_ahead(Path(directory), stored)
        metrics |= {
            f"{name}/write_s": write_cpu / millions,
            f"{name}/write_wall_s": write_wall / millions,
            f"{name}/read_s": read_cpu / millions,
            f"{name}/read_wall_s": read_wall / millions,
            f"{name}/bytes": size / millions / 1e6,
            f"{name}/arrow_mib": pa.default_memory_pool().max_memory() / 2**20,
        }
    common.finish(metrics, {}, options, limits={"ahead/share": MOST_SHARE})


if __name__ == "__main__":
    main()
