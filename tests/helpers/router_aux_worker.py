"""Runs on every rank: the gradient of the load-balancing loss of experts against transformers in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import layouts_worker
import numpy as np
import torch
import torch.distributed as dist
from process_groups import apart

from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.config.schema import Layout, Lora, Model, RoleConfig
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.types import Author, Rollout, spans_of

COEFFICIENT = 0.5


class NoLoss:
    """A loss of 0, so that the load-balancing loss alone has a gradient."""

    needs = frozenset({"advantages"})

    def __call__(self, live, batch):
        return 0.0 * live.logprobs.sum(), {}

    def aggregate(self, counts, groups):
        return aggregate("token_mean", counts, groups)


def rollouts_of(lengths: list[int], vocab: int) -> list[Rollout]:
    """Returns rollouts of the given lengths with random tokens."""
    generator = np.random.default_rng(sum(lengths))
    return [
        Rollout(
            role="generator", group=str(i), tokens=generator.integers(0, vocab, n), logprobs=np.zeros(n),
            spans=spans_of((1, Author.ENVIRONMENT, -1), (n - 1, Author.POLICY, 0)), advantages=0.0,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def compare(path: str, case: dict) -> dict[str, float]:
    """Returns the largest error of a gradient, the largest gradient, and the number of micro-batches."""
    settings = case.get("model_settings", {}) | {"router_aux_loss": COEFFICIENT}
    policy = layouts_worker.make_policy(path, case | {"model_settings": settings})
    rollouts = rollouts_of(case["lengths"], policy.arch.vocab)
    expected = layouts_worker.reference(path, rollouts, NoLoss(), dtype=torch.float64, aux=COEFFICIENT)[3]
    work, _ = layouts_worker.work_of(policy, rollouts, NoLoss())
    return {
        "error": layouts_worker.gradient_error(policy, work, NoLoss(), expected),
        "largest": max(gradient.abs().max().item() for gradient in expected.values()),
        "micro_batches": float(len(work.micros(0))),
    }


def norms_on_one_model(path: str) -> list[float]:
    """Returns the gradient norms of two roles with adapters that share a model. The second role alone has the loss."""
    groups, policies = parallel.create(Layout()), list[MegatronPolicy]()
    for weight in (0.0, COEFFICIENT):
        role = RoleConfig(
            model=Model(path=path, router_aux_loss=weight), lora=Lora(rank=2, targets=("q_proj", "v_proj"))
        )
        policies.append(MegatronPolicy(role, groups, base=policies[0] if policies else None))
    rollouts = rollouts_of([9, 5], policies[0].arch.vocab)
    works = [layouts_worker.work_of(policy, rollouts, NoLoss())[0] for policy in policies]
    return [policy.update(work, 0, NoLoss())["grad_norm"] for policy, work in zip(policies, works, strict=True)]


def main() -> None:
    output_path, path, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layouts_worker.world()  # made once, before the groups that end
    answers: dict = {case["name"]: apart(compare, f"{path}/{case['model']}", case) for case in cases}
    answers["norms"] = norms_on_one_model(f"{path}/qwen3_moe") if dist.get_world_size() == 1 else [0.0, 1.0]
    output_path.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
