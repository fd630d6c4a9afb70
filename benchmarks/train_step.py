"""Compares tokens per CPU-second of one update of our actor and of a plain transformers training step.

Both train the same model on the same batch, of two kinds. `equal`: all sequences have one length and every token but
the first is trained, so that padding costs nobody anything. `varied`: lengths as rollouts have
them (a prompt of 32, a log-normal response), with the loss on the response; ours runs packed, while transformers pads
each micro-batch of the same number of sequences, in the order given. On `equal` both sides use the same number of
sequences per micro-batch. Both use one thread, SDPA attention, clipping and AdamW. In bfloat16 ours steps float32
copies of the weights, as it always does, and transformers' side the bfloat16 weights. They alternate for several
rounds in one process, and each side counts with its fastest round. Tokens counted are real ones, not padding.

With --layouts the `varied` batch also runs on two ranks, for each axis of parallelism alone. CPU
seconds are then those of both ranks together, waiting included, and are compared with one process and with
transformers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import Batch, pack
from megatron_rl.config.schema import Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.training.update import Trainee, update
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of

ALONE = Layout()
RANKS = 2
PRESETS: dict[str, PretrainedConfig] = {
    "tiny": Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    ),
    "small": Qwen2Config(
        vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048,
    ),
    "smollm2": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
}  # fmt: skip
LAYOUTS = {
    "dp2": Layout(),
    "tp2": Layout(tp=2),
    "tp2_sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2, overlap_p2p=True),
    "cp2": Layout(cp=2),
}
BARS = {"equal/ratio": 0.95, "varied/ratio": 1.5}
WIDE_BARS = {"equal/ratio": 1.0}  # of smollm2, for lengths of 72, which leave varied ones little to differ by


def rollouts(kind: str, count: int, length: int, vocab: int) -> list[Rollout]:
    """Returns `count` random sequences; `length` is the length of all (equal) or the longest allowed (varied)."""
    rng = random.Random(0)
    samples = []
    for i in range(count):
        prompt = 1 if kind == "equal" else 32
        n = length if kind == "equal" else min(length, prompt + 8 + int(rng.lognormvariate(4.0, 0.8)))
        samples.append(
            Rollout(
                role="model",
                group=str(i),
                tokens=[rng.randrange(vocab) for _ in range(n)],  # type: ignore[arg-type]
                logprobs=np.zeros(n, np.float32),
                spans=spans_of((prompt, Author.ENVIRONMENT, NO_VERSION), (n - prompt, Author.POLICY, 0)),
                advantages=1.0,
            )
        )
    return samples


def transformers_step(directory: Path, batch: Batch, rows: int, dtype: str) -> Callable[[], None]:
    """Returns a training step as a user of transformers writes it: pad each micro-batch, cross-entropy, clip, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    cu, micro = batch.cu_seqlens.tolist(), []
    for start in range(0, batch.num_sequences, rows):
        spans = [slice(cu[i], cu[i + 1]) for i in range(start, min(start + rows, batch.num_sequences))]
        tokens = torch.nn.utils.rnn.pad_sequence([batch.tokens[s] for s in spans], batch_first=True)
        seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(batch.tokens[s]) for s in spans], batch_first=True)
        labels = [batch.labels[s].masked_fill(~batch.mask[s], -100) for s in spans]
        micro.append((tokens, seen, torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)))
    total = float(batch.mask.sum())

    def step() -> None:
        optimizer.zero_grad()
        for tokens, seen, labels in micro:
            mask = None if bool(seen.all()) else seen
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            (
                F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / total
            ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(
    directory: Path, samples: list[Rollout], *, budget: int, dtype: str, layout: Layout = ALONE
) -> Callable[[], object]:
    """Returns an update as the loop makes it, the way of the rollouts to this rank included."""
    role = RoleConfig(
        model=Model(path=str(directory), dtype=dtype), optimizer=Optimizer(lr=1e-5), loss=LossConfig(kl_coef=0.0),
        micro_batch_tokens=budget // layout.cp, layout=layout,
    )  # fmt: skip
    world = World()
    loss = PolicyLoss(LossConfig(objective="nll", kl_coef=0.0))
    trainee = Trainee(policy=MegatronPolicy(role, parallel.create(layout)), loss=loss)
    return lambda: update(world, trainee, samples if world.rank == 0 else None)


def rank_seconds(rank: int, folder: str, name: str, args: argparse.Namespace) -> list[float]:
    """Returns the CPU seconds of this rank in each round."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{name}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    samples = rollouts("varied", args.sequences, args.length, PRESETS[args.preset].vocab_size)
    step = our_step(
        Path(folder), samples, budget=args.rows * args.length, dtype=args.dtype, layout=LAYOUTS[name]
    )  # fmt: skip
    step()
    seconds = []
    for _ in range(args.rounds):
        dist.barrier()
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def by_layout(folder: str, args: argparse.Namespace, tokens: int) -> dict[str, float]:
    """Returns the tokens per CPU-second of each layout."""
    metrics = {}
    with multiprocessing.get_context("spawn").Pool(RANKS) as pool:
        for name in track([*LAYOUTS], "layouts on two ranks", console=Console(stderr=True)):
            ranks = pool.starmap(rank_seconds, [(rank, folder, name, args) for rank in range(RANKS)], chunksize=1)
            seconds = min(sum(both) for both in zip(*ranks, strict=True))
            metrics[name] = tokens / seconds
    return metrics


def measure(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Returns the CPU seconds (ours, theirs) of the fastest round of each: what else runs on the machine only ever
    adds.
    """

    def cpu(step: Callable[[], object]) -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    cpu(ours), cpu(theirs)
    pairs = [(cpu(ours), cpu(theirs)) for _ in range(rounds)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations"
    )
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of each sequence (equal), of the longest (varied)"
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences per micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", action="store_true", help="each layout on two ranks, too")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(PRESETS[args.preset], dtype=torch.float32).save_pretrained(folder)
        for kind in ("equal", "varied"):
            samples = rollouts(kind, args.sequences, args.length, PRESETS[args.preset].vocab_size)
            batch = pack(samples)
            budget = args.rows * args.length
            ours = our_step(Path(folder), samples, budget=budget, dtype=args.dtype)
            plain = transformers_step(Path(folder), batch, args.rows, args.dtype)
            seconds, theirs = measure(ours, plain, args.rounds)
            tokens = len(batch.tokens)
            metrics |= {
                f"{kind}/ours_tokens_per_cpu_s": tokens / seconds,
                f"{kind}/transformers_tokens_per_cpu_s": tokens / theirs,
            }
            metrics[f"{kind}/ratio"] = theirs / seconds
        dist.destroy_process_group()
        if args.layouts:
            rates = by_layout(folder, args, tokens)
            for name, rate in rates.items():
                metrics[f"{name}/tokens_per_cpu_s"] = rate
                metrics[f"{name}/of_one_process"] = rate / metrics["varied/ours_tokens_per_cpu_s"]
                metrics[f"{name}/of_transformers"] = rate / metrics["varied/transformers_tokens_per_cpu_s"]
    common.finish(metrics, WIDE_BARS if args.preset == "smollm2" else BARS, args)


if __name__ == "__main__":
    main()
