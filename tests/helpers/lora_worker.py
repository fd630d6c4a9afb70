"""Runs on every rank: policies with adapters against what lora_reference.py computed with peft, and against each other.

`lora_worker.py OUT FOLDER CASES`: FOLDER/NAME is a model, FOLDER/NAME.REFERENCE what peft computed of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts_worker import (
    DECAY,
    LR,
    WeightedLogprobs,
    learn,
    logits_error,
    logprobs_of,
    make_rollouts,
    whole_gradients,
    work_of,
    world,
)
from lora_reference import ALPHA, RANK
from process_groups import apart
from safetensors.torch import load_file

from megatron_rl.batches.packed_batch import statistics_needed
from megatron_rl.config.schema import ConfigError, Layout, Lora, LossConfig, Model, Optimizer, RefitConfig, RoleConfig
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.megatron import offload, optimizer, parallel, pipeline_pass
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.weights import hf_model, lora_adapters, tensor_copies
from megatron_rl.weights.dist_checkpoint import DistCheckpoint
from megatron_rl.weights.rank_layouts import EngineLayout


def make_role(path: str, case: dict[str, Any], lora: Lora | None) -> RoleConfig:
    return RoleConfig(
        model=Model(path=path, dtype=case.get("dtype", "float32"), recompute=case.get("recompute", "none")),
        layout=Layout(**case.get("layout", {})),
        optimizer=Optimizer(lr=LR, weight_decay=DECAY, eps=1e-4, overlap=case.get("overlap", False)),
        loss=LossConfig(kl_coef=0.001),
        micro_batch_tokens=60,
        lora=lora,
    )


def make_policy(path: str, case: dict[str, Any], lora: Lora | None, **settings: Any) -> MegatronPolicy:
    role = make_role(path, case, lora)
    return MegatronPolicy(role, parallel.create(role.layout), **settings)


def gradient_error(policy: MegatronPolicy, work: Any, reference: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of this rank's gradients of A and B from peft's, after a backward pass."""
    loss, worst = WeightedLogprobs(), 0.0
    with policy.active():
        optimizer.zero_grad(policy.chunks, policy.optimizer)
        scale = policy.groups.dp_size / work.steps[0].denominator
        policy._run(
            work, 0, pipeline_pass.Pass(names=statistics_needed(loss.needs), loss=loss, scale=scale, backward=True)
        )
        whole_gradients(policy)
    for name, parameter in policy.adapters.named.items():
        _, rects = lora_adapters.held(policy.arch, name, policy.groups.shard, RANK)
        want = torch.zeros_like(parameter)
        tensor_copies.fill(
            want, rects, lambda rect: tensor_copies.from_tensor(reference[f"gradient/{rect.tensor}"], rect)
        )
        error = (parameter.main_grad.view_as(want) - want).abs().max().item()
        worst = max(worst, error)
        if error > 1e-5:
            print(f"rank {dist.get_rank()} {name}: gradient error {error:.1e} of {want.abs().max():.1e}", flush=True)
    return worst


def parity(path: str, folder: Path, case: dict[str, Any]) -> dict[str, float]:
    """Compares one policy with peft: before a step, after it, and merged."""
    expected = load_file(folder / "reference.safetensors")
    policy = make_policy(path, case, begun(folder))
    rollouts, loss = make_rollouts(policy.arch.vocab), WeightedLogprobs()
    work, index = work_of(policy, rollouts, loss)
    base = {name: tensor.clone() for name, tensor in policy.export.shards().items()}
    merged = dict(hf_model.read_tensors(folder / "merged"))
    now = dict(policy.export.weights())
    errors = {
        "merged": max((now[name] - merged[name]).abs().max().item() for name in now),
        "logprobs": (logprobs_of(policy, rollouts) - expected["logprobs"]).abs().max().item(),
        "logits": logits_error(policy, work, index, expected["logits"]),
        "loss_forward": abs(policy.evaluate(work, loss)["loss"] - expected["loss"].item()),
        "gradients": gradient_error(policy, work, expected),
    }
    metrics = policy.update(work, 0, loss)
    errors["loss"] = abs(metrics["loss"] - expected["loss"].item())
    errors["grad_norm"] = abs(metrics["grad_norm"] - expected["norm"].item()) / max(1.0, expected["norm"].item())
    trained = policy.export.adapter()
    errors["names"] = float({f"after/{name}" for name in trained} != {n for n in expected if n.startswith("after/")})
    errors["weights"] = max((trained[name] - expected[f"after/{name}"]).abs().max().item() for name in trained)
    errors["moved"] = distance(trained, load_file(folder / "start" / "adapter_model.safetensors"))
    errors["largest_gradient"] = max(t.abs().max().item() for n, t in expected.items() if n.startswith("gradient/"))
    errors["base"] = float(any(not torch.equal(base[name], tensor) for name, tensor in policy.export.shards().items()))
    # the reference is the policy's start, also after the step
    reference = logprobs_of(policy, rollouts, reference=True)
    errors["reference"] = (reference - expected["logprobs"]).abs().max().item()
    # gradients and moments are of adapters alone, but for what core fills its buffers up with
    elements = sum(p.numel() for p in policy.adapters.named.values())
    errors["gradient_numbers"] = offload.gradient_bytes(policy.chunks) / 4 - elements
    held = sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"])
    errors["optimizer_numbers"] = float(held - elements)
    return errors


def begun(folder: Path, **settings: Any) -> Lora:
    """Returns settings of adapters that begin as lora_reference.py made them."""
    targets = tuple(json.loads((folder / "start" / "adapter_config.json").read_text())["target_modules"])
    return Lora(rank=RANK, alpha=ALPHA, targets=targets, path=str(folder / "start"), **settings)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference between tensors of the same names."""
    return max((a[name] - b[name]).abs().max().item() for name in a | b)


def checkpoints(path: str, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Saves under one layout, loads under another, and goes on; then loads what must be refused."""
    target, lora = Path(case["directory"]) / case["name"], begun(folder)
    policy = make_policy(path, case, lora)
    for _ in range(2):
        learn(policy)
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    policy.state.save(target, background=True)
    stands = policy.export.adapter()
    learn(policy)
    policy.state.saved(wait=True)
    distances: dict[str, Any] = {"stored": sorted(DistCheckpoint(target).shapes)[:400]}
    distances["written"] = distance(load_file(target / "adapter" / "adapter_model.safetensors"), stands)
    policy.state.load(target)
    reloaded = make_policy(path, {"layout": case["other"]}, lora)
    reloaded.state.load(target)
    distances["loaded"] = distance(policy.export.adapter(), reloaded.export.adapter()) + distance(
        policy.export.adapter(), stands
    )
    for _ in range(2):
        learn(policy)
        learn(reloaded)
    distances["after"] = distance(policy.export.adapter(), reloaded.export.adapter())
    distances["moved"] = distance(policy.export.adapter(), stands)
    distances["refused"] = []
    for change in ({"rank": 4}, {"alpha": 1.0}, {"targets": ("q_proj",)}):
        distances["refused"].append(refusal(path, replace(lora, path=None, **change), target))
    distances["refused"].append(refusal(str(Path(path).parent / case["others"]), replace(lora, path=None), target))
    distances["refused"].append(refusal(path, None, target))
    return distances


def refusal(path: str, lora: Lora | None, directory: Path) -> str:
    """Returns what a policy says to a checkpoint that is not its own."""
    try:
        make_policy(path, {}, lora).state.load(directory)
    except ConfigError as error:
        return str(error)
    return "loaded"


def refits(path: str, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Brings engines in the same ranks to the merged weights, before and after an update."""
    policy = make_policy(path, case, begun(folder))
    engines = EngineLayout(replicas=dist.get_world_size(), whole=True)
    dtype = case.get("dtype", "float32")
    topology = Topology(sizes=policy.arch, trainer=policy.export.trainer_layout, engines=engines, dtype=dtype)
    engine = EmbeddedEngine(path, dtype=getattr(torch, dtype))
    side = TrainerSide(
        topology, RefitConfig(**case["settings"]), policy.export.shards(), group=policy.groups.control, endpoint=engine,
        added=policy.export.added,
    )  # fmt: skip
    equal, previous = [], None
    for version in range(2):
        side(version)
        merged = {name: t if t.dim() > 1 else t[:, None] for name, t in policy.export.weights()}
        held = {name: engine.targets.read(name, (0, 0, *t.shape)) for name, t in merged.items()}
        equal.append(all(torch.equal(held[name], merged[name]) for name in merged))
        equal.append(previous is None or any(not torch.equal(previous[name], merged[name]) for name in merged))
        previous = {name: t.clone() for name, t in merged.items()}
        learn(policy)
    side.close()
    return {"equal": equal}


def fresh(path: str, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Makes adapters that begin anew: ranks of any layout draw the same A, and the model is what it was."""
    policy = make_policy(path, case, Lora(rank=RANK, init=case["init"]), seed=5)
    plain = make_policy(path, case, None, trainable=False)
    rollouts = make_rollouts(policy.arch.vocab)
    gap = (logprobs_of(policy, rollouts) - logprobs_of(plain, rollouts)).abs().max().item()
    start = policy.export.adapter()
    figures = {"gap": gap, "zero": max(t.abs().max().item() for n, t in start.items() if "lora_B" in n)}
    drawn = {name: t for name, t in start.items() if "lora_A" in name}
    figures["deviation"] = torch.cat([t.flatten() for t in drawn.values() if t.shape[1] == 64]).std().item()
    figures["sums"] = [round(t.double().sum().item(), 9) for t in drawn.values()]
    learn(policy)
    figures["reference"] = (
        (logprobs_of(policy, rollouts, reference=True) - logprobs_of(plain, rollouts)).abs().max().item()
    )
    figures["moved"] = distance(policy.export.adapter(), start)
    return figures


def main() -> None:
    output_path, folder, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers: dict[str, Any] = {}
    world()  # made once, before the groups that end
    for case in cases:
        path = str(folder / case["model"])
        run = RUNS[case.get("run", "parity")]
        answers[case["name"]] = apart(run, path, folder / f"{case['model']}.{case.get('told', 'all')}", case)
    output_path.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def roles(path: str, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Two roles that take turns on one model give what each gives alone."""
    first, second = begun(folder), Lora(rank=2, targets=("q_proj", "down_proj"))
    alone = []
    for lora, seed in ((first, 0), (second, 1)):
        policy = make_policy(path, case, lora, seed=seed)
        for _ in range(3):
            metrics = learn(policy)
        alone.append((policy.export.adapter(), dict(policy.export.weights()), metrics))
    a = make_policy(path, case, first)
    b = make_policy(path, case, second, seed=1, base=a)
    for _ in range(3):
        learned = [learn(a), learn(b)]
    figures = {
        "adapters": [distance(p.export.adapter(), trained[0]) for p, trained in zip((a, b), alone, strict=True)],
        "merged": [distance(dict(p.export.weights()), trained[1]) for p, trained in zip((a, b), alone, strict=True)],
        "metrics": [learned[i]["grad_norm"] == alone[i][2]["grad_norm"] for i in range(2)],
        "apart": distance(dict(a.export.weights()), dict(b.export.weights())),
        "shared": [p.data_ptr() for p in a.export.shards().values()]
        == [p.data_ptr() for p in b.export.shards().values()],
    }
    target = Path(case["directory"]) / case["name"]
    for name, policy in (("a", a), ("b", b)):
        if dist.get_rank() == 0:
            (target / name).mkdir(parents=True)
        dist.barrier()
        policy.state.save(target / name)
    stands = [a.export.adapter(), b.export.adapter()]
    a.memory.sleep(), learn(b), a.memory.wake(), learn(a)
    moved = [a.export.adapter(), b.export.adapter()]
    for name, policy in (("a", a), ("b", b)):
        policy.state.load(target / name)
    figures["loaded"] = [distance(p.export.adapter(), was) for p, was in zip((a, b), stands, strict=True)]
    learn(a), learn(b)
    figures["again"] = [distance(p.export.adapter(), was) for p, was in zip((a, b), moved, strict=True)]
    return figures


def digests(path: str, folder: Path, case: dict[str, Any]) -> list[str]:
    """Writes the adapter twice, and changes a file of the base in between. Returns the digests of the base."""
    place = Path(case["directory"]) / case["name"]
    if dist.get_rank() == 0:
        shutil.copytree(path, place / "model")
    dist.barrier()
    policy = make_policy(str(place / "model"), case, begun(folder))
    policy.export.write_adapter(place / "first")
    if dist.get_rank() == 0:
        with (place / "model/model.safetensors").open("ab") as file:
            file.write(bytes(8))
    dist.barrier()
    policy.export.write_adapter(place / "second")
    dist.barrier()
    return [json.loads((place / name / lora_adapters.BASE).read_text())["digest"] for name in ("first", "second")]


RUNS = {
    "digests": digests,
    "roles": roles,
    "parity": parity,
    "checkpoints": checkpoints,
    "refits": refits,
    "fresh": fresh,
}

if __name__ == "__main__":
    main()
