"""Tokens per second of tandem decoding over single-model decoding, in one run, of the embedded engine and of a real
vLLM server.

A random model is its own junior (rollout.py makes it: sequences end with a fixed probability at every token), and the
two write by the word strategy, p = 0.5, gap 32; a third of the vocabulary opens a word. Both sides answer the same
prompts with log-probs, in turn; a ratio is the median of the rounds'. Two models run where one did, so that half the
speed is what the arithmetic of two bodies alone would leave; the bar is 0.5. vLLM: two servers, one with the model
alone; tokens/s by the clock, and per CPU-second of server and client (`ratio_cpu`, which a machine with other work on
it does not change).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import common
import served
import torch
from rollout import EOS, PRESETS, VLLM_PYTHON, _prompts, write_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.algorithms.tandem_authors import Rule, boundaries
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Engine, Sampling, TandemSampling, complete
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.texts.text import load_tokenizer

BARS = {"embedded/ratio_cpu": 0.5, "vllm/ratio_cpu": 0.5}
Rate = tuple[float, float]  # tokens per second, and per CPU-second


def make_pair(directory: Path, preset: str, max_tokens: int) -> None:
    """The model, and a tokenizer in whose vocabulary every third token opens a word."""
    write_model(directory, preset, 3 / max_tokens)
    words = {("\u0120" if i % 3 == 0 else "") + f"w{i}": i for i in range(PRESETS[preset]["vocab_size"])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), eos_token="w1"
    ).save_pretrained(directory)


def rate(engine: Engine, prompts: list[list[int]], sampling: Sampling, spent: Callable[[], float]) -> Rate:
    """Raises RuntimeError for a tandem without authors, or with a senior that wrote all or nothing."""
    cpu, start = spent(), time.perf_counter()
    groups = complete(engine, prompts, sampling)
    seconds, cpu = time.perf_counter() - start, spent() - cpu
    drawn = [c for group in groups for c in group]
    tokens = sum(len(c.tokens) for c in drawn)
    if sampling.tandem is not None:
        share = sum(0 if c.authors is None else int(c.authors.sum()) for c in drawn) / tokens
        if not 0.3 < share < 0.7:
            raise RuntimeError(f"the senior wrote {share:.2f} of the tokens: the comparison is void")
    return tokens / seconds, tokens / cpu


def ratios(pairs: list[tuple[Rate, Rate]]) -> dict[str, float]:
    """(alone, tandem) of each round."""
    names = ("tokens_per_s", "tokens_per_cpu_s")
    figures = {f"alone_{n}": statistics.median(alone[i] for alone, _ in pairs) for i, n in enumerate(names)}
    figures |= {f"tandem_{n}": statistics.median(tandem[i] for _, tandem in pairs) for i, n in enumerate(names)}
    return figures | {n: statistics.median(t[i] / a[i] for a, t in pairs) for i, n in enumerate(("ratio", "ratio_cpu"))}


def embedded_figures(model: Path, args: argparse.Namespace) -> dict[str, float]:
    prompts = _prompts(args.preset, args.sequences)
    engine = EmbeddedEngine(model, max_batch=args.sequences, tokenizer=load_tokenizer(model), junior=model)
    engine.load_pretrained()
    pairs = []
    for number in range(args.rounds + 1):
        alone = Sampling(max_tokens=args.max_tokens, seed=number)
        both = replace(alone, tandem=TandemSampling(rule=Rule()))
        pairs.append(tuple(rate(engine, prompts, sampling, time.process_time) for sampling in (alone, both)))
    return ratios(pairs[1:])  # the first warms up


def vllm_figures(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    prompts = _prompts(args.preset, max(1, args.sequences // args.samples))
    settings = Vllm(python=str(args.python), max_batch=served.MAX_BATCH, wait_s=60.0)
    boundary, pairs = functools.cache(functools.partial(boundaries, load_tokenizer(model))), []
    with contextlib.ExitStack() as stack:
        pools = []
        for name, closing in (("alone", None), ("tandem", boundary)):
            (folder / name).mkdir()
            pools.append(stack.enter_context(served.open_pool(folder / name, model, settings, EOS, boundaries=closing)))
        for number in range(args.rounds + 1):
            alone = Sampling(max_tokens=args.max_tokens, n=args.samples, seed=number)
            samplings = (alone, replace(alone, tandem=TandemSampling(rule=Rule())))
            row = []
            for (pool, server), sampling in zip(pools, samplings, strict=True):
                row.append(
                    rate(
                        pool,
                        prompts,
                        sampling,
                        lambda server=server: common.cpu_seconds([server]) + time.process_time(),
                    )
                )
            pairs.append(tuple(row))
    return ratios(pairs[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", help="embedded, vllm, or both with a comma (default: vllm too where --python exists)"
    )
    parser.add_argument(
        "--python", type=Path, default=VLLM_PYTHON, help="interpreter of the environment that has vLLM (make engines)"
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="tiny: 0.16 M parameters (embedded alone); small: 19 M"
    )
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4, help="of one prompt, in a request to vLLM")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the longest sequence")
    parser.add_argument("--rounds", type=int, default=3)
    common.add_arguments(parser)
    args = parser.parse_args()
    chosen = args.engines.split(",") if args.engines else ["embedded", *(["vllm"] if args.python.exists() else [])]
    if set(chosen) - {"embedded", "vllm"}:
        parser.error(f"--engines {args.engines}: give embedded, vllm, or both")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are ended on the way out
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_pair(model, args.preset, args.max_tokens)
        if "embedded" in chosen:
            metrics |= {f"embedded/{name}": value for name, value in embedded_figures(model, args).items()}
        if "vllm" in chosen:
            metrics |= {f"vllm/{name}": value for name, value in vllm_figures(model, Path(folder), args).items()}
    common.finish(metrics, {name: bar for name, bar in BARS.items() if name in metrics}, args)


if __name__ == "__main__":
    main()
