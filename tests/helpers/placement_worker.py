"""Runs on every rank: roles on ranks of their own are updated, saved, loaded and refitted, each as soon as its ranks
come to it."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from layouts_worker import WeightedLogprobs, make_rollouts

from megatron_rl.config.model import Layout, Model, Optimizer
from megatron_rl.config.run import Run
from megatron_rl.config.schema import RefitConfig
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.embedded.engine_weights import WeightSlots
from megatron_rl.megatron import optimizer
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.session import builders
from megatron_rl.spec.run_spec import RoleSpec
from megatron_rl.training.update import Trainee, update
from megatron_rl.weights.rank_layouts import EngineLayout

RUN = Run(name="placement")


def main(
    output_path: Path, models: str, roles: dict[str, Any], meeting: list[str], refitted: str, other: list[str]
) -> list[dict[str, Any]]:
    """Returns what this rank finds of the roles in one world, and of each role alone in a world of the role's size.

    The same processes do both, because a process that saves starts another one, which imports torch for five seconds.
    """
    gc.freeze()  # core collects garbage at each save and load, which takes 0.8 s with all the imported modules
    dist.init_process_group("gloo")
    rank, together = dist.get_rank(), output_path.parent / "together"
    if rank == 0:
        together.mkdir()
    found = [use_all(together, models, roles, meeting, refitted, other), dict[str, Any]()]
    for name, role in roles.items():
        size, store = role["ranks"][1] - role["ranks"][0] + 1, output_path.parent / f"{name}.store"
        if rank < size:
            dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
            found[1][name] = use(name, open_policies(models, {name: role}, None)[name], output_path.parent)
            dist.barrier()
            dist.destroy_process_group()
    return found


def use_all(
    folder: Path, models: str, roles: dict[str, Any], meeting: list[str], refitted: str, other: list[str]
) -> dict[str, Any]:
    """All roles in one world, each on its `ranks` (first, last). The roles `meeting` wait for one another in the middle
    of their updates. The role `refitted` sends its weights to embedded engines, and the second role of `other` loads
    the checkpoint of the first. Returns {role: what `use` returns} of the roles of this rank, and ends the world."""
    ranks = {name: range(role["ranks"][0], role["ranks"][1] + 1) for name, role in roles.items()}
    policies = open_policies(models, roles, ranks)
    assert [*policies] == [name for name in roles if dist.get_rank() in ranks[name]]
    answers = {name: use(name, policy, folder, meeting if name in meeting else ()) for name, policy in policies.items()}
    if refitted in policies:
        answers[refitted]["refit"] = refit(policies[refitted])
    dist.barrier()
    if other[1] in policies:
        policies[other[1]].state.load(folder / f"{other[0]}_0")
        answers[other[1]]["other_ranks"] = exported(policies[other[1]])
    dist.barrier()
    dist.destroy_process_group()
    return answers


def open_policies(models: str, roles: dict[str, Any], ranks: Mapping[str, range] | None) -> dict[str, MegatronPolicy]:
    specs = {
        name: RoleSpec(
            name=name, owner=name, servers=name, model=Model(path=f"{models}/{role['family']}", dtype="float32"),
            layout=Layout(**role["layout"]), optimizer=Optimizer(lr=1e-2, clip_grad=0.5), micro_batch_tokens=64,
        )
        for name, role in roles.items()
    }  # fmt: skip
    return builders.policies(specs, [*specs], RUN, ranks=ranks)


def use(name: str, policy: MegatronPolicy, folder: Path, meeting: Collection[str] = ()) -> dict[str, Any]:
    """Updates a policy, saves it in the foreground, updates it again, saves it in the background, and loads both
    checkpoints. Collective over the policy's ranks."""
    world, groups = World(group=policy.groups.control), policy.groups
    assert (world.rank in groups.replicas.reporters) == groups.reports
    assert groups.replicas.of(world.rank) == groups.dp.rank()
    trainee = Trainee(policy=policy, loss=WeightedLogprobs(), samples_per_optimizer_step=4)
    rollouts = make_rollouts(policy.arch.vocab) if world.rank == 0 else None
    answer: dict[str, Any] = {"updates": [], "saved": [], "loaded": [], "files": []}
    for version, background in enumerate((False, True)):
        answer["updates"] += [update(world, trainee, rollouts)[metric] for metric in ("loss", "grad_norm")]
        if version == 0:
            answer["exported"] = exported(policy)
            meet(name, meeting)
        place = folder / f"{name}_{version}"
        if world.rank == 0:
            place.mkdir()
        world.barrier()
        policy.state.save(place, background=background)
        answer["saved"].append(digest(policy))
    assert policy.state.saved(wait=True)
    for version in range(2):
        with torch.no_grad():
            for parameter in policy.trained():
                parameter.zero_()
        optimizer.restart(policy.optimizer)
        policy.state.load(folder / f"{name}_{version}")
        answer["loaded"].append(digest(policy))
        answer["files"].append(sorted(file.name for file in (folder / f"{name}_{version}").glob("*.distcp")))
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    parts = optimizer.parts(policy.optimizer)
    answer["group_keys"] = [[[group[key] for key in keys] for group in part.param_groups] for part in parts]
    return answer


def meet(name: str, names: Collection[str]) -> None:
    """Waits until all roles `names` are in the middle of their updates."""
    if names:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"met {name}", "")
        store.wait([f"met {other}" for other in names])


def digest(policy: MegatronPolicy) -> str:
    """Returns a checksum of this rank's weights and Adam moments."""
    found = hashlib.sha256()
    for name, parameter in policy.named().items():
        found.update(name.encode() + parameter.detach().numpy().tobytes())
    for part in optimizer.parts(policy.optimizer):
        for state in part.optimizer.state.values():
            found.update(state["exp_avg"].numpy().tobytes() + state["exp_avg_sq"].numpy().tobytes())
    return found.hexdigest()


def exported(policy: MegatronPolicy) -> str:
    """Returns a checksum of the whole weights, which no layout changes. Collective over the policy's ranks."""
    found = hashlib.sha256()
    for name, tensor in sorted(policy.export.weights()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def refit(policy: MegatronPolicy) -> dict[str, Any]:
    """Sends a policy's weights to an embedded engine on each of its ranks. Returns how often the elements landed here
    (fewest, most), and whether the engine then held the weights. Collective over the policy's ranks."""
    layout = EngineLayout(tp=1, replicas=policy.groups.control.size(), whole=True)
    topology = Topology(sizes=policy.arch, trainer=policy.export.trainer_layout, engines=layout, dtype="float32")
    engine = EmbeddedEngine(policy.role.model.path)
    side = TrainerSide(
        topology, RefitConfig(verify="full"), policy.export.shards(), group=policy.groups.control, endpoint=engine
    )
    weights = {name: t if t.dim() > 1 else t[:, None] for name, t in policy.export.weights()}
    landings, write = {name: torch.zeros(t.shape) for name, t in weights.items()}, WeightSlots.write

    def counted(slots: WeightSlots, name: str, part: tuple[int, int, int, int], values: torch.Tensor) -> None:
        row, column, rows, columns = part
        landings[name][row : row + rows, column : column + columns] += 1
        write(slots, name, part, values)

    with mock.patch.object(WeightSlots, "write", counted):
        side(0)
    side.close()
    counts = torch.cat([count.flatten() for count in landings.values()])
    return {
        "landings": [counts.min().item(), counts.max().item()],
        "equal": engine.version == 0
        and all(torch.equal(engine.targets.read(name, (0, 0, *t.shape)), t) for name, t in weights.items()),
    }
