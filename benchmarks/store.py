"""Writes and reads an iteration of the store: seconds, bytes per token, and memory, without texts.

    python benchmarks/store.py [--rollouts 1024] [--tokens 8192] [--directory /tmp]

GRPO has one advantage per rollout; Tango one per token, and marked, judged steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore
from megatron_rl.types import STEP, Annotations, Author, Rollout, spans_of

PROMPT, STEP_TOKENS, GROUP = 256, 256, 16
ITERATION = Iteration(cycle=0, index=0, roles=("generator",), number=0)


def rollouts(count: int, length: int, *, steps: bool) -> list[Rollout]:
    """Token ids as in text (few of them often), log-probs of which four in ten are nearly 0."""
    draw = np.random.default_rng(0)
    spans = spans_of((PROMPT, Author.ENVIRONMENT, -1), (length - PROMPT, Author.POLICY, 3))
    ends = np.arange(PROMPT + STEP_TOKENS, length + 1, STEP_TOKENS)
    out = []
    for place in range(count):
        annotations = {STEP: Annotations(np.stack([ends - STEP_TOKENS, ends], axis=1), draw.normal(size=len(ends)))}
        per_token = draw.normal(size=length // STEP_TOKENS + 1).astype(np.float32).repeat(STEP_TOKENS)[:length]
        out.append(
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
    return out


def measured(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns the result, CPU-seconds of all threads and wall-clock seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    return call(), time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    millions = options.rollouts * options.tokens / 1e6
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
            found, read_cpu, read_wall = measured(lambda store=store: store.get(ITERATION))
            size = os.stat(path).st_size
            before, after = collected.rollouts["generator"], found[0].rollouts["generator"]
            assert all(a.tokens.tobytes() == b.tokens.tobytes() for a, b in zip(after, before, strict=True))
        print(
            f"{name}: {millions:.1f} M tokens, {size / millions / 1e6:.2f} B a token; "
            f"write {write_cpu / millions:.3f} CPU-s a million tokens ({write_wall:.2f} s in all), "
            f"read {read_cpu / millions:.3f} ({read_wall:.2f} s); "
            f"Arrow held {pa.default_memory_pool().max_memory() / 2**20:.0f} MiB at most"
        )


if __name__ == "__main__":
    main()
