"""Tests the Triton kernels on this machine's device against torch operations before a model uses them.

Kernels are compiled on the machine, for its GPU and driver. The test finds a kernel that does not compile or computes
wrong results before a model is trained with it. Every variant of a kernel that a model can request is tested, at one
size. Other sizes are compiled when they are used.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from megatron_rl.lib.user_code import one_line
from megatron_rl.megatron.kernels import gates, head, norm, rope

# dtype -> allowed error, relative to the largest absolute value
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}
ROWS, WIDTH, VOCAB = 3, 1100, 5000  # WIDTH and VOCAB are larger than one block of the gate and head kernels
FAILURES = (
    *(TritonError, RuntimeError, OSError, subprocess.SubprocessError),  # no compiler, no free memory, compilation error
    *(AssertionError, ImportError, TypeError, ValueError),  # errors of an incompatible Triton version
)
Kernel = Callable[..., tuple[Tensor, ...]]
# Test case: (name, kernel, function with equivalent torch operations, inputs).
# The kernel and the function return the same number of tensors.
Case = tuple[str, Kernel, Kernel, Sequence[Tensor]]


@functools.cache
def trouble(device: torch.device) -> str | None:
    """Tests the Triton kernels on a device against torch. Returns a description of the problems, or None if all kernels
    run and their results are accurate. The result is cached per process."""
    wrong: list[str] = []
    for dtype, bound in DTYPES.items():
        for name, kernel, plain, inputs in _cases(device, dtype):
            try:
                error = _error(_tried(kernel, inputs), _tried(plain, [x.double() for x in inputs]))
            except FAILURES as failure:
                return f"{name} does not run: {type(failure).__name__}: {one_line(failure)}"
            if not error <= bound:
                wrong.append(f"{name} in {str(dtype).removeprefix('torch.')} is off by {error:.1e}")
    return "; ".join(wrong) or None


def _tried(function: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Runs a function forward and backward with a fixed gradient of its outputs. Returns the outputs and the gradients
    of the inputs.

    If the outputs do not require gradients, returns only the outputs.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*leaves)
    for output in outs:
        if output.requires_grad:
            place = torch.arange(output.numel(), device=output.device).view(output.shape)
            output.backward((place % 7 - 3).to(output.dtype))
    return [*(output.detach() for output in outs), *(x.grad for x in leaves if x.grad is not None)]


def _error(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Compares each tensor in `actual` with the tensor in `exact` at the same index. The error of a pair is the largest
    difference, divided by the largest absolute value of the exact tensor. Returns the maximum error over all pairs, or
    NaN if `actual` contains NaN."""
    pairs = zip(actual, exact, strict=True)
    return torch.stack([(a.double() - b.double()).abs().max() / b.abs().max() for a, b in pairs]).max().item()


def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yields the test cases of all kernels in one dtype. Inputs are drawn on the CPU, so that they are the same on all
    devices."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    def plain_gate(x: Tensor, *, tanh: bool) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up

    def plain_turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    for name, tanh in (("the gate of SwiGLU", False), ("the gate of GeGLU", True)):
        yield name, _alone(gates.gated, tanh=tanh), _alone(plain_gate, tanh=tanh), [random(2, 2 * WIDTH)]
    cos, sin = random(ROWS, 1, 24), random(ROWS, 1, 24)
    turned = _alone(rope.rotate, cos=cos, sin=sin)
    yield "the rotary embedding", turned, _alone(plain_turn), [random(ROWS, 5, 24)]
    normed = _alone(norm.rms_norm, eps=1e-5, from_one=True)  # the only form that models ask for
    plain = _alone(lambda x, weight: F.rms_norm(x, weight.shape, 1.0 + weight, 1e-5))
    yield "the norm", normed, plain, [random(ROWS, WIDTH), random(WIDTH)]
    for entropy in (True, False):
        form = "with entropy" if entropy else "without entropy"
        ours, plain = (functools.partial(function, entropy=entropy) for function in (_statistics, _plain_statistics))
        yield f"the head's statistics {form}", ours, plain, [random(ROWS, VOCAB)]
        ours, plain = (functools.partial(function, entropy=entropy) for function in (_gradient, _plain_gradient))
        yield f"the head's gradient {form}", ours, plain, [random(ROWS, VOCAB)]


def _alone(function: Callable[..., Tensor], **settings: Any) -> Kernel:
    """Wraps `function`, which returns one tensor, as a test function that returns a tuple of this tensor. `settings`:
    keyword arguments of every call."""
    return lambda *inputs: (function(*inputs, **settings),)


@torch.no_grad()
def _statistics(logits: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
    peak, sums = head.statistics(logits, 0.7, dot=entropy, total=entropy)
    return peak, *sums.values()


@torch.no_grad()
def _plain_statistics(logits: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
    scaled = 0.7 * logits
    peak = scaled.amax(-1)
    lowered = scaled - peak[:, None]
    shares = lowered.exp()
    more = ((shares * lowered).sum(-1), lowered.sum(-1)) if entropy else ()
    return peak, shares.sum(-1), *more


def _gradient_inputs(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns fixed test inputs: column ids [n, 3] with duplicates, a gradient [n, 3] with respect to their log-probs,
    and a gradient [n] with respect to the entropy."""
    ids = torch.tensor([[0, 7, 7], [VOCAB - 1, 1, 2], [4500, 4500, 3]], device=logits.device)
    by_id = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, 0.0], [-1.0, 2.0, 0.7]], device=logits.device)
    return ids, by_id, torch.tensor([0.5, -1.0, 2.0], device=logits.device)


@torch.no_grad()
def _gradient(logits: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
    ids, by_id, by_entropy = _gradient_inputs(logits)
    gradient, log_p = logits.clone(), (0.7 * logits.float()).log_softmax(-1)
    logsum, row_entropy = (0.7 * logits.float()).logsumexp(-1), -(log_p.exp() * log_p).sum(-1)
    by_rows = (row_entropy, by_entropy) if entropy else None
    head.to_gradient(gradient, 0.7, logsum=logsum, ids=ids, by_id=by_id, entropy=by_rows)
    return _parts(gradient, ids)


@torch.no_grad()
def _plain_gradient(logits: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
    """Returns the gradient that torch's autograd computes, for comparison with the kernel. The gradient is with respect
    to the scaled logits, because `head.to_gradient` does not multiply the gradient by `scale`."""
    ids, by_id, by_entropy = _gradient_inputs(logits)
    with torch.enable_grad():
        scaled = (0.7 * logits).detach().requires_grad_()
        log_p = scaled.log_softmax(-1)
        total = (log_p.gather(1, ids) * by_id).sum()
        if entropy:
            total = total - ((log_p.exp() * log_p).sum(-1) * by_entropy).sum()
        total.backward()
    assert scaled.grad is not None
    return _parts(scaled.grad, ids)


def _parts(gradient: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a gradient into the columns `ids` and all other columns, so that their errors are measured separately: the
    other columns are about a hundred times smaller."""
    return gradient.gather(1, ids), gradient.scatter(1, ids, 0.0)
