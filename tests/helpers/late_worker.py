"""Runs on 2 or 4 ranks: updates of several optimizer steps, whose new weights are gathered beside the next forward pass
(optimizer.overlap), and the same with weights that are gathered at once, in the same pieces.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts_worker import WeightedLogprobs, logprobs_of, make_rollouts, own, world

from megatron_rl.config.schema import Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import optimizer, parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.training.update import Trainee, scatter, update

SAMPLES = 3  # of an optimizer step
BUCKET = 5_000  # parameters: core's own buckets are larger than these models, which would be gathered in one piece
INTERLEAVED = {"pp": 2, "vpp": 2, "overlap_p2p": True}
CASES = {
    2: {
        "dp": ("plain", {}, {}),
        "dp, tied": ("tied", {}, {}),
        "dp, bfloat16": ("plain", {}, {"dtype": "bfloat16"}),
        "dp, everything recomputed": ("plain", {}, {"recompute": "full"}),
        "cp": ("plain", {"cp": 2}, {}),
        "latent attention and experts, ep": ("latent", {"ep": 2}, {}),
    },
    4: {
        "pp, vpp and dp": ("plain", INTERLEAVED, {}),
        "pp and dp, tied": ("tied", {"pp": 2}, {}),
        "tp, sequence parallel, and dp": ("plain", {"tp": 2, "sequence_parallel": True}, {}),
        "experts, ep and dp": ("experts", {"ep": 2}, {}),
    },
}


def run(path: Path, layout: Layout, model: dict) -> dict:
    """Trains for three updates, the last one step by step. -> weights, log-probs, how far the ranks' own weights are
    apart between two steps, and the loss."""
    role = RoleConfig(
        model=Model(path=str(path), **model), layout=layout, optimizer=Optimizer(lr=1e-3, overlap=True),
        loss=LossConfig(kl_coef=0.0), micro_batch_tokens=40,
    )  # fmt: skip
    policy = MegatronPolicy(role, parallel.create(layout))
    rollouts, loss = make_rollouts(policy.arch.vocab), WeightedLogprobs()
    trainee = Trainee(policy=policy, loss=loss, samples_per_optimizer_step=SAMPLES)
    losses = []
    for iteration in range(2):
        losses.append(update(world(), trainee, own(rollouts[iteration:]))["loss"])
        logprobs_of(policy, rollouts)  # a pass without gradients, between updates
    work = scatter(world(), policy, own(rollouts), loss=loss, samples_per_step=SAMPLES)
    policy.update(work, 0, loss)
    same = (p.detach() for chunk in policy.chunks for p in chunk.parameters() if getattr(p, "allreduce", True))
    apart = max(apart_of(p, policy) for p in same)  # not of experts, of which ranks have different ones
    message = ""
    try:
        next(iter(policy.export.weights()))
    except RuntimeError as error:
        message = str(error)
    for step in range(1, len(work.steps)):
        losses.append(policy.update(work, step, loss)["loss"])
    waits = sum(len(chunk.remove_forward_pre_hook_handles) for chunk in policy.chunks)
    weights = {name: tensor.clone() for name, tensor in policy.export.weights()}
    return {
        "weights": weights, "logprobs": logprobs_of(policy, rollouts), "apart": apart, "losses": losses,
        "steps": len(work.steps), "waits_left": waits, "said": message,
    }  # fmt: skip


def apart_of(parameter: torch.Tensor, policy: MegatronPolicy) -> float:
    """Returns how far a parameter is from that of other replicas, which have the same. Collective."""
    others = [torch.empty_like(parameter) for _ in range(policy.groups.dp_size)]
    dist.all_gather(others, parameter.contiguous(), group=policy.groups.dp)
    return max((theirs - parameter).abs().max().item() for theirs in others)


def main() -> None:
    output_path, models = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    optimizer.DistributedDataParallelConfig = functools.partial(
        optimizer.DistributedDataParallelConfig, bucket_size=BUCKET
    )
    answer = {}
    for name, (model, layout, settings) in CASES[dist.get_world_size()].items():
        with patch.object(MegatronPolicy, "_gathers_late", False):
            plain = run(models / model, Layout(**layout), settings)
        late = run(models / model, Layout(**layout), settings)
        names = plain["weights"]
        answer[name] = {
            "weights": max((plain["weights"][n] - late["weights"][n]).abs().max().item() for n in names),
            "logprobs": (plain["logprobs"] - late["logprobs"]).abs().max().item(),
            "losses": max(abs(a - b) for a, b in zip(plain["losses"], late["losses"], strict=True)),
            "apart": [plain["apart"], late["apart"]],
            "steps": late["steps"],
            "waits_left": late["waits_left"],
            "said": [plain["said"], late["said"]],
        }
    output_path.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
