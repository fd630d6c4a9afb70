"""Measures the peak memory of log-probs and their gradient over a large vocabulary: in chunks, and the plain way.

The plain way is logits of all tokens, log_softmax, the labels' entries, backward. Both ways start from the same hidden
states and output weights in float32, each in a process of its own. What counts is the most anonymous memory beyond what
existed before. The plain way holds several times tokens x vocabulary x 4 bytes: 15 GB with the defaults, which take
some 4 minutes.

Then a model of the size `--hidden` and `--layers` sleeps and wakes: seconds of `sleep` and `wake`, and the bytes of
gradients that sleep frees. Without a GPU the optimizer's moments are in host memory anyway.

Last, two data-parallel ranks train a model of that size and save it: the most memory of a rank and its writers while it
saves, over the most while it trains. Memory that processes share counts by its share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import common
import torch
import torch.distributed as dist
import train_step
from rich.progress import track
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config.schema import Layout as OneRank
from megatron_rl.config.schema import LossConfig, Model, RoleConfig
from megatron_rl.megatron import offload, parallel, vocab_statistics
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.training.update import Trainee, update

BARS = {"plain_over_chunked": 8.0}
LIMITS = {"saving/rank_0": 1.1, "saving/rank_1": 1.1}
HIDDEN = 256  # of the log-probs
VOCAB = 8192  # of the model
T = TypeVar("T")


def peak_mib(way: str, tokens: int, vocab: int) -> float:
    """Returns the peak MiB of one forward and backward pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hidden, weight = (
        torch.randn(tokens, HIDDEN, requires_grad=True),
        (0.05 * torch.randn(vocab, HIDDEN)).requires_grad_(),
    )
    labels = torch.randint(vocab, (tokens,))
    with common.AnonymousPeak() as peak:
        if way == "chunked":
            group = dist.group.WORLD
            [logprobs] = vocab_statistics.vocab_parallel_statistics(
                hidden, weight, labels, first_row=0, vocab=vocab, temperature=1.0, group=group, names=["logprobs"]
            )
        else:
            logprobs = (hidden @ weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
        logprobs.sum().backward()
    dist.destroy_process_group()
    return peak.mib


def write_model(folder: str, hidden: int, layers: int) -> None:
    """Writes a Qwen2 of random weights as a Hugging Face directory."""
    sizes = dict(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, **sizes)).save_pretrained(folder)


def sleeping(hidden: int, layers: int) -> dict[str, float]:
    """Returns the seconds and MiB of one role's sleep."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, hidden, layers)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        policy = MegatronPolicy(
            RoleConfig(model=Model(path=str(Path(folder))), loss=LossConfig(kl_coef=0.0)), parallel.create(OneRank())
        )
    held, start = offload.gradient_bytes(policy.chunks), time.monotonic()
    policy.memory.sleep()
    asleep, between = offload.gradient_bytes(policy.chunks), time.monotonic()
    policy.memory.wake()
    metrics = {"sleep/seconds": between - start, "sleep/wake_seconds": time.monotonic() - between}
    dist.destroy_process_group()
    return metrics | {"sleep/freed_mib": (held - asleep) / 2**20}


def saving(rank: int, folder: str, model: str) -> tuple[float, float]:
    """Returns the most bytes of this rank, one of two, in an update, and while a checkpoint is written."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    world, directory = World(), Path(folder) / "checkpoint"
    role = RoleConfig(model=Model(path=model), loss=LossConfig(kl_coef=0.0), micro_batch_tokens=128)
    loss = PolicyLoss(LossConfig(objective="nll", kl_coef=0.0))
    trainee = Trainee(policy=MegatronPolicy(role, parallel.create(OneRank())), loss=loss)
    samples = train_step.rollouts("equal", 4, 128, VOCAB) if rank == 0 else None
    update(world, trainee, samples)
    with common.FamilyPeak() as training:
        update(world, trainee, samples)
    if rank == 0:
        directory.mkdir()
    dist.barrier()
    with common.FamilyPeak() as written:
        trainee.policy.state.save(directory)
    dist.destroy_process_group()
    return training.most, written.most


def saving_over_training(hidden: int, layers: int) -> dict[str, float]:
    """Returns for each of two ranks the most memory while it saves, over the most while it trains."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(f"{folder}/model", hidden, layers)
        with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as pool:
            futures = [pool.submit(saving, rank, folder, f"{folder}/model") for rank in range(2)]
            most = [future.result() for future in futures]
    return {f"saving/rank_{rank}": written / training for rank, (training, written) in enumerate(most)}


def alone(function: Callable[..., T], *args: object) -> T:
    """Returns the function's result from a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=512, help="of the model that sleeps and is saved")
    parser.add_argument("--layers", type=int, default=12, help="of the model that sleeps and is saved")
    common.add_arguments(parser)
    args = parser.parse_args()
    metrics = {}
    for way in track(("chunked", "plain"), description="log-probs"):
        metrics[f"{way}/peak_mib"] = alone(peak_mib, way, args.tokens, args.vocab)
    metrics["plain_over_chunked"] = metrics["plain/peak_mib"] / metrics["chunked/peak_mib"]
    metrics |= alone(sleeping, args.hidden, args.layers)
    metrics |= saving_over_training(args.hidden, args.layers)
    common.finish(metrics, BARS, args, limits=LIMITS)


if __name__ == "__main__":
    main()
