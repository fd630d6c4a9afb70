"""Runs Triton kernels in Triton's interpreter, against torch's operations and against transformers.

`kernels_worker.py OUT.json FOLDER`, with TRITON_INTERPRET=1 in the environment before Python starts: Triton reads it
when it is imported. Models are written to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts_worker import WeightedLogprobs, gradient_error, logprobs_of, make_policy, make_rollouts, work_of
from layouts_worker import reference as by_transformers
from tiny_models import make_model
from triton.errors import TritonError

from megatron_rl.megatron import vocab_statistics
from megatron_rl.megatron.kernels import gates, norm, rope, trial
from megatron_rl.megatron.kernels import head as head_kernels
from megatron_rl.megatron.torch_layers import Chosen

VOCAB = 97
ROLLOUTS = 4  # the fewest that have several lengths: the interpreter takes milliseconds for every row of every tensor
# By name: family, sizes, ranks, and the case as layouts_worker.py has it.
MODELS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "swiglu": ("qwen2", {"num_hidden_layers": 2}, 1, {}),
    "geglu": ("gemma3_text", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, 1, {}),
    "tp": ("qwen2", {"num_hidden_layers": 1}, 2, {"layout": {"tp": 2, "sequence_parallel": True}}),
}


class Alone:
    """A group of this process alone."""

    def size(self) -> int:
        return 1


def differentiate(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Returns what a function gives, and the gradients of its inputs for a fixed random gradient of that."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    seed = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(outputs.dtype)
    outputs.backward(seed)
    return [outputs.detach(), *(x.grad for x in leaves if x.grad is not None)]


def error(approximation: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Returns the largest difference of the pairs, each as a share of the largest number of its exact one."""
    return max(
        ((a.double() - b.double()).abs().max() / b.abs().max()).item()
        for a, b in zip(approximation, exact, strict=True)
    )


def small(dtype: torch.dtype) -> dict[str, float]:
    """Compares gates, rotary embedding and norms with torch's operations, in float64, for shapes that no block fits."""
    torch.manual_seed(0)
    errors, x = {}, torch.randn(2, 3, 2 * 1100, dtype=dtype)
    for name, tanh in (("swiglu", False), ("geglu", True)):

        def plain(x: torch.Tensor, tanh: bool = tanh) -> torch.Tensor:
            gate, up = x.double().chunk(2, -1)
            return (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up

        def ours(x: torch.Tensor, tanh: bool = tanh) -> torch.Tensor:
            return gates.gated(x, tanh=tanh).double()

        errors[name] = error(differentiate(ours, x), differentiate(plain, x))
    joined, cos, sin = (torch.randn(*shape, dtype=dtype) for shape in ((5, 2, 4 * 24), (5, 1, 1, 24), (5, 1, 1, 24)))

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rope.rotate(x[..., 24:].unflatten(-1, (3, 24)), cos, sin).double()  # a view, as of joined projections

    def plainly(x: torch.Tensor) -> torch.Tensor:
        heads = x[..., 24:].unflatten(-1, (3, 24)).double()
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin

    errors["rope"] = error(differentiate(turned, joined), differentiate(plainly, joined))
    x, weight = torch.randn(300, 70, dtype=dtype), torch.randn(70, dtype=dtype)
    for name, more in (("norm", 0.0), ("norm from one", 1.0)):

        def normed(x: torch.Tensor, weight: torch.Tensor, more: float = more) -> torch.Tensor:
            return norm.rms_norm(x, weight, 1e-5, from_one=bool(more)).double()

        def by_torch(x: torch.Tensor, weight: torch.Tensor, more: float = more) -> torch.Tensor:
            return F.rms_norm(x.double(), (70,), more + weight.double(), 1e-5)

        errors[name] = error(differentiate(normed, x, weight), differentiate(by_torch, x, weight))
    return errors


def head() -> dict[str, float]:
    """Compares all statistics, and their gradients, with torch's log-softmax in float64: 5,000 tokens, two blocks."""
    torch.manual_seed(0)
    names = ("logprobs", "entropy", "vocab_mean", "candidate_logprobs")
    vocab, padding, rows = 5000, 3, 40
    vocab_statistics.CHUNK_ELEMENTS["cpu"], vocab_statistics.GOOD_ROWS = 1, 1  # chunks of 32 rows, the fewest
    hidden, weight = torch.randn(rows, 16), torch.randn(vocab + padding, 16)
    labels, candidates = torch.randint(vocab, (rows,)), torch.randint(vocab, (rows, 3))
    labels[0], candidates[:9, 1], candidates[9:12, 0] = vocab - 1, labels[:9], candidates[9:12, 2]  # some twice

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vocab_statistics.vocab_parallel_statistics(
            hidden, weight, labels, first_row=0, vocab=vocab, temperature=0.7, group=Alone(), names=names,
            candidates=candidates, triton=True,
        ).double()  # fmt: skip

    def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        log_p = (hidden.double() @ weight[:vocab].double().T / 0.7).log_softmax(-1)
        columns = log_p[torch.arange(rows), labels], -(log_p.exp() * log_p).sum(-1), log_p.detach().mean(-1)
        return torch.stack([*columns, *log_p.gather(1, candidates).T])

    errors = {"all": error(differentiate(ours, hidden, weight), differentiate(exact, hidden, weight))}
    kept, vocab_statistics.KEPT_ELEMENTS["cpu"] = vocab_statistics.KEPT_ELEMENTS["cpu"], 0
    errors["computed again"] = error(differentiate(ours, hidden, weight), differentiate(exact, hidden, weight))
    vocab_statistics.KEPT_ELEMENTS["cpu"] = kept
    names = ("logprobs",)
    errors["logprobs"] = error(
        differentiate(lambda *x: ours(*x)[:1], hidden, weight), differentiate(lambda *x: exact(*x)[:1], hidden, weight)
    )
    vocab_statistics.CHUNK_ELEMENTS["cpu"], vocab_statistics.GOOD_ROWS = 1 << 21, 128
    return errors


class _NanGradient(torch.autograd.Function):
    """Gives what it gets, and a gradient that is not a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * torch.nan


def tried() -> dict[str, str | None]:
    """Returns what the trial says of the kernels as they are, and of kernels that compute something else or do not
    compile: one form of one of them at a time."""
    gated, normed, statistics, to_gradient = (
        gates.gated,
        norm.rms_norm,
        head_kernels.statistics,
        head_kernels.to_gradient,
    )

    def broken(x: torch.Tensor, *, tanh: bool) -> torch.Tensor:
        raise TritonError("no such\ninstruction")

    def wrong_peak(logits: torch.Tensor, scale: float, **outputs: bool) -> Any:
        peak, sums = statistics(logits, scale, **outputs)
        return peak * 0.0, sums

    def only_asked(logits: torch.Tensor, scale: float, *, ids: torch.Tensor, **outputs: Any) -> None:
        to_gradient(logits, scale, ids=ids, **outputs)
        logits.copy_(torch.zeros_like(logits).scatter(1, ids, logits.gather(1, ids)))

    forms: dict[str, tuple[Any, str, Any]] = {
        "whole": (gates, "gated", gated),
        "wrong": (gates, "gated", lambda x, *, tanh: gated(x, tanh=not tanh)),
        "nan": (gates, "gated", lambda x, *, tanh: _NanGradient.apply(gated(x, tanh=tanh))),
        "broken": (gates, "gated", broken),
        "norm": (norm, "rms_norm", lambda x, weight, **settings: normed(x, weight + 0.1, **settings)),
        "peak": (head_kernels, "statistics", wrong_peak),
        "others": (head_kernels, "to_gradient", only_asked),
    }
    answers = {}
    for name, (module, kernel, form) in forms.items():
        original = getattr(module, kernel)
        setattr(module, kernel, form)
        answers[name] = trial.trouble.__wrapped__(torch.device("cpu"))  # without its memory
        setattr(module, kernel, original)
    return answers


def model(path: str, case: dict[str, Any]) -> dict[str, float]:
    """Compares a policy whose model takes all kernels with transformers: log-probs, and all gradients."""
    rollouts, loss = make_rollouts(VOCAB)[:ROLLOUTS], WeightedLogprobs()
    logprobs, _, _, gradients, *_ = by_transformers(path, rollouts, loss)
    policy = make_policy(path, {"layout": {}, "model_settings": {"kernels": "triton"}, **case})
    work, _ = work_of(policy, rollouts, loss)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    errors = {
        "logprobs": (logprobs_of(policy, rollouts) - logprobs).abs().max(),
        "gradients": gradient_error(policy, work, loss, gradients) / largest,
        "modules": sum(
            isinstance(layer, Chosen) and layer.triton for chunk in policy.chunks for layer in chunk.modules()
        ),
    }
    return {name: float(value) for name, value in errors.items()}


def on_ranks(folder: Path, name: str, case: dict[str, Any], ranks: int) -> list[dict[str, float]]:
    """Runs `model` on so many ranks, each a fork of this process. Returns their answers."""
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
                store = dist.FileStore(str(folder / f"{name}.ranks"), ranks)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
                answer = model(str(folder / name), case)
                (folder / f"{name}.{rank}.json").write_text(json.dumps(answer))
                dist.barrier()
                status = 0
            finally:
                os._exit(status)
        children[child] = rank
    failed = [rank for child, rank in children.items() if os.waitpid(child, 0)[1]]
    assert not failed, f"{name}: ranks {failed} failed"
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    output_path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    rough = {f"{name} bf16": value for name, value in small(torch.bfloat16).items()}
    answer: dict[str, Any] = {"small": small(torch.float32) | rough, "head": head(), "tried": tried()}
    for name, (family, sizes, ranks, case) in MODELS.items():
        make_model(folder / name, family, vocab_size=VOCAB, **sizes)
        answer[name] = on_ranks(folder, name, case, ranks)
    output_path.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
