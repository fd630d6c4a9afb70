"""What the way of rollouts costs, from an engine's answers in hand to micro-batches on every rank; no model, gloo on
this machine.

The driver turns answers into rollouts, gives them advantages (grpo: one number each; tango: steps are found in the
text, judged at random, and mixed in, so that every token has its own; centered: grpo with the 20 most likely tokens at
each position), cuts them into micro-batches and hands them out;
every rank then makes each of its batches. The policy is a stand-in that receives: four ranks are four replicas, eight
are four replicas of two. Engines, rewards and the model's own layout of a micro-batch are left out.

    driver_s      CPU-seconds of the driver per million tokens, all threads of the process
    others_s      CPU-seconds of the dearest other rank per million tokens of its own replica
    driver_bytes  most anonymous memory (RssAnon, in a run of its own) beyond what stood before the answers came, per
    token; answers included
    others_bytes  likewise of the dearest other rank, per token of its own replica
    wire          bytes that the driver wrote to sockets over those of the arrays that it had to send; each replica's
    are sent once
    flat          driver_s of the largest size over that of the smallest

CPU-seconds are those of the fastest of several rounds: what else runs on the machine only ever adds.
`--only grpo/4/32` runs one case (method, ranks, million tokens) and tells its wall time and peak memory too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.micro_batches import Cost, Prefixes, Shares, micro_batches
from megatron_rl.batches.replica_batch import Work
from megatron_rl.config.schema import LossConfig
from megatron_rl.engines.protocol import Completion
from megatron_rl.messages.world import Replicas, World
from megatron_rl.recipes.solutions import annotate_steps
from megatron_rl.texts.text import decode
from megatron_rl.training.rollouts import from_completion
from megatron_rl.training.update import scatter
from megatron_rl.types import STEP, Annotations, Prompt, Rollout, Stop

LENGTH, PROMPT, GROUP = 8192, 512, 16  # tokens of a rollout, of its prompt; rollouts of a prompt
STEPS = 12  # reasoning steps of a rollout
VOCABULARY = 32_000
MICRO_BATCH_TOKENS = 8192
MILLION = 1_000_000
CASES = ("grpo/4/8.4", "grpo/8/8.4", "tango/4/8.4", "tango/8/8.4", "centered/4/8.4", "grpo/4/1", "grpo/4/64")
TOP = 20  # most likely tokens at each position, in cases of `centered`
WIRE = {"grpo": 8, "tango": 12, "centered": 8 + 8 * TOP}  # bytes of a token in messages to other ranks
LIMITS = {"driver_s": 0.08, "others_s": 0.03, "driver_bytes": 24.0, "others_bytes": 24.0, "wire": 1.1}
TANGO_DRIVER_S = 0.2
FLAT = 1.25


class Receiver:
    """Stands in for a policy: cuts for its replicas as a 7-billion-parameter model's would be cut."""

    replays = False
    shares_prefixes = False

    def __init__(self, world: World) -> None:
        ranks_each = 1 if world.size <= 4 else 2
        ranks = [[*range(first, first + ranks_each)] for first in range(0, world.size, ranks_each)]
        groups = [dist.new_group(members, backend="gloo") for members in ranks] if ranks_each > 1 else []
        group = groups[world.rank // ranks_each] if groups else None
        self.replicas = Replicas(ranks=ranks, reporters=[members[0] for members in ranks], group=group)

    def shares(self, lengths: np.ndarray, prefixes: Prefixes | None = None, groups: object = None) -> Shares:
        cost = Cost(balance=65_000)
        replicas = len(self.replicas.ranks)
        return micro_batches(lengths, max_tokens=MICRO_BATCH_TOKENS, replicas=replicas, cost=cost, prefixes=prefixes)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pieces of two to seven letters, and the tags of steps."""
    rng, letters = np.random.default_rng(0), [*"abcdefghijklmnopqrstuvwxyz"]
    words = ["<step>", "</step>", *pre_tokenizers.ByteLevel.alphabet()]
    seen = set(words)
    while len(words) < VOCABULARY:
        word = "Ġ" + "".join(rng.choice(letters, rng.integers(2, 8)))
        if word not in seen:
            seen.add(word)
            words.append(word)
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_answers(tokens: int, top: int = 0) -> tuple[list[Prompt], list[Completion]]:
    """Prompts, and GROUP completions of each, `tokens` in all; a length is that of the longest or up to a tenth
    less. `top`: number of most likely tokens at each position."""
    rng = np.random.default_rng(1)
    prompts, completions, count = [], [], 0
    while count < tokens:
        prompts.append(Prompt(id=str(len(prompts)), tokens=_random_tokens(rng, PROMPT)))
        for _ in range(GROUP):
            length = LENGTH - PROMPT - int(rng.integers(0, LENGTH // 10))
            drawn = _random_tokens(rng, length)
            edges = np.linspace(0, length - 1, 2 * STEPS, dtype=np.int64)
            drawn[edges[::2]], drawn[edges[1::2]] = 0, 1
            logprobs = rng.random(length, np.float32)
            ids = rng.integers(258, VOCABULARY, (length, top), dtype=np.int32) if top else None
            probable = rng.random((length, top), np.float32) if top else None
            completions.append(
                Completion(tokens=drawn, logprobs=logprobs, stop=Stop.EOS, top_ids=ids, top_logprobs=probable)
            )
            count += length + PROMPT
    return prompts, completions


def credited(method: str, prompts: Sequence[Prompt], completions: list[Completion], tokenizer: Any) -> list[Rollout]:
    """Turns answers into rollouts with advantages; rewards and verdicts are drawn. Each answer is let go when it is a
    rollout, as those of a session are."""
    rng, rollouts = np.random.default_rng(2), []
    for number in range(len(completions)):
        prompt, completion = prompts[-1 - number // GROUP], completions.pop()
        rollout = from_completion(prompt, completion, role="generator", group=prompt.id, version=3)
        rollout = rollout.with_rewards(outcome=float(rng.random() < 0.4))
        if method == "tango":
            rollout = annotate_steps(rollout, decode(tokenizer, rollout.response))
            ranges = rollout.annotations_of(STEP).ranges
            assert len(ranges) == STEPS, f"{len(ranges)} steps were found of {STEPS}"
            rollout = replace(
                rollout, annotations={STEP: Annotations(ranges, rng.choice([-1.0, 1.0], len(ranges)) / len(ranges))}
            )
        rollouts.append(rollout)
    return assign_advantages(rollouts, reward="outcome", estimator="grpo", alpha=0.1 if method == "tango" else None)


def one_way(world: World, policy: Receiver, answers: Any, method: str, tokenizer: Any) -> Work:
    """Answers in hand on the driver, None elsewhere -> all batches made on this rank, one after the other.
    Collective."""
    rollouts = None if answers is None else credited(method, *answers, tokenizer)
    loss = PolicyLoss(LossConfig(kl_coef=0.0, centering=TOP if method == "centered" else 0))
    work = scatter(world, policy, rollouts, loss=loss)  # type: ignore[arg-type]
    for micro in work.micros():
        work.batch(micro)
    return work


def rank_metrics(rank: int, folder: str, case: str, rounds: int, memory: bool) -> dict[str, float]:
    """Runs one rank. Returns its CPU-seconds and its bytes, in all and per million tokens of its replica."""
    torch.set_num_threads(1)
    method, ranks, millions = case.split("/")
    store = dist.FileStore(f"{folder}/{case.replace('/', '_')}_{memory}", int(ranks))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(ranks))
    world = World()
    policy, tokenizer = Receiver(world), make_tokenizer() if method == "tango" and rank == 0 else None
    top = TOP if method == "centered" else 0
    small = make_answers(100_000, top) if rank == 0 else None
    one_way(world, policy, small, method, tokenizer)  # imports, first pages, connections
    world.barrier()
    start = common.anonymous_bytes()
    answers = make_answers(round(float(millions) * MILLION), top) if rank == 0 else None
    world.barrier()
    if memory:
        with common.AnonymousPeak() as peak:
            work = one_way(world, policy, answers, method, tokenizer)
        most = peak.mib * 2**20 + peak.start - start
        metrics = {"bytes": most, "tokens": float(work.num_tokens)}
    else:
        metrics = {"cpu_s": float("inf")}
        for _ in range(rounds):
            world.barrier()
            again = answers and (answers[0], [*answers[1]])
            cpu_start, wall, written = time.process_time(), time.perf_counter(), _written()
            work = one_way(world, policy, again, method, tokenizer)
            metrics["cpu_s"] = min(metrics["cpu_s"], time.process_time() - cpu_start)
            metrics |= {"wall_s": time.perf_counter() - wall, "written": _written() - written}
            metrics["tokens"] = float(work.num_tokens)
            del work
    world.barrier()
    dist.destroy_process_group()
    return metrics


def measure(case: str, rounds: int) -> dict[str, float]:
    """Metrics of one case, each rank a process of its own; CPU-seconds and memory in runs apart, as watching memory
    costs time."""
    method, ranks, _ = case.split("/")
    measurements = {}
    with tempfile.TemporaryDirectory() as folder:
        for memory in (False, True):
            tasks = [(rank, folder, case, rounds, memory) for rank in range(int(ranks))]
            with multiprocessing.get_context("spawn").Pool(int(ranks)) as pool:
                measurements[memory] = pool.starmap(rank_metrics, tasks, chunksize=1)
    (driver, *others), (driver_memory, *others_memory) = measurements[False], measurements[True]
    ranks_each = 1 if int(ranks) <= 4 else 2
    total = sum(rank["tokens"] for rank in measurements[False][::ranks_each])
    sent = total if ranks_each > 1 else total - driver["tokens"]  # an own replica of several ranks is sent to its next
    return {
        "driver_s": driver["cpu_s"] / total * MILLION,
        "others_s": max(rank["cpu_s"] / rank["tokens"] for rank in others) * MILLION,
        "driver_bytes": driver_memory["bytes"] / total,
        "others_bytes": max(rank["bytes"] / rank["tokens"] for rank in others_memory),
        "wire": driver["written"] / (sent * WIRE[method]),
        "wall_s": driver["wall_s"],
        "driver_peak_mib": driver_memory["bytes"] / 2**20,
        "million_tokens": total / MILLION,
    }


def _random_tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(258, VOCABULARY, count, dtype=np.int32)  # words; not the tags, not single bytes


def _written() -> float:
    """Bytes that this process has written to files and sockets (Linux)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("wchar"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", metavar="METHOD/RANKS/MILLIONS", action="append", help="these cases alone")
    common.add_arguments(parser)
    args = parser.parse_args()
    metrics: dict[str, float] = {}
    limits: dict[str, float] = {}
    for case in track(args.only or CASES, "cases", console=Console(stderr=True)):
        metrics |= {f"{case}/{name}": value for name, value in measure(case, args.rounds).items()}
        bars = {"wire": LIMITS["wire"]} if case.startswith("centered") else LIMITS
        limits |= {f"{case}/{name}": limit for name, limit in bars.items()}
        if case.startswith("tango"):
            limits[f"{case}/driver_s"] = TANGO_DRIVER_S
    if not args.only:
        metrics["flat"] = metrics["grpo/4/64/driver_s"] / metrics["grpo/4/1/driver_s"]
        limits["flat"] = FLAT
    common.finish(metrics, {}, args, limits=limits)


if __name__ == "__main__":
    main()
