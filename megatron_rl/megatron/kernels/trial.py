"""Tries every Triton kernel once on the device that is to run it, against torch's operations, before a model takes it.

A kernel is compiled on the machine, for its GPU and its driver. One that does not compile there, or that computes
something else than elsewhere, is found before it trains a model.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from megatron_rl.megatron.kernels import gates, head, norm, rope

DTYPES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}  # and the error that is allowed, of the largest number
ROWS, WIDTH, VOCAB = 3, 1100, 5000  # more than one block has of a gate, and of the vocabulary
Kernel = Callable[..., Tensor]
# Name, the kernel and torch's operations for it, and what both are called with: the first ones have gradients.
Case = tuple[str, Kernel, Kernel, Sequence[Tensor]]


@functools.cache
def trouble(device: torch.device) -> str | None:
    """Returns what is wrong with the kernels on a device, for a message, or None. It is found out once in a process."""
    wrong: list[str] = []
    for dtype, bound in DTYPES.items():
        for name, kernel, plain, inputs in _cases(device, dtype):
            try:
                error = _error(_tried(kernel, inputs), _tried(plain, [x.double() for x in inputs]))
            except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as failure:
                return f"{name} does not run: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            if not error <= bound:
                wrong.append(f"{name} in {str(dtype).removeprefix('torch.')} is off by {error:.1e}")
    return "; ".join(wrong) or None


def _tried(function: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns what a function gives, and the gradients of its inputs for a gradient of that which is the same each
    time. A function without a gradient gives its answer alone."""
    own = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*own)
    if not out.requires_grad:
        return [out]
    place = torch.arange(out.numel(), device=out.device).view(out.shape)
    out.backward((place % 7 - 3).to(out.dtype))
    return [out.detach(), *(x.grad for x in own if x.grad is not None)]


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the largest difference of the pairs, each as a share of the largest number of its exact one."""
    return max(
        ((a.double() - b.double()).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True)
    )


def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Draws the inputs on the CPU, so that they are the same on all devices."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    for name, tanh in (("the gate of SwiGLU", False), ("the gate of GeGLU", True)):
        yield name, functools.partial(gates.gated, tanh=tanh), functools.partial(_gated, tanh=tanh), [random(2, 2200)]
    cos, sin = random(ROWS, 1, 24), random(ROWS, 1, 24)
    yield (
        "the rotary embedding",
        lambda x: rope.rotate(x, cos, sin),
        functools.partial(_rotated, cos, sin),
        [random(ROWS, 5, 24)],
    )
    normed = functools.partial(norm.rms_norm, eps=1e-5, from_one=True)
    yield "the norm", normed, _normed, [random(ROWS, WIDTH), random(WIDTH)]
    yield "the head's statistics", _statistics, _plain_statistics, [random(ROWS, VOCAB)]
    yield "the head's gradient", _gradient, _plain_gradient, [random(ROWS, VOCAB)]


def _gated(x: Tensor, *, tanh: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up


def _rotated(cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, 1.0 + weight, 1e-5)


@torch.no_grad()
def _statistics(logits: Tensor) -> Tensor:
    peak, sums = head.statistics(logits, 0.7, dot=True, total=True)
    return torch.stack([peak, *sums.values()])


@torch.no_grad()
def _plain_statistics(logits: Tensor) -> Tensor:
    scaled = 0.7 * logits
    peak = scaled.amax(-1)
    lowered = scaled - peak[:, None]
    shares = lowered.exp()
    return torch.stack([peak, shares.sum(-1), (shares * lowered).sum(-1), lowered.sum(-1)])


def _asked(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns columns [n, 3], of which some stand there twice, and what the gradient by each log-prob [n, 3], and by
    the entropy [n], is."""
    ids = torch.tensor([[0, 7, 7], [VOCAB - 1, 1, 2], [4500, 4500, 3]], device=logits.device)
    by_id = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, 0.0], [-1.0, 2.0, 0.7]], device=logits.device)
    return ids, by_id, torch.tensor([0.5, -1.0, 2.0], device=logits.device)


@torch.no_grad()
def _gradient(logits: Tensor) -> Tensor:
    ids, by_id, by_entropy = _asked(logits)
    out, log_p = logits.clone(), (0.7 * logits.float()).log_softmax(-1)
    known = -(log_p.exp() * log_p).sum(-1)
    logsum = (0.7 * logits.float()).logsumexp(-1)
    head.to_gradient(out, 0.7, logsum=logsum, ids=ids, by_id=by_id, entropy=(known, by_entropy))
    return out


@torch.no_grad()
def _plain_gradient(logits: Tensor) -> Tensor:
    """By autograd, for logits that count times the scale: what `to_gradient` leaves to its caller to multiply."""
    ids, by_id, by_entropy = _asked(logits)
    with torch.enable_grad():
        scaled = (0.7 * logits).detach().requires_grad_()
        log_p = scaled.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        ((log_p.gather(1, ids) * by_id).sum() + (entropy * by_entropy).sum()).backward()
    assert scaled.grad is not None
    return scaled.grad
