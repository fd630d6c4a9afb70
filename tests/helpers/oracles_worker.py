"""Runs on two ranks: replays the optimizer steps of a recorded run of TRL's GRPOTrainer with this project's actor."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts_worker import logprobs_of, own, world
from process_groups import apart
from safetensors.torch import load_file

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config.schema import Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.training.update import Trainee, update
from megatron_rl.types import Author, Rollout, spans_of

LAYOUTS = {"dp": Layout(), "tp": Layout(tp=2)}


def make_rollouts(record: dict[str, Any], numbers: Sequence[int]) -> list[Rollout]:
    """Makes the recorded rollouts with these numbers. TRL's log-probs at the start stand for the engine's."""
    rollouts = []
    for recorded in (record["rollouts"][number] for number in numbers):
        prompt, completion = recorded["prompt"], recorded["completion"]
        spans = spans_of((len(prompt), Author.ENVIRONMENT, -1), (len(completion), Author.POLICY, 0))
        rollouts.append(
            Rollout(
                role="generator",
                group=str(prompt),
                tokens=np.array(prompt + completion),
                logprobs=np.array([0.0] * len(prompt) + recorded["old"]),
                spans=spans,
                advantages=recorded["advantage"],
            )
        )
    return rollouts


def make_role(path: Path, settings: dict[str, Any], layout: Layout) -> RoleConfig:
    """The role whose settings are those of TRL's run."""
    return RoleConfig(
        model=Model(path=str(path)),
        layout=layout,
        optimizer=Optimizer(
            lr=settings["learning_rate"],
            betas=(settings["adam_beta1"], settings["adam_beta2"]),
            eps=settings["adam_epsilon"],
            weight_decay=settings["weight_decay"],
            clip_grad=settings["max_grad_norm"],
        ),
        loss=LossConfig(
            clip_low=settings["epsilon"],
            clip_high=settings["epsilon_high"],
            kl_coef=settings["beta"],
            kl="k3",
            aggregation="sequence_mean",
        ),
        micro_batch_tokens=40,
        samples_per_optimizer_step=settings["per_device_train_batch_size"],
    )


def replay(folder: Path, record: dict[str, Any], layout: Layout, steps: int) -> dict[str, float]:
    """Takes the first `steps` steps. Returns largest differences with TRL: of the weights, relative to how far TRL's
    went; of the log-probs before; of the loss and the gradient's norm, relative and as means over the steps."""
    role = make_role(folder / "model", record["settings"], layout)
    policy = MegatronPolicy(role, parallel.create(layout))
    start = {name: tensor.clone() for name, tensor in policy.export.weights()}
    rollouts = make_rollouts(record, [n for step in record["steps"][:steps] for n in step["rollouts"]])
    theirs = torch.cat([torch.from_numpy(np.append(r.logprobs[1:], np.float32(0))) for r in rollouts])
    logprobs = (logprobs_of(policy, rollouts) - theirs).abs().max().item()
    trainee = Trainee(
        policy=policy, loss=PolicyLoss(role.loss), samples_per_optimizer_step=role.samples_per_optimizer_step
    )
    metrics = update(world(), trainee, own(rollouts))
    assert metrics["optimizer_steps"] == steps
    expected, now = load_file(folder / f"after_{steps}.safetensors"), dict(policy.export.weights())
    assert now.keys() == expected.keys()
    moved, apart = (
        torch.stack([(expected[name] - weights[name]).abs().max() for name in expected]).max().item()
        for weights in (start, now)
    )
    loss = np.mean([step["loss"] for step in record["steps"][:steps]])
    norm = np.mean(record["grad_norms"][:steps])
    return {
        "weights": apart / moved,
        "moved": moved,
        "logprobs": logprobs,
        "loss": float(abs(metrics["loss"] / loss - 1)),
        "grad_norm": float(abs(metrics["grad_norm"] / norm - 1)),
        "clip_frac": metrics["clip_frac"],
    }


def main() -> None:
    output_path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record = json.loads((folder / "record.json").read_text())
    world()  # made once, before the groups that end
    answer = {
        f"{name}/{steps}": apart(replay, folder, record, layout, steps)
        for name, layout in LAYOUTS.items()
        for steps in (1, 2)
    }
    output_path.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
