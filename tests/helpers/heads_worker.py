"""Runs on every rank: policies with a head are saved under one layout, loaded under another, and exported.

`heads_worker.py OUT FOLDER`: FOLDER/model is a language model; what is written goes to FOLDER.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts_worker import DECAY, LR, learn, make_loss, make_rollouts, values_of, work_of, world
from safetensors.torch import save_file

from megatron_rl.algorithms.value_loss import PolicyAndValueLoss
from megatron_rl.config.schema import ConfigError, Layout, Lora, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.conversion.reshard import reshard
from megatron_rl.megatron import optimizer, parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.session.trained import export_model
from megatron_rl.weights.rank_layouts import TrainerLayout

FIRST, SECOND = {"pp": 2}, {"tp": 2, "sequence_parallel": True}


def make_policy(
    path: Path, layout: dict[str, Any], head: str | None, lora: Lora | None = None, *, overlap: bool = False,
    loss: LossConfig | None = None, **model: Any,
) -> MegatronPolicy:  # fmt: skip
    role = RoleConfig(
        model=Model(path=str(path), **model),
        head=head,
        layout=Layout(**layout),
        optimizer=Optimizer(lr=LR, weight_decay=DECAY, eps=1e-4, overlap=overlap),
        loss=loss or LossConfig(value_clip=0.3),
        micro_batch_tokens=60,
        lora=lora,
    )
    return MegatronPolicy(role, parallel.create(role.layout))


def save(policy: MegatronPolicy, directory: Path) -> None:
    if world().rank == 0:
        directory.mkdir()
    dist.barrier()
    policy.state.save(directory)


def crossing(folder: Path, head: str, lora: Lora | None, **model: Any) -> dict[str, float]:
    """One update, a checkpoint, another layout, another update on both sides, and an export of the second."""
    name = f"{head}_lora" if lora else head
    policy = make_policy(folder / "model", FIRST, head, lora, **model)
    loss, rollouts, _ = make_loss("value", make_rollouts(policy.arch.vocab))
    start = {name: tensor.clone() for name, tensor in policy.export.weights()}
    first = learn(policy, rollouts, loss, each=3)
    checkpoint = folder / f"checkpoint_{name}"
    save(policy, checkpoint)
    reloaded = make_policy(folder / "model", SECOND, head, lora, **model)
    new = {name: tensor.clone() for name, tensor in reloaded.export.weights()}
    reloaded.state.load(checkpoint)
    a, b = learn(policy, rollouts, loss), learn(reloaded, rollouts, loss)
    ours, theirs = dict(policy.export.weights()), dict(reloaded.export.weights())
    export_model(world(), reloaded.export, reloaded.role.model, folder / name)
    reloaded.export.write_adapter(folder / f"adapter_{name}")
    work, index = work_of(reloaded, rollouts, loss)
    values = values_of(reloaded, work, index)
    if world().rank == 0:
        save_file({"values": values}, folder / f"values_{name}.safetensors")
    moved = {name: (ours[name] - start[name]).abs().max().item() for name in ours}
    return {
        "start": max((start[name] - new[name]).abs().max().item() for name in new),
        "weights": max((ours[name] - theirs[name]).abs().max().item() for name in ours),
        "metrics": max(abs(a[n] - b[n]) for n in ("loss", "grad_norm", "value", "value_error", "value_clip_frac")),
        "head": moved["score.weight"],
        "least": min(moved.values()),
        "norms": max(gap for name, gap in moved.items() if "norm" in name),
        "largest_head": start["score.weight"].abs().max().item(),
        "steps": first["optimizer_steps"],
    }


def everywhere(policy: MegatronPolicy) -> torch.Tensor:
    """The weight of a value head beside the output layer, on ranks that do not hold it too."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [weight.detach().clone() for weight in policy.head().values()])
    return next(part[0] for part in parts if part)


def sharing(folder: Path, lora: Lora | None) -> dict[str, Any]:
    """A policy that a critic shares: an update, a checkpoint, another layout, an update of both, and an export."""
    name = f"shared_{'lora' if lora else 'full'}"
    kept = LossConfig(value_coef=0.5, kl_coef=0.0)
    trained, reloaded = (make_policy(folder / "model", layout, None, lora, loss=kept) for layout in (FIRST, SECOND))
    _, rollouts, _ = make_loss("value", make_rollouts(trained.arch.vocab))
    new, loss = everywhere(trained), PolicyAndValueLoss(kept)
    learn(trained, rollouts, loss, each=3)
    save(trained, folder / name)
    checkpoints, loaded = [name], 0.0
    if lora is None:
        checkpoints.append(f"{name}_cut")
        if world().rank == 0:
            reshard(folder / name, folder / checkpoints[1], TrainerLayout(tp=2), model=folder / "model")
        dist.barrier()
    for checkpoint in checkpoints:
        reloaded.state.load(folder / checkpoint)
        loaded = max(loaded, (everywhere(trained) - everywhere(reloaded)).abs().max().item())
    a, b = learn(trained, rollouts, loss), learn(reloaded, rollouts, loss)
    ours, theirs, head = dict(trained.export.weights()), dict(reloaded.export.weights()), everywhere(trained)
    export_model(world(), reloaded.export, reloaded.role.model, folder / f"{name}_model")
    plain = make_policy(folder / "model", FIRST, None, lora)
    save(plain, folder / f"{name}_plain")
    messages = []
    for policy, checkpoint in ((plain, name), (trained, f"{name}_plain")):
        try:
            policy.state.load(folder / checkpoint)
        except ConfigError as error:
            messages.append(str(error))
    return {
        "loaded": loaded,
        "weights": max((ours[n] - theirs[n]).abs().max().item() for n in ours),
        "head": (head - everywhere(reloaded)).abs().max().item(),
        "moved": (head - new).abs().max().item(),
        "metrics": max(abs(a[n] - b[n]) for n in ("loss", "grad_norm", "value", "value_error", "entropy", "ratio")),
        "exported": [n for n in (*ours, *trained.export.shards(), *trained.export.adapter()) if "value_head" in n],
        "refused": messages,
    }


def overlapped(folder: Path) -> float:
    """The largest difference that overlapped sums and gathers make to weights after three optimizer steps on two
    replicas. Every parameter is gathered on its own, so that the head must wait for its weight itself."""
    weights = []
    pieces = functools.partial(optimizer.DistributedDataParallelConfig, bucket_size=1)
    for overlap in (False, True):
        with patch.object(optimizer, "DistributedDataParallelConfig", pieces):
            policy = make_policy(folder / "model", {}, "value", overlap=overlap)
        loss, rollouts, _ = make_loss("value", make_rollouts(policy.arch.vocab))
        assert learn(policy, rollouts, loss, each=3)["optimizer_steps"] == 3
        weights.append(dict(policy.export.weights()))
    return max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0])


def refusals(folder: Path) -> list[str]:
    """What is said of a checkpoint with a head in a role without one, and the other way round."""
    role = RoleConfig(model=Model(path=str(folder / "model")), layout=Layout(**FIRST))
    language, critic = MegatronPolicy(role, parallel.create(role.layout)), make_policy(folder / "model", FIRST, "value")
    untied = RoleConfig(model=Model(path=str(folder / "untied_model")), layout=Layout(**FIRST))
    save(MegatronPolicy(untied, parallel.create(role.layout)), folder / "untied")
    messages = []
    for policy, checkpoint in ((language, "checkpoint_value"), (critic, "untied"), (critic, "checkpoint_value_lora")):
        try:
            policy.state.load(folder / checkpoint)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def main() -> None:
    output_path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lora = Lora(rank=3, alpha=7.0)
    answers = {
        "value": crossing(folder, "value", None),
        "value_lora": crossing(folder, "value", lora),
        "score": crossing(folder, "score", None, dtype="bfloat16"),
        "refused": refusals(folder),
        "overlapped": overlapped(folder),
        "shared_full": sharing(folder, None),
        "shared_lora": sharing(folder, lora),
    }
    dist.barrier()
    # the adapter that was written begins another run, on one layout's ranks, with the same values
    begun = Lora(rank=3, alpha=7.0, path=str(folder / "adapter_value_lora"))
    again = make_policy(folder / "model", FIRST, "value", begun)
    loss, rollouts, _ = make_loss("value", make_rollouts(again.arch.vocab))
    work, index = work_of(again, rollouts, loss)
    save_file({"values": values_of(again, work, index)}, folder / f"again_{world().rank}.safetensors")
    output_path.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
