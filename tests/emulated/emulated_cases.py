"""What the tests run on the pretended CUDA device, in a fork of emulated_server.py.

Every case names its parts for the ledger, so that waits and kernels are told apart by what the program did.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from emulated_device import LEDGER, allocated_bytes, watched_peak
from kit_cases import kit_benchmark, kit_quick, kit_smoke, kit_tests  # noqa: F401 (cases, found by name)
from layouts_worker import (
    WeightedLogprobs,
    gradient_error,
    learn,
    logprobs_of,
    make_loss,
    make_policy,
    make_rollouts,
    values_of,
    work_of,
)
from layouts_worker import reference as by_transformers
from prefixes_worker import make_groups
from prefixes_worker import make_policy as make_sharing
from tiny_models import make_model, make_scored
from torch.nn.attention import varlen

from megatron_rl.config.schema import Layout, LossConfig, Model, Optimizer, RefitConfig, RoleConfig
from megatron_rl.engines.embedded import cuda_graphs
from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.embedded.kv_cache import Cache
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.megatron import model as models
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.refit.checksums import checksums
from megatron_rl.refit.engine_side import EngineSide
from megatron_rl.refit.refit_store import Address, RefitStore
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.weights.dist_checkpoint import DistCheckpoint
from megatron_rl.weights.rank_layouts import EngineLayout

ROOT = Path(__file__).parents[2]
VOCAB = 97
# Cases that make no group, or one of their own.
ALONE = ("counting", "programs", "cuda_ipc", "kit_benchmark", "kit_quick", "kit_smoke", "kit_tests")


class Recorder(cuda_graphs.GraphRecorder):
    """Stands in for captures of CUDA graphs: a replay runs the step again, on the same memory, as a part whose waits
    nothing allows."""

    def rehearse(self, step: Callable[[], None]) -> None:
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            LEDGER.kernel("graph")  # one launch
            with LEDGER.part("replayed"):
                step()

        return replay


cuda_graphs.GraphRecorder = Recorder


def run(case: str, rank: int, ranks: int, own: Path, arguments: dict[str, Any]) -> Any:
    """Runs a case as one rank of a group, which is NCCL's for CUDA tensors as far as the program knows."""
    torch.set_num_threads(1)
    function = globals()[case]
    if case in ("programs", "kit_tests"):  # they find no launcher, and are ranks of their own
        return function(own, **arguments)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if case in ALONE:
        return function(own, **arguments)
    store = dist.FileStore(str(own / "ranks"), ranks)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks)
    answer = function(own, **arguments)
    dist.barrier()
    dist.destroy_process_group()
    return answer


def device(own: Path) -> dict[str, str]:
    """Does what a GPU refuses, and returns the errors."""
    here, there = torch.ones(3, device="cuda"), torch.ones(3)
    tries = {
        "add": lambda: here + there,
        "matrix product": lambda: torch.mm(here[None], there[:, None]),
        "stack": lambda: torch.stack([here, there]),
        "numpy": lambda: here.numpy(),
        "index of a CPU tensor": lambda: there[torch.tensor([0], device="cuda")],
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(
            *(x.view(1, 1, 3, 1) for x in (here, here, there))
        ),
        "gloo": lambda: dist.all_reduce(here, group=dist.new_group(backend="gloo")),
        "nccl": lambda: dist.all_reduce(there, group=dist.new_group(backend="nccl")),
        "pinned": lambda: there.expand(2, 3).pin_memory(),
    }
    errors = {}
    for name, function in tries.items():
        try:
            function()
        except (RuntimeError, TypeError) as error:
            errors[name] = str(error)
    return errors


def counting(own: Path) -> dict[str, Any]:
    """Does what makes the host wait, and what does not, in a module of the project's as far as the ledger knows."""
    source = (
        "import torch\n"
        "def act(LEDGER):\n"
        "    x, locked = torch.arange(6.0, device='cuda'), torch.ones(6).pin_memory()\n"
        "    def count(name, function):\n"
        "        with LEDGER.part(name):\n"
        "            function()\n"
        "    count('item', lambda: x[0].item())\n"
        "    count('bool', lambda: bool(x.sum() > 3))\n"
        "    count('mask', lambda: x[x > 2])\n"
        "    count('fill under a mask', lambda: x.clone().__setitem__(x > 2, 0.0))\n"
        "    count('list', lambda: torch.tensor([1, 2], device='cuda'))\n"
        "    count('pageable', lambda: torch.ones(6).to('cuda'))\n"
        "    count('pinned', lambda: locked.to('cuda', non_blocking=True))\n"
        "    count('pinned, blocking', lambda: locked.to('cuda'))\n"
        "    count('down', lambda: x.cpu())\n"
        "    count('down, pinned', lambda: locked.copy_(x, non_blocking=True))\n"
        "    count('to itself', lambda: x.to('cuda'))\n"
        "    count('index from the CPU', lambda: x[torch.tensor([0, 2])])\n"
        "    count('repeats', lambda: x.repeat_interleave(torch.ones(6, dtype=torch.int64, device='cuda')))\n"
        "    count('stream', lambda: torch.cuda.current_stream().synchronize())\n"
        "    count('products', lambda: (x[:, None] @ x[None]).relu())\n"
    )
    from emulated_ledger import WATCHED

    names: dict[str, Any] = {}
    exec(compile(source, f"{WATCHED['megatron_rl']}/acting.py", "exec"), names)
    names["act"](LEDGER)
    return {}


def make(own: Path, family: str, *, scored: bool = False, **sizes: Any) -> str:
    """Writes a tiny model of a family, and with `scored` one with a head, on the first rank. Returns its directory."""
    path = own / "model"
    if dist.get_rank() == 0:
        make_model(path, family, vocab_size=VOCAB, **sizes)
        if scored:
            make_scored(path)
    dist.barrier()
    return f"{path}_scored" if scored else str(path)


def actor(own: Path, family: str, case: dict[str, Any], sizes: dict[str, Any] | None = None) -> dict[str, float]:
    """Does with a policy what a run does, and compares with transformers on the CPU.

    `case` is as tests/helpers/layouts_worker.py has it. Returns the errors.
    """
    half, head = case.get("dtype") == "bfloat16", case.get("head")
    path = make(own, family, scored=head is not None, **(sizes or {}))
    loss, rollouts, _ = make_loss("weighted" if head is None else "value", make_rollouts(VOCAB))
    logprobs, expected_loss, entropy, gradients, after, norm, *_ = by_transformers(
        path, rollouts, loss, stored=torch.bfloat16 if half else torch.float32, head=head
    )
    with LEDGER.part("build"):
        policy = make_policy(path, case)
    work, index = work_of(policy, rollouts, loss)
    with LEDGER.part("statistics"):
        ours = logprobs_of(policy, rollouts) if head is None else values_of(policy, work, index)
    errors = {"logprobs": (ours - logprobs).abs().max().item()}
    with LEDGER.part("gradients"):
        largest = max(gradient.abs().max() for gradient in gradients.values())
        errors["gradients"] = gradient_error(policy, work, loss, gradients) / largest
    with LEDGER.part("update"):
        metrics = policy.update(work, 0, loss)
    errors["micro_batches"] = metrics["micro_batches"]
    errors["flash"] = LEDGER.kernels["update", "_varlen_attn"]
    errors["triton"] = sum(n for (part, name), n in LEDGER.kernels.items() if part == "update" and "triton" in name)
    errors["loss"] = abs(metrics["loss"] - expected_loss)
    with LEDGER.part("export"):
        now = {name: tensor.float() for name, tensor in policy.export.weights()}
    errors["weights"] = max((now[name] - after[name]).abs().max().item() for name in now)
    with LEDGER.part("reference"):
        first = logprobs if head is not None else logprobs_of(policy, rollouts, reference=True)
    errors["reference"] = (first - logprobs).abs().max().item()
    before, largest = allocated_bytes(), max(parameter.nbytes for parameter in policy.trained())
    with policy.active(), policy._weights_in_use(head is None):
        errors["swapped"] = max(0, allocated_bytes() - before - largest)
    errors |= {"fused": policy.fused, "fused_sums": fused_sums(policy), "unfused_attention": LEDGER.unfused}
    return {name: float(value) for name, value in errors.items()} | rests(own, policy)


def actor_of_torch_2_11(own: Path, **arguments: Any) -> dict[str, float]:
    """Does an actor's case with torch 2.11's function for sequences of varied lengths, as its body is there."""

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        ends, causal = (cu_seq_q, cu_seq_k, max_q, max_k), window_size == (-1, 0)
        return torch.ops.torch_attn._varlen_attn(query, key, value, *ends, causal, scale, list(window_size))[0]

    varlen.varlen_attn = varlen_attn
    return actor(own, **arguments)


def prefixes(
    own: Path, family: str, dtype: str, sizes: dict[str, Any] | None = None, layout: dict[str, Any] | None = None
) -> dict[str, float]:
    """Compares an update that computes shared prompts once with one that computes all of them."""
    path, found = make(own, family, **({"num_hidden_layers": 2} | (sizes or {}))), {}
    for shared in (True, False):
        with LEDGER.part("build"):
            policy = make_sharing(path, {"dtype": dtype, "layout": layout or {}}, shared=shared)
        rollouts = make_groups(VOCAB)
        with LEDGER.part("statistics"):
            logprobs = logprobs_of(policy, rollouts)
        work, _ = work_of(policy, rollouts, WeightedLogprobs())
        with LEDGER.part("update"):
            found[shared] = logprobs, policy.update(work, 0, WeightedLogprobs())
    (once, metrics), (whole, others) = found[True], found[False]
    return {
        "logprobs": (once - whole).abs().max().item(),
        "grad_norm": abs(metrics["grad_norm"] / others["grad_norm"] - 1),
        "shared_tokens": metrics["shared_tokens"],
        "flash": LEDGER.kernels["update", "_varlen_attn"],
        "fused": float(policy.fused),
    }


def fused_sums(policy: Any) -> float:
    """Returns the share of the layers' weights whose gradients the products themselves sum."""
    layers = [layer for chunk in policy.chunks for layer in models.unwrap(chunk).decoder.layers]
    linear = [
        one for layer in layers for one in layer.modules() if type(one).__name__.startswith(("TE", "Column", "Row"))
    ]
    linear = [one for one in linear if "Linear" in type(one).__name__]
    names = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")
    return sum(any(vars(one).get(name) for name in names) for one in linear) / len(linear)


def leave(own: Path, family: str, directory: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trains a bfloat16 model a little, saves it to a directory, and reads it there as `megatron-rl convert` does."""
    path = make(own, family, num_hidden_layers=2)
    policy = make_policy(path, {"layout": layout or {}, "dtype": "bfloat16"})
    learn(policy)
    target = Path(directory)
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    policy.state.save(target)
    weights = dict(policy.export.weights())
    read = dict(DistCheckpoint(target).tensors(policy.arch))
    if dist.get_rank() == 0:
        torch.save(weights, own / "weights.pt")
    same = read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in read)
    return {"read": float(same), "fused": float(policy.fused), "weights": str(own / "weights.pt")}


def come(own: Path, family: str, directory: str, weights: str) -> dict[str, float]:
    """Loads what `leave` left, and trains on."""
    path = make(own, family, num_hidden_layers=2)
    policy = make_policy(path, {"layout": {}, "dtype": "bfloat16"})
    policy.state.load(Path(directory))
    left, now = torch.load(weights), dict(policy.export.weights())
    loss = learn(policy)["loss"]
    same = left.keys() == now.keys() and all(torch.equal(left[name], now[name]) for name in left)
    return {"same": float(same), "fused": float(policy.fused), "loss": loss}


def trained(policy: Any) -> dict[str, float]:
    """Does one update, of several optimizer steps where they overlap."""
    with LEDGER.part("update"):
        kind = "weighted" if policy.role.head is None else "value"
        loss, rollouts, _ = make_loss(kind, make_rollouts(policy.arch.vocab))
        return learn(policy, rollouts, loss, each=3 if policy.role.optimizer.overlap else None)


def exported(policy: Any) -> dict[str, torch.Tensor]:
    """Returns the weights on the CPU."""
    with LEDGER.part("export"):
        return dict(policy.export.weights())


def rests(own: Path, policy: Any) -> dict[str, float]:
    """Puts a policy to sleep and wakes it, saves and loads it. Returns how far this changes it, and its memory."""
    held = torch.cuda.memory_allocated()
    before = exported(policy)
    with LEDGER.part("sleep"):
        policy.memory.sleep()
    asleep = torch.cuda.memory_allocated()
    with LEDGER.part("wake"):
        policy.memory.wake()
    awake = torch.cuda.memory_allocated()
    with LEDGER.part("leave"):
        policy.memory.sleep(weights=True)
        away = torch.cuda.memory_allocated()
        with policy.memory.present():
            present = torch.cuda.memory_allocated()
    policy.memory.wake()
    directory = own / "checkpoint"
    directory.mkdir(exist_ok=True)
    dist.barrier()
    with LEDGER.part("save"), watched_peak() as saving:
        policy.state.save(directory)
    first = trained(policy)
    kept = exported(policy)
    with LEDGER.part("load"):
        policy.state.load(directory)
    loaded = exported(policy)
    second = trained(policy)
    again = exported(policy)
    return {
        "held": float(held),
        "asleep": float(asleep),
        "awake": float(awake),
        "away": float(away),
        "present": float(present),
        "saving": float(saving.bytes),
        "loaded": max((before[name] - loaded[name]).abs().max().item() for name in before),
        "resumed": max((kept[name] - again[name]).abs().max().item() for name in kept),
        "resumed_loss": abs(first["loss"] - second["loss"]),
    }


def programs(own: Path, **commands: list[str]) -> dict[str, Any]:
    """Runs commands of the program one after the other in this process, each as a part. Returns their statuses, and
    how fast it was by the last line of supervised training."""
    from megatron_rl.main import main
    from megatron_rl.run.metrics import read_metrics

    os.chdir(ROOT)
    statuses: dict[str, Any] = {}
    for name, words in commands.items():
        with LEDGER.part(name):
            statuses[name] = main([word.replace("OWN", str(own)) for word in words])
    return statuses | {
        "connections": int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]),
        "cudnn_attention": int(torch.backends.cuda.cudnn_sdp_enabled()),
        "speed": dict(read_metrics(own / "sft")[-1].speed),
    }


def engine(own: Path, family: str, dtype: str = "float32", sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Lets the embedded engine write on the device and on the CPU, and scores what it wrote on both."""
    path = make(own, family, **(sizes or {}))
    kind = getattr(torch, dtype)
    with LEDGER.part("open"):
        here = EmbeddedEngine(path, dtype=kind, max_batch=12)
        here.load_pretrained()
    there = EmbeddedEngine(path, dtype=kind, max_batch=12, device=torch.device("cpu"))
    there.load_pretrained()
    prompts = [[3, 14, 15, 92, 65], [7] * 20, [1, 2, 3]]
    answer: dict[str, Any] = {"waits": {}}
    for name, sampling in (
        ("greedy", Sampling(max_tokens=12, temperature=0.0)),
        ("short", Sampling(max_tokens=6, n=4, seed=5)),
        ("long", Sampling(max_tokens=30, n=4, seed=5)),
    ):
        with LEDGER.part(name):
            found = complete(here, prompts, sampling)
        wanted = complete(there, prompts, sampling)
        pairs = [pair for a, b in zip(found, wanted, strict=True) for pair in zip(a, b, strict=True)]
        answer[name] = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in pairs) / len(pairs)
        answer["waits"][name] = LEDGER.waits_in(name)
    texts = [np.arange(20), np.arange(7)]
    with LEDGER.part("score"):
        scores = here.score(texts)
    errors = [abs(a - b).max() for a, b in zip(scores, there.score(texts), strict=True)]
    answer["replayed"] = LEDGER.kernels_in("replayed")
    answer["replays"] = sum(count for (_, operation), count in LEDGER.kernels.items() if operation == "graph")
    answer |= {"scores": float(max(errors)), "growth": growth(here._loaded())}
    return answer | {"unfused_attention": LEDGER.unfused}


def growth(decoder: Decoder) -> float:
    """Returns the most memory that a cache takes while it becomes twice as wide, as a multiple of what it then has."""
    before, seen, make_one = allocated_bytes(), [], decoder.new_layer_cache

    def watched(rows: int, width: int) -> torch.Tensor:
        made = make_one(rows, width)
        seen.append(allocated_bytes() - before)
        return made

    decoder.new_layer_cache = watched  # type: ignore[method-assign]
    cache = Cache(decoder, 4)
    for width in (64, 128):
        cache.reserve(width, used=4, slots=4)
    return max(seen) / (allocated_bytes() - before)


def refit(
    own: Path, family: str, dtype: str, layout: dict[str, Any] | None = None, sizes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Brings an engine of this process to a policy's weights, before and after an update, with and without deltas."""
    path = make(own, family, **(sizes or {}))
    role = RoleConfig(
        model=Model(path=path, dtype=dtype), layout=Layout(**(layout or {})), loss=LossConfig(kl_coef=0.0),
        optimizer=Optimizer(lr=1e-2), micro_batch_tokens=60,
    )  # fmt: skip
    with LEDGER.part("build"):
        policy = MegatronPolicy(role, parallel.create(role.layout))
    made = EmbeddedEngine(path, dtype=getattr(torch, dtype))
    holdings = EngineLayout(replicas=policy.export.trainer_layout.world, whole=True)
    topology = Topology(sizes=policy.arch, trainer=policy.export.trainer_layout, engines=holdings, dtype=dtype)
    with LEDGER.part("refit"):
        side = TrainerSide(
            topology, RefitConfig(verify="full"), policy.export.shards(), group=policy.groups.control, endpoint=made
        )
    rollouts, gaps = make_rollouts(VOCAB), []
    for version in range(2):
        with LEDGER.part("refit"):
            side(version)
        gaps.append(gap(policy, made, rollouts))
        trained(policy)
    side.close()
    return {"gaps": gaps, "version": made.version}


def sums(own: Path) -> dict[str, Any]:
    """Computes checksums of slices on the GPU and in pinned memory of the host, as a vLLM server with experts has."""
    plain, experts = torch.randn(7, 5, device="cuda"), torch.randn(6, 4).bfloat16().pin_memory()
    with LEDGER.part("sums"):
        found = checksums([plain, experts[2:5], plain[:, 1:4]], torch.bfloat16, "device", torch.device("cuda:0"))
    cpu = [plain.cpu(), experts[2:5], plain[:, 1:4].cpu()]
    wanted = checksums(cpu, torch.bfloat16, "device", torch.device("cpu"))
    return {"device": found.device.type, "same": found.tolist() == wanted.tolist(), "waits": LEDGER.waits_in("sums")}


def gap(policy: MegatronPolicy, made: EmbeddedEngine, rollouts: Any) -> float:
    """Returns the largest difference of log-probs between a policy and an engine that has its weights."""
    with LEDGER.part("statistics"):
        ours, worst, place = logprobs_of(policy, rollouts), 0.0, 0
    for rollout in rollouts:
        count, prompt = len(rollout.tokens), int(rollout.spans[0][1])
        with LEDGER.part("score"):
            theirs = made.score([rollout.tokens])[0]
        own = ours[place : place + count - 1].numpy()
        worst = max(worst, float(abs(theirs[prompt:] - own[prompt - 1 :]).max()))
        place += count
    return worst


def cuda_ipc(own: Path, versions: int = 3) -> dict[str, Any]:
    """A trainer in one process, an engine in another, on one GPU: messages lie in memory that both open."""
    own.mkdir(exist_ok=True)
    rank, path = int(os.environ["RANK"]), own / "model"
    if rank == 0:
        make_model(path, "qwen2", vocab_size=VOCAB)
        return ipc_trainer(own, path, versions)
    file, version = own / "store.json", None
    while not file.exists():
        time.sleep(0.02)
    made = EmbeddedEngine(path, dtype=torch.bfloat16)
    with LEDGER.part("take part"):
        side = EngineSide(RefitStore.join(Address(*json.loads(file.read_text()))), 0, made, torch.device("cuda:0"))
        while version != versions - 1:
            version = side.take_part(1.0) if version is None else side.take_part(1.0) or version
    with LEDGER.part("score"):
        scores = np.concatenate(made.score([r.tokens for r in make_rollouts(VOCAB)]))
    (own / "seen").touch()
    side.close()
    return {"version": version, "scores": scores.tolist(), "kinds": []}


def ipc_trainer(own: Path, path: Path, versions: int) -> dict[str, Any]:
    """The trainer's side of `cuda_ipc`."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    role = RoleConfig(
        model=Model(path=str(path), dtype="bfloat16"), loss=LossConfig(kl_coef=0.0), micro_batch_tokens=60
    )
    with LEDGER.part("build"):
        policy = MegatronPolicy(role, parallel.create(role.layout))
    holdings = EngineLayout(replicas=1, whole=True)
    topology = Topology(sizes=policy.arch, trainer=policy.export.trainer_layout, engines=holdings, dtype="bfloat16")
    with LEDGER.part("send"):
        side = TrainerSide(topology, RefitConfig(verify="full"), policy.export.shards(), group=policy.groups.control)
        (own / "store.part").write_text(json.dumps(side.address))
        (own / "store.part").rename(own / "store.json")
        for version in range(versions):
            side(version)
            if version < versions - 1:
                trained(policy)
    kinds = side._wiring.kinds if side._wiring is not None else []
    side.close()
    while not (own / "seen").exists():
        time.sleep(0.02)
    dist.destroy_process_group()
    return {"version": versions - 1, "kinds": kinds}
