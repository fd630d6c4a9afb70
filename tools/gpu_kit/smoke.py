"""Tries each part of the project that needs a real GPU, alone, and records its time and its error. Takes a minute.

    PYTHONPATH=.gpu-kit/site:.:benchmarks:tests/helpers python3 tools/gpu_kit/smoke.py OUT.json [--budget S]

A check that fails does not stop the others. OUT.json is written after every check. `--tiny` takes small tensors, for a
machine without a GPU (tests/emulated).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue as queues
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_kit import clock, subjects
from torch import Tensor

from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.megatron.adam import FusedAdam
from megatron_rl.megatron.kernels import choice, varlen
from megatron_rl.megatron.kernels.products import add_product
from megatron_rl.megatron.vocab_statistics import vocab_parallel_statistics
from megatron_rl.refit.nccl_transport import Nccl
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.shared_memory_transport import CudaIpc
from megatron_rl.refit.transport import Deadline, TransportError

MESSAGE = 1 << 20  # bytes of a message between processes


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the tensors of all checks."""

    tiny: bool
    rows: int  # tokens of a product and of the head
    hidden: int
    inner: int  # width of the MLP
    vocab: int
    lengths: tuple[int, ...]  # of packed sequences
    new: int  # tokens that the engine writes
    parameters: int  # of each of 24 tensors that an optimizer updates
    copied: int  # bytes of a copy between host and device
    product: int  # rows and columns of the matrices whose product is timed


FULL = Sizes(
    tiny=False, rows=4096, hidden=1536, inner=8960, vocab=151_936, lengths=(5, 300, 1, 700, 18), new=150,
    parameters=1 << 24, copied=1 << 30, product=8192,
)  # fmt: skip
SMALL = Sizes(
    tiny=True, rows=64, hidden=32, inner=48, vocab=512, lengths=(5, 30, 1, 20, 8), new=12, parameters=1 << 8,
    copied=1 << 16, product=64,
)  # fmt: skip


def facts(sizes: Sizes) -> Mapping[str, Any]:
    """Names the device and the versions of the libraries."""
    import triton

    device = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": device.name, "sms": device.multi_processor_count, "free_gib": free / 2**30, "gib": total / 2**30,
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version(), "cudnn": torch.backends.cudnn.version(), "shm": os.path.isdir("/dev/shm"),
        "cpus": os.cpu_count(),
    }  # fmt: skip


def kernels(sizes: Sizes) -> None:
    """Compares all Triton kernels with torch operations, as every run does before a model uses them."""
    problem = choice.obstacle()
    _require(problem is None, problem or "")


def sum_in_product(sizes: Sizes) -> Mapping[str, Any]:
    """Adds a bfloat16 product to a float32 tensor in place, as the gradients of weights are summed."""
    total = torch.randn(sizes.inner, sizes.hidden, device="cuda")
    inner, hidden = (torch.randn(sizes.rows, n, device="cuda").bfloat16() for n in (sizes.inner, sizes.hidden))
    exact = total.double() + inner.double().t() @ hidden.double()
    place = total.data_ptr()
    add_product(total, inner.t(), hidden)
    _require(total.data_ptr() == place, "the sum is in another tensor")
    return _small("error", error_of(total, exact), 1e-5)


def varlen_attention(sizes: Sizes) -> Mapping[str, Any]:
    """Compares flash attention over packed sequences, and its gradients, with attention in float64."""
    problem = varlen.obstacle(128, "bfloat16")
    _require(problem is None, problem or "")
    worst, tokens = 0.0, sum(sizes.lengths)
    for window in (None, 64):
        q, k, v = (torch.randn(tokens, h, 128, device="cuda").bfloat16().requires_grad_() for h in (12, 2, 2))
        runs = varlen.segments(sizes.lengths, None, torch.device("cuda", 0))
        attended = varlen.attend(q, k, v, runs, scale=None, window=window)
        seed = torch.randn_like(attended)
        ours = [attended, *torch.autograd.grad(attended, (q, k, v), seed)]
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = torch.cat([_attention(*parts, window) for parts in _sequences(wide, sizes.lengths)])
        theirs = [exact, *torch.autograd.grad(exact, wide, seed.double())]
        worst = max(worst, *(error_of(a, b) for a, b in zip(ours, theirs, strict=True)))
    return _small("error", worst, 0.02)


def head(sizes: Sizes) -> Mapping[str, Any]:
    """Compares log-probs, entropies and gradients of the output layer by Triton kernels with torch operations."""
    hidden = (torch.randn(sizes.rows // 2, sizes.hidden, device="cuda") / 8).bfloat16().requires_grad_()
    weight = (torch.randn(sizes.vocab, sizes.hidden, device="cuda") / 8).bfloat16().requires_grad_()
    labels = torch.randint(0, sizes.vocab, (len(hidden),), device="cuda")
    passes: list[list[Tensor]] = []
    for triton in (True, False):
        hidden.grad = weight.grad = None
        rows = vocab_parallel_statistics(
            hidden, weight, labels, first_row=0, vocab=sizes.vocab, temperature=1.0, group=dist.group.WORLD,
            names=["logprobs", "entropy"], triton=triton,
        )  # fmt: skip
        (rows[0].sum() + 0.1 * rows[1].sum()).backward()
        passes.append([rows.detach(), *(x.grad.clone() for x in (hidden, weight) if x.grad is not None)])
    exact = (hidden.detach() @ weight.detach().T).float().log_softmax(-1)
    rows = torch.stack([exact.gather(1, labels[:, None])[:, 0], -(exact.exp() * exact).sum(-1)])
    errors = [error_of(passes[0][0], rows), *(error_of(a, b) for a, b in zip(*passes, strict=True))]
    return _small("errors", max(errors), 0.02) | {"errors": errors}


def nccl_one_rank(sizes: Sizes) -> None:
    """Sums a tensor by NCCL in a group of one rank."""
    x = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    dist.reduce_scatter_tensor(x, x)
    dist.all_reduce(x)
    _require(x[-1].item() == (1 << 20) - 1, f"the sum is {x[-1].item()}")


def graphs(sizes: Sizes) -> Mapping[str, Any]:
    """Compares tokens of the embedded engine with CUDA graphs and without, and draws a random number afterwards."""
    from tiny_models import make_model

    path, runs = make_model(Path(tempfile.mkdtemp()) / "m", "qwen2", vocab_size=97, num_hidden_layers=2), {}
    for dtype, with_graphs in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        engine = EmbeddedEngine(path, cuda_graphs=with_graphs, dtype=dtype)
        engine.load_pretrained()
        start = time.monotonic()
        answer = complete(engine, [[3, 14, 15]], Sampling(max_tokens=sizes.new, temperature=0.0))
        runs[dtype, with_graphs] = answer[0][0].tokens.tolist(), time.monotonic() - start
        refused = with_graphs and engine._recorder is not None and getattr(engine._recorder, "_refused", False)
        _require(not refused, f"a step in {dtype} was not captured: the warning above says why")
    _require(runs[torch.float32, True][0] == runs[torch.float32, False][0], "graphs write other tokens")
    _require(0 <= torch.rand(1, device="cuda").item() < 1, "the random generator is broken")
    return {"with_s": runs[torch.float32, True][1], "without_s": runs[torch.float32, False][1]}


def cuda_ipc(sizes: Sizes) -> None:
    """Reads memory of this process's GPU in another process."""
    medium, spawn = CudaIpc(), multiprocessing.get_context("spawn")
    address, memory = medium.allocate(MESSAGE, torch.device("cuda", 0))
    memory.fill_(3)
    address = json.loads(json.dumps(medium.publish(address, memory)))
    answers, done = spawn.Queue(), spawn.Event()
    process = spawn.Process(target=_read_memory, args=(address, answers, done), daemon=True)
    process.start()
    read = answers.get(timeout=45)
    done.set()
    _require(read == 3 * MESSAGE, f"the other process read {read}")


def nccl_absent_peer(sizes: Sizes) -> Mapping[str, Any]:
    """Waits for a message of a peer that never sends, in a process of its own: the wait and the close must end."""
    spawn = multiprocessing.get_context("spawn")
    answers, report = spawn.Queue(), dict[str, Any]()
    process = spawn.Process(target=_wait_for_nobody, args=(answers,), daemon=True)
    process.start()
    try:
        report |= answers.get(timeout=40)
        report |= answers.get(timeout=12)
        process.join(10)
        report["exit"] = process.exitcode
    except queues.Empty:
        report["hung"] = "in close" if report else "in the wait"
    if process.is_alive():
        process.kill()
    _require("close_s" in report and report["exit"] == 0, json.dumps(report))
    return report


def adam(sizes: Sizes) -> Mapping[str, Any]:
    """Times an optimizer step of ours and of torch's fused AdamW."""
    params = [torch.nn.Parameter(torch.randn(sizes.parameters, device="cuda")) for _ in range(24)]
    for p in params:
        p.grad = torch.randn_like(p)
    fused_adam = FusedAdam(params, lr=1e-6, weight_decay=0.01)
    figures = {"ours_s": clock.median_seconds(fused_adam.step, rounds=3), "params": 24 * sizes.parameters}
    if sizes.tiny:
        return figures
    fused = torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01, fused=True)
    return figures | {"torch_fused_s": clock.median_seconds(fused.step, rounds=3)}


def rates(sizes: Sizes) -> Mapping[str, Any]:
    """Measures copies on the device and between host and device, and a product of matrices."""
    host = torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(sizes.copied, dtype=torch.uint8, device="cuda")
    up = clock.median_seconds(lambda: device.copy_(host, non_blocking=True), rounds=3)
    down = clock.median_seconds(lambda: host.copy_(device, non_blocking=True), rounds=3)
    return {
        "copy_gb_per_s": clock.copy_rate(2 * sizes.copied) / 1e9,
        "product_tflops": clock.product_rate(sizes.product) / 1e12,
        "up_gb_per_s": sizes.copied / up / 1e9,
        "down_gb_per_s": sizes.copied / down / 1e9,
    }


CHECKS: tuple[Callable[[Sizes], Mapping[str, Any] | None], ...] = (
    *(facts, kernels, sum_in_product, varlen_attention, head, nccl_one_rank, graphs, cuda_ipc),
    *(nccl_absent_peer, adam, rates),
)
OTHER_PROCESS = (cuda_ipc, nccl_absent_peer)  # the pretended device is not there in a process that is started anew


def error_of(approximation: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference, relative to the norm of the exact tensor."""
    return float((approximation.double() - exact.double()).norm() / exact.double().norm())


def run(check: Callable[[Sizes], Mapping[str, Any] | None], sizes: Sizes) -> dict[str, Any]:
    """Runs a check. Returns {"ok", "s"} and either the check's figures or its error."""
    start = time.monotonic()
    try:
        outcome = {"ok": True, **(check(sizes) or {})}
        torch.cuda.synchronize()
    except Exception as error:  # whatever fails here is what the check is for
        traceback.print_exc()
        outcome = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:500]}"}
    return outcome | {"s": round(time.monotonic() - start, 2)}


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Runs all checks that begin within the budget. Returns what OUT.json holds, by the name of the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=60.0, help="no check begins after so many seconds")
    parser.add_argument("--tiny", action="store_true", help="small tensors")
    args = parser.parse_args(words)
    began, outcomes = time.monotonic(), dict[str, Any]()
    with subjects.one_rank():
        for check in CHECKS:
            if args.tiny and check in OTHER_PROCESS:
                continue
            over = time.monotonic() - began > args.budget
            outcome = {"skipped": "the budget was over"} if over else run(check, SMALL if args.tiny else FULL)
            outcomes[check.__name__] = outcome
            print(check.__name__, json.dumps(outcome)[:300], flush=True)
            args.out.write_text(json.dumps(outcomes, indent=1))
    print("failed:", [name for name, outcome in outcomes.items() if not outcome.get("ok")] or "nothing")
    return outcomes


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _small(name: str, error: float, bound: float) -> dict[str, Any]:
    _require(error < bound, f"{name} {error:.3g}, and {bound} is allowed")
    return {name: error}


def _sequences(tensors: list[Tensor], lengths: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Cuts packed queries, keys and values [N, H, d] into sequences."""
    return list(zip(*(x.split(lengths) for x in tensors), strict=True))


def _attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Computes causal attention of one sequence [n, H, d] with grouped keys. Returns [n, H * d]."""
    places = torch.arange(len(query), device=query.device)
    back = places[:, None] - places
    mask = (back >= 0) if window is None else (back >= 0) & (back < window)
    repeats = query.shape[1] // key.shape[1]
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(repeats, 0) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(0, 1).flatten(1)


def _read_memory(address: Any, answers: Any, done: Any) -> None:
    """The other process of `cuda_ipc`: answers the sum of the memory's bytes."""
    torch.cuda.set_device(0)
    answers.put(int(CudaIpc().open(address, torch.device("cuda", 0))[:MESSAGE].long().sum()))
    done.wait(30)


def _wait_for_nobody(answers: Any) -> None:
    """Rank 0 of an NCCL group of two whose other rank never sends: answers when the wait ended, and the close."""
    from megatron_rl.config.schema import RefitConfig

    torch.cuda.set_device(0)
    store, _ = RefitStore.host("127.0.0.1")
    start = time.monotonic()
    group = Nccl(store, 0, 2, RefitConfig(message_timeout_s=3.0, timeout_s=6.0))
    handle = group.receive(1, "a message that nobody sends", MESSAGE, torch.device("cuda", 0))
    try:
        handle.wait(Deadline.start(6.0, 3.0))
        answers.put({"wait": "it came, although nobody sent it"})
    except TransportError as error:
        answers.put({"wait": str(error)[:200], "wait_s": time.monotonic() - start})
    group.close()
    answers.put({"close_s": time.monotonic() - start})


if __name__ == "__main__":
    main()
