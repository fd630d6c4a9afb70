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
    own = make_policy(folder / "model", FIRST, head, lora, **model)
    loss, rollouts, _ = make_loss("value", make_rollouts(own.arch.vocab))
    start = {name: tensor.clone() for name, tensor in own.export.weights()}
    first = learn(own, rollouts, loss, each=3)
    checkpoint = folder / f"checkpoint_{name}"
    save(own, checkpoint)
    other = make_policy(folder / "model", SECOND, head, lora, **model)
    new = {name: tensor.clone() for name, tensor in other.export.weights()}
    other.state.load(checkpoint)
    a, b = learn(own, rollouts, loss), learn(other, rollouts, loss)
    ours, theirs = dict(own.export.weights()), dict(other.export.weights())
    export_model(world(), other.export, other.role.model, folder / name)
    other.export.write_adapter(folder / f"adapter_{name}")
    work, index = work_of(other, rollouts, loss)
    values = values_of(other, work, index)
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
    own, other = (make_policy(folder / "model", layout, None, lora, loss=kept) for layout in (FIRST, SECOND))
    _, rollouts, _ = make_loss("value", make_rollouts(own.arch.vocab))
    new, loss = everywhere(own), PolicyAndValueLoss(kept)
    learn(own, rollouts, loss, each=3)
    save(own, folder / name)
    checkpoints, loaded = [name], 0.0
    if lora is None:
        checkpoints.append(f"{name}_cut")
        if world().rank == 0:
            reshard(folder / name, folder / checkpoints[1], TrainerLayout(tp=2), model=folder / "model")
        dist.barrier()
    for checkpoint in checkpoints:
        other.state.load(folder / checkpoint)
        loaded = max(loaded, (everywhere(own) - everywhere(other)).abs().max().item())
    a, b = learn(own, rollouts, loss), learn(other, rollouts, loss)
    ours, theirs, head = dict(own.export.weights()), dict(other.export.weights()), everywhere(own)
    export_model(world(), other.export, other.role.model, folder / f"{name}_model")
    plain = make_policy(folder / "model", FIRST, None, lora)
    save(plain, folder / f"{name}_plain")
    said = []
    for policy, checkpoint in ((plain, name), (own, f"{name}_plain")):
        try:
            policy.state.load(folder / checkpoint)
        except ConfigError as error:
            said.append(str(error))
    return {
        "loaded": loaded,
        "weights": max((ours[n] - theirs[n]).abs().max().item() for n in ours),
        "head": (head - everywhere(other)).abs().max().item(),
        "moved": (head - new).abs().max().item(),
        "metrics": max(abs(a[n] - b[n]) for n in ("loss", "grad_norm", "value", "value_error", "entropy", "ratio")),
        "exported": [n for n in (*ours, *own.export.shards(), *own.export.adapter()) if "value_head" in n],
        "refused": said,
    }


def overlapped(folder: Path) -> float:
    """The largest difference that overlapped sums and gathers make to weights after three optimizer steps on two
    replicas. Every parameter is gathered on its own, so that the head must wait for its weight itself."""
    after = []
    pieces = functools.partial(optimizer.DistributedDataParallelConfig, bucket_size=1)
    for overlap in (False, True):
        with patch.object(optimizer, "DistributedDataParallelConfig", pieces):
            policy = make_policy(folder / "model", {}, "value", overlap=overlap)
        loss, rollouts, _ = make_loss("value", make_rollouts(policy.arch.vocab))
        assert learn(policy, rollouts, loss, each=3)["optimizer_steps"] == 3
        after.append(dict(policy.export.weights()))
    return max((after[0][name] - after[1][name]).abs().max().item() for name in after[0])


def refusals(folder: Path) -> list[str]:
    """What is said of a checkpoint with a head in a role without one, and the other way round."""
    role = RoleConfig(model=Model(path=str(folder / "model")), layout=Layout(**FIRST))
    language, critic = MegatronPolicy(role, parallel.create(role.layout)), make_policy(folder / "model", FIRST, "value")
    untied = RoleConfig(model=Model(path=str(folder / "untied_model")), layout=Layout(**FIRST))
    save(MegatronPolicy(untied, parallel.create(role.layout)), folder / "untied")
    said = []
    for policy, checkpoint in ((language, "checkpoint_value"), (critic, "untied"), (critic, "checkpoint_value_lora")):
        try:
            policy.state.load(folder / checkpoint)
        except ConfigError as error:
            said.append(str(error))
    return said


def main() -> None:
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
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
    told = Lora(rank=3, alpha=7.0, path=str(folder / "adapter_value_lora"))
    again = make_policy(folder / "model", FIRST, "value", told)
    loss, rollouts, _ = make_loss("value", make_rollouts(again.arch.vocab))
    work, index = work_of(again, rollouts, loss)
    save_file({"values": values_of(again, work, index)}, folder / f"again_{world().rank}.safetensors")
    out.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
