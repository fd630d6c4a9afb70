"""Compares the CPU-seconds of an update that computes a group's prompt once with one that computes it for each sample.

Both are updates of one policy on the same rollouts, as the loop makes them: the reference's log-probs (the loss has a
KL term), forward and backward passes, and the optimizer's step, with a learning rate of 0. The model has the shapes of
SmolLM2-135M and random weights, or is the one of --model. The workloads are 16 prompts of four worked lines with 8
answers of 2 to 5 tokens each (`few-shot`, the lengths of docs/experiments/real_model.md's run); prompts as long as the
answers (`equal`); and prompts of 4 tokens before answers of 128 (`short`), where there is nothing to win. Both forms
alternate for several rounds in one process, and each counts with its fastest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import common
import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config.schema import Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.training.update import Trainee, update
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of

SMOLLM2 = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
GROUP = 8
# By workload: number of prompts, the range of their lengths, and that of the answers' lengths.
WORKLOADS = {
    "few-shot": (16, (40, 45), (2, 6)),
    "equal": (2, (128, 129), (128, 129)),
    "short": (2, (4, 5), (128, 129)),
}
LIMITS = {"few-shot/ratio": 0.35, "equal/ratio": 0.7, "short/ratio": 1.05}


def rollouts(workload: str, vocab: int) -> list[Rollout]:
    """Returns groups of GROUP samples of random tokens."""
    draw, samples = np.random.default_rng(0), []
    groups, prompts, answers = WORKLOADS[workload]
    for number in range(groups):
        prompt = draw.integers(0, vocab, draw.integers(*prompts))
        for _ in range(GROUP):
            tokens = np.concatenate([prompt, draw.integers(0, vocab, draw.integers(*answers))])
            length = len(tokens) - len(prompt)
            samples.append(
                Rollout(
                    role="model",
                    group=str(number),
                    tokens=tokens,
                    logprobs=np.full(len(tokens), -10.0, np.float32),
                    spans=spans_of((len(prompt), Author.ENVIRONMENT, NO_VERSION), (length, Author.POLICY, 0)),
                    advantages=float(draw.standard_normal()),
                )
            )
    return samples


def make_policy(path: str, args: argparse.Namespace) -> MegatronPolicy:
    """Returns a policy of SmolLM2's run, whose weights stay as they are."""
    role = RoleConfig(
        model=Model(path=path, dtype=args.dtype),
        optimizer=Optimizer(lr=0.0, weight_decay=0.0),
        loss=LossConfig(kl_coef=0.001, kl="k3"),
        micro_batch_tokens=args.micro_batch_tokens,
        shared_prefixes=True,  # the attention that can do both forms
    )
    return MegatronPolicy(role, parallel.create(Layout()))


def measure(policy: MegatronPolicy, samples: list[Rollout], rounds: int) -> dict[str, float]:
    """Returns the CPU-seconds of both forms, their ratio, and by how much their results differ."""
    trainee = Trainee(policy=policy, loss=PolicyLoss(policy.role.loss))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    metrics: dict[bool, dict[str, float]] = {}
    for _ in range(1 + rounds):
        for shared in seconds:
            policy.role = replace(policy.role, shared_prefixes=shared)
            start = time.process_time()
            metrics[shared] = update(World(), trainee, samples)
            seconds[shared].append(time.process_time() - start)
    once, repeated = (min(seconds[shared][1:]) for shared in (True, False))  # the first round is to warm up
    apart = [abs(metrics[True][name] / metrics[False][name] - 1) for name in ("loss", "grad_norm")]
    return {
        "packed_tokens": metrics[True]["packed_tokens"],
        "shared_tokens": metrics[True]["shared_tokens"],
        "trained_tokens": metrics[True]["trained_tokens"],
        "repeated_cpu_s": repeated,
        "shared_cpu_s": once,
        "ratio": once / repeated,
        "loss_apart": apart[0],
        "grad_norm_apart": apart[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory in place of random weights of SmolLM2's shapes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(Path(folder))
        policy = make_policy(args.model or folder, args)
        for workload in args.workloads:
            figures = measure(policy, rollouts(workload, policy.arch.vocab), args.rounds)
            metrics |= {f"{workload}/{name}": value for name, value in figures.items()}
    dist.destroy_process_group()
    limits = {name: limit for name, limit in LIMITS.items() if name in metrics}
    common.finish(metrics, {}, args, limits=limits)


if __name__ == "__main__":
    main()
