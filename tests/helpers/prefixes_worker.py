"""Runs on every rank: an update that computes shared prompts once against one that computes every rollout whole.

`prefixes_worker.py OUT FOLDER CASES`: FOLDER/MODEL are models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts_worker import DECAY, LR, logprobs_of, make_loss, whole_gradients, work_of, world
from process_groups import apart

from megatron_rl.batches.packed_batch import statistics_needed
from megatron_rl.config.schema import Layout, Lora, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import model as models
from megatron_rl.megatron import optimizer, parallel, pipeline_pass
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.types import FREE, Author, Rollout, spans_of
from megatron_rl.weights import hf_model

# Tokens of each group's prompt, and of its samples' answers. The last two groups have one prompt; one has one sample.
GROUPS = ((9, (4, 11, 1, 8)), (17, (3, 20)), (2, (6, 6, 5, 30, 7)), (21, (12,)), (12, (2, 3)), (12, (9, 1, 1)))


def make_groups(vocab: int) -> list[Rollout]:
    """Rollouts of several groups, in an order in which groups are mixed."""
    draw, rollouts = np.random.default_rng(3), []
    for number, (prompt, answers) in enumerate(GROUPS):
        first = np.random.default_rng(prompt).integers(0, vocab, prompt)
        for length in answers:
            tokens = np.concatenate([first, draw.integers(0, vocab, length)])
            rollouts.append(
                Rollout(
                    role="generator",
                    group=str(number),
                    tokens=tokens,
                    logprobs=np.zeros(len(tokens)),
                    spans=spans_of((prompt, Author.ENVIRONMENT, -1), (length, Author.POLICY, 0)),
                    advantages=draw.standard_normal(len(tokens)),
                )
            )
    return [rollouts[i] for i in np.random.default_rng(0).permutation(len(rollouts))]


def with_experts(rollouts: Sequence[Rollout], arch: hf_model.Architecture) -> list[Rollout]:
    """The rollouts with experts that depend on the token and its place alone, as an engine's would on the prompt."""
    routed = []
    for r in rollouts:
        places = np.arange(len(r.tokens) - 1)[:, None, None]
        layers = np.arange(arch.num_layers)[None, :, None]
        first = (r.tokens[:-1, None, None] + 3 * places + layers) % arch.experts
        experts = (first + np.arange(arch.features.experts_per_token)) % arch.experts
        experts[:, : arch.dense_layers] = FREE
        routed.append(replace(r, experts=experts.astype(np.int16)))
    return routed


def make_policy(path: str, case: dict[str, Any], *, shared: bool) -> MegatronPolicy:
    layout = Layout(**case.get("layout", {}))
    role = RoleConfig(
        model=Model(path=path, dtype=case.get("dtype", "float32"), **case.get("model_settings", {})),
        layout=layout,
        optimizer=Optimizer(lr=LR, weight_decay=DECAY, eps=1e-4, clip_grad=1.0),
        loss=LossConfig(kl_coef=0.001),
        lora=Lora(rank=4, alpha=8.0) if case.get("lora") else None,
        micro_batch_tokens=case.get("budget", 40),
        router_replay=case.get("replay", False),
        shared_prefixes=shared,
    )
    return MegatronPolicy(role, parallel.create(layout))


def gradients(policy: MegatronPolicy, work: Any, loss: Any) -> dict[str, torch.Tensor]:
    """This rank's gradients by name, summed over replicas."""
    with policy.groups.active():
        optimizer.zero_grad(policy.chunks, policy.optimizer)
        scale = policy.groups.dp_size / work.steps[0].denominator
        policy._run(
            work, 0, pipeline_pass.Pass(names=statistics_needed(loss.needs), loss=loss, scale=scale, backward=True)
        )
        whole_gradients(policy)
    named = models.named_parameters(policy.chunks)
    return {name: p.main_grad.clone() for name, p in named if p.requires_grad}


def measured(path: str, case: dict[str, Any], *, shared: bool) -> dict[str, Any]:
    """What an update computes: log-probs of every position, loss, gradients, and metrics of the update."""
    policy = make_policy(path, case, shared=shared)
    loss, rollouts, extra = make_loss(case.get("loss", "weighted"), make_groups(policy.arch.vocab))
    if case.get("replay"):
        rollouts = with_experts(rollouts, policy.arch)
    work, _ = work_of(policy, rollouts, loss, extra)
    computed = [micro.tokens.shape[1] for micro in policy._micro_batches(work, 0)]
    return {
        "logprobs": logprobs_of(policy, rollouts),
        "loss": policy.evaluate(work, loss)["loss"],
        "gradients": gradients(policy, work, loss),
        "metrics": policy.update(work, 0, loss),
        "computed": computed,
    }


def run_case(path: str, case: dict[str, Any]) -> dict[str, float]:
    """Differences between both forms, each by the size of what differs."""
    once, repeated = (measured(path, case, shared=shared) for shared in (True, False))
    largest = max(float(g.abs().max()) for g in repeated["gradients"].values())
    worst = max(float((once["gradients"][n] - g).abs().max()) for n, g in repeated["gradients"].items())
    apart_norm, norm = (
        torch.stack([g.double().square().sum() for g in parts]).sum().sqrt()
        for parts in (
            [once["gradients"][n] - g for n, g in repeated["gradients"].items()],
            [*repeated["gradients"].values()],
        )
    )

    def apart(figure: float, reference: float) -> float:
        return abs(figure - reference) / abs(reference)

    metrics = (once["metrics"], repeated["metrics"])
    return {
        "logprobs": float((once["logprobs"] - repeated["logprobs"]).abs().max() / repeated["logprobs"].abs().max()),
        "loss": apart(once["loss"], repeated["loss"]),
        "update_loss": apart(*(f["loss"] for f in metrics)),
        "entropy": apart(*(f["entropy"] for f in metrics)),
        "grad_norm": apart(*(f["grad_norm"] for f in metrics)),
        "gradients": float(apart_norm / norm),
        "worst_gradient": worst / largest,
        "largest_gradient": largest,
        "most_computed": max(once["computed"]),
        "computed": sum(once["computed"]),
        "packed": once["metrics"]["packed_tokens"],
        "shared": once["metrics"]["shared_tokens"],
    }


def main() -> None:
    output_path, path, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world()  # made once, before the groups that end
    answers = {case["name"]: apart(run_case, f"{path}/{case['model']}", case) for case in cases}
    output_path.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
