"""Triton kernels of the output layer: one kernel computes statistics of each row of logits, another the gradient.

The logits have the dtype in which the output layer's matmul returned them. All sums are float32.
"""

# pyright rules are off: calls of Triton kernels have more arguments (such as num_warps) than the type hints allow.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # number of logits that a Triton program loads at once, number of warps per program
# initial value of a running maximum: lower than every logit, but the difference from a logit is still finite
LOWEST = tl.constexpr(-3.0e38)


def statistics(logits: Tensor, scale: float, *, dot: bool, total: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes softmax statistics of the scaled logits `scale` * `logits` [n, v]. Returns (maximum of each row, sums by
    name); all are [n] float32.

    The sums are over x = scaled logit minus the row's maximum:
    - `mass`: sum of exp(x).
    - `dot`: sum of exp(x) * x; only if `dot` is True.
    - `total`: sum of x; only if `total` is True.
    """
    rows, columns = logits.shape
    stats = torch.empty(4, rows, device=logits.device)
    if rows:
        _statistics[(rows,)](
            logits, stats, rows, columns, logits.stride(0), scale, DOT=dot, TOTAL=total, BLOCK=BLOCK, num_warps=WARPS
        )
    options = {"mass": True, "dot": dot, "total": total}
    return stats[0], {name: sums for (name, enabled), sums in zip(options.items(), stats[1:], strict=True) if enabled}


def to_gradient(
    logits: Tensor, scale: float, *, logsum: Tensor, ids: Tensor, by_id: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> None:
    """Replaces logits [n, v] in place with the gradient with respect to the logits, in the same dtype.

    `scale`: factor of the logits (1 / temperature). The gradient is not multiplied by `scale`, because `by_id` and the
    gradient in `entropy` are already divided by the temperature.
    `logsum`: [n] logarithm of the sum of exponentials of the scaled logits over all ranks.
    `ids`: [n, k] int64, column of `logits` for each token, or -1 for a token in the vocabulary part of another rank.
    `by_id`: [n, k] gradient with respect to the log-probs of `ids`.
    `entropy`: ([n] entropy of each row, [n] gradient with respect to the entropy), or None.
    """
    rows, columns = logits.shape
    entropies, by_entropy = entropy if entropy is not None else (logsum, logsum)
    if rows and columns:
        _gradient[(rows,)](
            logits, ids, by_id, logsum, entropies, by_entropy, columns, logits.stride(0), ids.shape[1], scale,
            ENTROPY=entropy is not None, IDS=triton.next_power_of_2(ids.shape[1]), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _statistics(
    logits, stats, rows, columns, stride, scale, DOT: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    peak, mass, dot, total = LOWEST, 0.0, 0.0, 0.0
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        real = places < columns
        values = tl.load(start + places, mask=real, other=0.0).to(tl.float32) * scale
        highest = tl.maximum(peak, tl.max(tl.where(real, values, LOWEST), 0))
        lowered = values - highest
        shares = tl.where(real, tl.exp(lowered), 0.0)
        moved = peak - highest
        rest = tl.exp(moved)
        if DOT:
            dot = rest * (dot + moved * mass) + tl.sum(shares * lowered, 0)
        if TOTAL:
            total += tl.sum(tl.where(real, values, 0.0), 0)
        mass = rest * mass + tl.sum(shares, 0)
        peak = highest
    tl.store(stats + row, peak)
    tl.store(stats + rows + row, mass)
    if DOT:
        tl.store(stats + 2 * rows + row, dot)
    if TOTAL:
        tl.store(stats + 3 * rows + row, total - columns * peak)


@triton.jit
def _slope(log_p, every, row_entropy, by_entropy, ENTROPY: tl.constexpr):
    """Returns the gradient with respect to a block of logits, without the term that only the logits of the tokens in
    `ids` have."""
    slope = log_p * 0.0 + every
    if ENTROPY:
        slope += (log_p + row_entropy) * by_entropy
    return -slope * tl.exp(log_p)


@triton.jit
def _gradient(
    logits, ids, by_id, logsums, entropies, by_entropies, columns, stride, width, scale,
    ENTROPY: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    logsum, row_entropy, by_entropy = tl.load(logsums + row), tl.load(entropies + row), tl.load(by_entropies + row)
    columns_of_ids = tl.arange(0, IDS)
    mine = columns_of_ids < width
    tokens = tl.load(ids + row * width + columns_of_ids, mask=mine, other=-1)
    every = tl.sum(tl.load(by_id + row * width + columns_of_ids, mask=mine, other=0.0), 0)
    is_local = tokens >= 0
    values = tl.load(start + tokens, mask=is_local, other=0.0).to(tl.float32) * scale
    special = _slope(values - logsum, every, row_entropy, by_entropy, ENTROPY)
    for j in range(0, width):  # `ids` may contain a token twice
        same = tokens == tl.load(ids + row * width + j)
        special += tl.where(same, tl.load(by_id + row * width + j), 0.0)
    tl.debug_barrier()  # all threads must read the logits of these tokens before other threads overwrite the logits
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        real = places < columns
        log_p = tl.load(start + places, mask=real, other=0.0).to(tl.float32) * scale - logsum
        gradient = _slope(log_p, every, row_entropy, by_entropy, ENTROPY)
        tl.store(start + places, gradient.to(logits.dtype.element_ty), mask=real)
    tl.debug_barrier()
    tl.store(start + tokens, special.to(logits.dtype.element_ty), mask=is_local)
