"""Runs on every rank: bytes that the actor really holds, for the cases in a JSON file, beside those that
planning/memory.py expects.

plan_worker.py OUT CASES.json     under run_ranks; a case: {model, layout, dtype, recompute, modules, lengths, micro},
and {prompt, group}: so many samples, one after the other, begin with one prompt of so many tokens, computed once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts_worker import WeightedLogprobs, work_of, world
from process_groups import apart

from megatron_rl.config.schema import Layout, Lora, LossConfig, Model, RoleConfig
from megatron_rl.megatron import model as models
from megatron_rl.megatron import offload, parallel, vocab_statistics
from megatron_rl.megatron import optimizer as optim
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import memory
from megatron_rl.planning.memory import Actor, MicroBatchLoad, Precision
from megatron_rl.types import Author, Rollout, spans_of
from megatron_rl.weights.counting import Parallel


class Saved:
    """Storages that autograd keeps for backward passes, each counted once while anything keeps it; not those in
    `but`.
    """

    def __init__(self, but: set[int]) -> None:
        self.but, self.keepers, self.live, self.peak = but, Counter(), 0, 0

    def pack(self, tensor: torch.Tensor) -> Kept:
        return Kept(self, tensor)


class Kept:
    def __init__(self, owner: Saved, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.owner, self.tensor, self.key = owner, tensor, (storage.data_ptr(), storage.nbytes())
        if self.key[0] in owner.but:
            return
        owner.keepers[self.key] += 1
        if owner.keepers[self.key] == 1:
            owner.live += self.key[1]
            owner.peak = max(owner.peak, owner.live)

    def __del__(self) -> None:
        if self.key[0] in self.owner.but:
            return
        self.owner.keepers[self.key] -= 1
        if not self.owner.keepers[self.key]:
            self.owner.live -= self.key[1]


def storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def optimizer_tensors(optimizer: Any):
    for part in optim.parts(optimizer):
        for state in part.optimizer.state.values():
            yield from (
                value for value in state.values() if torch.is_tensor(value) and value.numel() > 1
            )  # not the count of steps
        for group in part.shard_fp32_from_float16_groups:
            yield from (master for master in group if master is not None)


def make_rollouts(vocab: int, lengths: list[int], prompt: int = 1, group: int = 1) -> list[Rollout]:
    g, rollouts = torch.Generator().manual_seed(0), []
    for i, n in enumerate(lengths):
        tokens = torch.randint(0, vocab, (n,), generator=g).numpy()
        tokens[:prompt] = rollouts[i - i % group].tokens[:prompt] if i % group else tokens[:prompt]
        spans = spans_of((prompt, Author.ENVIRONMENT, -1), (n - prompt, Author.POLICY, 0))
        rollout = Rollout(role="generator", group=str(i // group), tokens=tokens, logprobs=np.zeros(n), spans=spans)
        rollouts.append(replace(rollout, advantages=1.0))
    return rollouts


def measure(case: dict[str, Any]) -> dict[str, dict[str, float]]:
    """-> {found: bytes by part, expected: bytes by part} of this rank."""
    layout, dtype, recompute = Layout(**case["layout"]), case.get("dtype", "float32"), case.get("recompute", "none")
    modules = tuple(case.get("modules", ("core_attn",)))
    role = RoleConfig(
        model=Model(path=case["model"], dtype=dtype, recompute=recompute, recompute_modules=modules), layout=layout,
        loss=LossConfig(kl_coef=0.0), micro_batch_tokens=case["micro"],
        lora=Lora(**case["lora"]) if "lora" in case else None, shared_prefixes="group" in case,
    )  # fmt: skip
    policy = MegatronPolicy(role, parallel.create(layout))
    parameters = storages(p for _, p in models.named_parameters(policy.chunks))
    saved = Saved(set(parameters))
    loss = WeightedLogprobs()
    prompts = {name: case[name] for name in ("prompt", "group") if name in case}
    work, _ = work_of(policy, make_rollouts(policy.arch.vocab, case["lengths"], **prompts), loss)
    packed = [*policy._micro_batches(work, 0)]  # sequences seldom fill the budget
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
        policy.update(work, 0, loss)
    measured = {
        "weights": sum(parameters.values()),
        "gradients": offload.gradient_bytes(policy.chunks),
        "optimizer": sum(storages(optimizer_tensors(policy.optimizer)).values()),
        "activations": saved.peak,
    }
    shape = read_shape(case["model"])
    cut = Parallel.of(layout, dist.get_world_size(), experts=bool(shape.sizes.experts))
    fullest = max(packed, key=lambda part: part.tokens.numel())
    micro = MicroBatchLoad(
        tokens=layout.cp * fullest.tokens.numel(),
        behind=0 if fullest.batch.shared is None else int(fullest.batch.shared.sum()),
        count=len(packed),
        recompute=memory.recomputed(role.model),
    )
    plan = memory.training(Actor(shape, cut, Precision.cpu(dtype), role.lora), micro, stage=policy.groups.pp.rank())
    return {"found": measured, "expected": {part: getattr(plan, part) for part in measured}}


def main() -> None:
    output_path, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    vocab_statistics.KEPT_ELEMENTS["cpu"] = 0  # as on a GPU: logits are computed again in the backward pass
    world()  # made once, before the groups that end
    output_path.write_text(json.dumps([apart(measure, case) for case in cases]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
