"""Computes log-probabilities and other softmax statistics from hidden states, with the vocabulary split over tensor
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.batches.packed_batch import by_name
from megatron_rl.megatron.kernels.products import add_product

# Maximum number of logits that a rank holds at once (one chunk): 8 MiB of float32 on a CPU, 512 MiB on a GPU.
# With Triton kernels, a chunk may have up to 1 GiB of logits, because no other tensors of this size are needed. These
# logits have the weight's dtype: in bfloat16, a chunk has four times as many logits as without Triton kernels.
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
TILE_ROWS = 128  # on a GPU, a chunk's row count is a multiple of this, so that the tiles of matrix products are full
# With fewer rows than GOOD_ROWS, matrix products on a CPU are up to 1.7 times slower (docs/experiments/benchmarks.md).
# A chunk therefore has GOOD_ROWS rows even if its logits then exceed CHUNK_ELEMENTS, but not if they would exceed
# REUSED_ELEMENTS (28 MiB), because malloc does not keep larger blocks for the next chunk.
GOOD_ROWS, REUSED_ELEMENTS = 128, 7 << 20
# Maximum number of bfloat16 logit gradients that are collected for one matrix product on a CPU (128 MiB).
JOINED_ELEMENTS = 1 << 26
# On a CPU, the log-probs of a micro-batch are kept for the backward pass if there are at most KEPT_ELEMENTS of them.
# With Triton kernels on a GPU, the logits are kept if they take at most KEPT_SHARE of the free memory.
# Otherwise the backward pass recomputes them.
KEPT_ELEMENTS = {"cpu": 1 << 27}
KEPT_SHARE = 0.5


@dataclass(frozen=True)
class _Head:
    """This rank's part of the output layer: the vocabulary ids from `first_row` to `first_row + rows - 1`.

    The weight's rows after the first `rows` are padding.
    """

    first_row: int
    rows: int
    vocab: int  # vocabulary size: number of rows over all tensor-parallel ranks, without padding
    temperature: float
    group: Any
    names: tuple[str, ...]  # names of the requested statistics, see vocab_parallel_statistics
    # True if the log-probs of all rows (for Triton kernels, the logits) are kept for the backward pass
    keep: bool
    # True if Triton kernels compute statistics and gradients, from unscaled logits in the dtype of the weight
    triton: bool

    def logits(self, hidden: Tensor, real: Tensor, scratch: _Scratch) -> Tensor:
        """Returns the logits [n, rows] of the hidden states `hidden` [n, h], in a new tensor. `real` is the weight
        without padding rows.

        The logits are float32 and divided by the temperature. For Triton kernels, the logits have the dtype of `hidden`
        and are not divided by the temperature.
        """
        if self.triton or hidden.dtype == torch.float32:
            logits = hidden @ real.T
        else:
            logits = torch.mm(hidden, real.T, out=scratch.rows(len(hidden), hidden.dtype)).float()
        return logits if self.triton or self.temperature == 1.0 else logits.div_(self.temperature)


class _Scratch:
    """One scratch buffer per dtype. On a CPU all chunks of a pass reuse the buffer, because the first access to newly
    allocated memory takes longer than computing the values. On a GPU each chunk gets a new tensor, because torch's
    allocator caches memory."""

    def __init__(self, chunks: Sequence[slice], columns: int, device: torch.device) -> None:
        self._size, self._device = (max(chunk.stop - chunk.start for chunk in chunks), columns), device
        self._buffers: dict[torch.dtype, Tensor] = {}

    def rows(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor [count, columns] whose contents are undefined."""
        if self._device.type != "cpu":
            return torch.empty(count, self._size[1], dtype=dtype, device=self._device)
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(self._size, dtype=dtype)
        return self._buffers[dtype][:count]


class _Products:
    """Accumulates the weight gradient [V, h] of the output layer: matrix products of logit gradients and hidden states.

    For bfloat16 on a CPU, a matrix product cannot accumulate into a float32 sum, and a separate addition takes longer
    than the matrix product of a small chunk. The logit gradients of several chunks are therefore collected for one
    matrix product.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, rows: int, chunks: Sequence[slice]) -> None:
        """`hidden` [n, h]: all hidden states. `weight` [V, h]: the output layer, whose first `rows` rows are not
        padding. `chunks`: consecutive slices of `hidden`."""
        self._hidden, self._weight, self._rows = hidden, weight, rows
        self._start = self._stop = 0  # range of hidden states whose logit gradients are collected and not yet summed
        self._joined: Tensor | None = None  # collected logit gradients; None if gradients are not collected
        self._total: Tensor | None = None  # sum of matrix products, float32; a single product has the weight's dtype
        if weight.dtype == torch.float32 or weight.device.type != "cpu":
            self._total = torch.zeros_like(weight, dtype=torch.float32)
        else:
            longest = max(chunk.stop - chunk.start for chunk in chunks)
            most = min(len(hidden), max(longest, JOINED_ELEMENTS // max(1, rows)))
            self._joined = torch.empty(most, rows, dtype=weight.dtype)

    def add(self, step: Tensor, rows: slice) -> Tensor:
        """Adds a chunk's contribution to the weight gradient. `step` [n, rows] is the logit gradient of the next chunk,
        and the slice `rows` selects the chunk's hidden states. Returns the logit gradient in the dtype of the
        weight."""
        if self._joined is None:
            assert self._total is not None
            step = step.to(self._weight.dtype)
            add_product(self._total[: self._rows], step.T, self._hidden[rows])
            return step
        if rows.stop - self._start > len(self._joined):
            self._sum()
        self._stop = rows.stop
        return self._joined[rows.start - self._start : rows.stop - self._start].copy_(step)

    def total(self) -> Tensor:
        """Returns the accumulated weight gradient [V, h] in the dtype of the weight, with zeros in padding rows."""
        if self._joined is not None:
            self._sum()
        assert self._total is not None
        total = self._total.to(self._weight.dtype)
        padding = len(self._weight) - len(total)
        return F.pad(total, (0, 0, 0, padding)) if padding else total

    def _sum(self) -> None:
        """Adds the matrix product of the collected logit gradients and their hidden states to the accumulated weight
        gradient."""
        assert self._joined is not None
        product = self._joined[: self._stop - self._start].T @ self._hidden[self._start : self._stop]
        self._total = product if self._total is None else self._total.float().add_(product)
        self._start = self._stop


class _VocabParallelStatistics(torch.autograd.Function):
    """Autograd function for softmax statistics of the logits hidden @ weight.T, without gathering logits over the
    tensor-parallel ranks.

    Logits are computed in chunks of rows, so that the logits of a large batch are never in memory at the same time.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, head: _Head
    ) -> Tensor:
        # Allocate the results before the first chunk, so that they do not fragment the memory that a chunk frees.
        # Otherwise the heap on a CPU would grow with every chunk.
        single = [name for name in head.names if name != "candidate_logprobs"]
        statistics = {name: torch.empty(len(hidden), device=hidden.device) for name in single}
        candidates = torch.empty(ids.shape[1] - 1, len(hidden), device=hidden.device)
        logsum = torch.empty(len(hidden), device=hidden.device)
        kept, real = [], weight[: head.rows]
        chunks = _chunks(hidden, weight, head)
        scratch = _Scratch(chunks, head.rows, hidden.device)
        for rows in chunks:
            logits = head.logits(hidden[rows], real, scratch)
            local, mine = _local(ids[rows], head)
            picked = _pick(logits, local, head)
            local_peak, parts = _sums(logits, head, scratch)
            peak, parts = _over_ranks(local_peak, parts, head)
            sums = torch.stack([*parts.values(), *torch.where(mine, picked - peak[:, None], 0.0).T])
            _reduce(sums, dist.ReduceOp.SUM, head.group)
            global_sums = dict(zip(parts, sums, strict=False))
            log, picked = global_sums["mass"].log(), sums[len(parts) :]
            statistics["logprobs"][rows], logsum[rows] = picked[0] - log, log + peak
            candidates[:, rows] = picked[1:] - log
            if "entropy" in statistics:
                statistics["entropy"][rows] = log - global_sums["entropy"] / global_sums["mass"]
            if "vocab_mean" in statistics:
                statistics["vocab_mean"][rows] = global_sums["vocab_mean"] / head.vocab - log
            if head.keep:
                kept.append(logits if head.triton else logits.sub_((log + (peak - local_peak))[:, None]))
        ctx.save_for_backward(hidden, weight, ids, logsum, statistics.get("entropy"))
        ctx.head, ctx.kept = head, kept
        return torch.cat([torch.stack([*statistics.values()]), candidates])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, ids, logsum, entropy = ctx.saved_tensors
        head, real = ctx.head, weight[: ctx.head.rows]
        gradients = by_name(head.names, grad)  # the gradient of vocab_mean is ignored: vocab_mean is not differentiable
        grad_entropy, grad_candidates = (gradients.get(name) for name in ("entropy", "candidate_logprobs"))
        grad_hidden = torch.empty_like(hidden)
        # For a frozen output layer (LoRA), save the memory of the weight gradient (float32, in the weight's shape).
        chunks = _chunks(hidden, weight, head)
        by_weight = _Products(hidden, weight, head.rows, chunks) if ctx.needs_input_grad[1] else None
        # [n, 1 + k] gradients with respect to log-probs of `ids`
        by_id = gradients["logprobs"][:, None] / head.temperature
        if grad_candidates is not None:
            by_id = torch.cat([by_id, grad_candidates / head.temperature], dim=1)
        by_entropy = None if grad_entropy is None else grad_entropy / head.temperature
        if by_entropy is not None and not head.triton and not by_entropy.any():
            by_entropy = None  # skips a computation that takes longer than checking for zeros
        scratch = _Scratch(chunks, head.rows, hidden.device)
        for number, rows in enumerate(chunks):
            of_entropy = None if by_entropy is None or entropy is None else (entropy[rows], by_entropy[rows])
            if head.keep:
                log_p, ctx.kept[number] = ctx.kept[number], None
            else:
                log_p = head.logits(hidden[rows], real, scratch)
                if not head.triton:
                    log_p.sub_(logsum[rows, None])
            step = _to_gradient(log_p, logsum[rows], ids[rows], by_id[rows], of_entropy, head, scratch)
            step = step.to(weight.dtype) if by_weight is None else by_weight.add(step, rows)
            torch.mm(step, real, out=grad_hidden[rows])
        return grad_hidden, None if by_weight is None else by_weight.total(), None, None


def vocab_parallel_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    first_row: int,
    vocab: int,
    temperature: float,
    group: Any,
    names: Sequence[str],
    candidates: Tensor | None = None,
    triton: bool = False,
) -> Tensor:
    """Computes statistics of the next-token distribution at each label, in natural logarithms.

    The statistics in `names` are:
    - `logprobs`: log-probability of the label. It must be the first name.
    - `entropy`: entropy of the distribution.
    - `vocab_mean`: mean log-probability over the vocabulary. It has no gradient.
    - `candidate_logprobs`: log-probabilities of the tokens in `candidates`. It must be the last name.

    hidden [n, h], weight [V/tp, h], labels [n], candidates [n, k] -> [R, n] float32, with k rows for
    `candidate_logprobs` and one row for each other name.

    `first_row` is the vocabulary id of the first row of `weight`. Vocabulary ids from `vocab` on are padding and have
    probability 0. The gradient with respect to `hidden` is this rank's contribution: the caller sums it over `group`
    (Megatron-core's copy_to_tensor_model_parallel_region). With `triton`, the kernels of kernels/head.py are used.
    """
    rows = max(0, min(weight.shape[0], vocab - first_row))
    keep = torch.is_grad_enabled() and _keeps_logits(hidden, rows, triton=triton)
    head = _Head(first_row, rows, vocab, temperature, group, tuple(names), keep, triton)
    ids = labels[:, None]
    if "candidate_logprobs" in names:
        assert candidates is not None
        ids = torch.cat([ids, candidates], dim=1)
    return _VocabParallelStatistics.apply(hidden, weight, ids, head)  # type: ignore[return-value]


def _keeps_logits(hidden: Tensor, rows: int, *, triton: bool) -> bool:
    """Returns whether the logits of all hidden states [n, h] are kept for the backward pass. Keeping logits is faster
    than recomputing them by a second matrix product. `rows`: number of logits per hidden state on this rank.

    The choice does not change results. Memory plans do not count kept logits, because logits are kept only if the
    memory for them is free.
    """
    if hidden.device.type == "cpu":
        return len(hidden) * rows <= KEPT_ELEMENTS["cpu"]
    if not triton:  # these logits are float32
        return False
    free, _ = torch.cuda.mem_get_info(hidden.device)
    cached = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    return len(hidden) * rows * hidden.element_size() <= KEPT_SHARE * (free + cached)


def _chunks(hidden: Tensor, weight: Tensor, head: _Head) -> list[slice]:
    """Splits the rows of `hidden` into chunks of equal size (the last may be smaller). A chunk has as many rows as have
    at most CHUNK_ELEMENTS logits (more with Triton kernels), but at least min(GOOD_ROWS, number of rows that have at
    most REUSED_ELEMENTS logits), and at least 32. On a GPU the row count is a multiple of TILE_ROWS."""
    most = CHUNK_ELEMENTS[hidden.device.type] * (8 // weight.element_size() if head.triton else 1)
    good = min(GOOD_ROWS, REUSED_ELEMENTS // weight.shape[0])
    size = max(32, good, most // weight.shape[0])
    if hidden.device.type == "cuda":
        size = max(TILE_ROWS, size // TILE_ROWS * TILE_ROWS)
    return [slice(a, min(a + size, hidden.shape[0])) for a in range(0, hidden.shape[0], size)] or [slice(0, 0)]


def _sums(logits: Tensor, head: _Head, scratch: _Scratch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (maximum of this rank's logits in each row, sums by name); all are [n].

    The sums are over x = logit minus the maximum, for this rank's logits:
    - `mass`: sum of exp(x).
    - `entropy`: sum of exp(x) * x; only if requested.
    - `vocab_mean`: sum of x; only if requested.

    Without Triton, the maximum is subtracted from `logits` in place.
    """
    entropy, mean = "entropy" in head.names, "vocab_mean" in head.names
    if head.triton:
        from megatron_rl.megatron.kernels import head as kernels

        local_peak, sums = kernels.statistics(logits, 1 / head.temperature, dot=entropy, total=mean)
        names = {"mass": "mass", "dot": "entropy", "total": "vocab_mean"}
        return local_peak, {names[name]: values for name, values in sums.items()}
    local_peak = logits.amax(dim=-1) if head.rows else torch.full_like(logits.sum(-1), -torch.inf)
    logits.sub_(local_peak[:, None])
    exponents = torch.exp(logits, out=scratch.rows(len(logits), logits.dtype))
    sums = {"mass": exponents.sum(-1)}
    if mean:
        sums["vocab_mean"] = logits.sum(-1)
    if entropy:
        sums["entropy"] = exponents.mul_(logits).sum(-1)
    return local_peak, sums


def _over_ranks(local_peak: Tensor, sums: dict[str, Tensor], head: _Head) -> tuple[Tensor, dict[str, Tensor]]:
    """Converts the result of `_sums`, which refers to this rank's maximum logits, to the maximum logits over all ranks.
    Returns (maximum logit of each row over all ranks [n], this rank's sums over x = logit minus this maximum)."""
    if head.group.size() == 1:
        return local_peak, sums
    peak = local_peak.clone()
    _reduce(peak, dist.ReduceOp.MAX, head.group)
    moved = local_peak - peak if head.rows else torch.zeros_like(peak)  # a rank without logits has sums of 0
    rest, lowered = moved.exp(), {}
    for name, values in sums.items():
        if name == "vocab_mean":
            lowered[name] = values + moved * head.rows
        elif name == "entropy":
            lowered[name] = rest * (values + moved * sums["mass"])
        else:
            lowered[name] = rest * values
    return peak, lowered


def _to_gradient(
    log_p: Tensor,
    logsum: Tensor,
    ids: Tensor,
    by_id: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    head: _Head,
    scratch: _Scratch,
) -> Tensor:
    """Returns the gradient with respect to the logits, computed in place in `log_p` [n, rows].

    `log_p`: the log-probs; for Triton kernels, the unscaled logits.
    `logsum`: [n] logarithm of the sum of exponentials of each row.
    `ids`: [n, 1 + k] token ids.
    `by_id`: [n, 1 + k] gradient with respect to the log-probs of `ids`.
    `entropy`: ([n] entropy of each row, [n] gradient with respect to the entropy), or None.
    """
    local, mine = _local(ids, head)
    if head.triton:
        from megatron_rl.megatron.kernels import head as kernels

        local_ids = torch.where(mine, local, -1)
        scale = 1 / head.temperature
        kernels.to_gradient(log_p, scale, logsum=logsum, ids=local_ids, by_id=by_id.contiguous(), entropy=entropy)
        return log_p
    by_logprob = by_id.sum(1)
    if entropy is not None:
        p, (values, by_entropy) = torch.exp(log_p, out=scratch.rows(len(log_p), log_p.dtype)), entropy
        slope = log_p.add_(values[:, None]).mul_(by_entropy[:, None]).add_(by_logprob[:, None])
        step = slope.mul_(p).neg_()
    else:
        step = log_p.exp_().mul_(-by_logprob[:, None])
    if head.rows:
        step.scatter_add_(1, local, torch.where(mine, by_id, 0.0))
    return step


def _pick(logits: Tensor, local: Tensor, head: _Head) -> Tensor:
    """Returns some logits of each row as float32 [n, 1 + k], divided by the temperature. `local`: [n, 1 + k] columns of
    the logits to return. The values are 0 on a rank without vocabulary rows."""
    if not head.rows:
        return torch.zeros(local.shape, device=logits.device)
    picked = logits.gather(1, local).float()
    return picked / head.temperature if head.triton else picked


def _local(ids: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
    """Returns (index of each token in this rank's part of the vocabulary, mask that is True for tokens in this part).

    The index is 0 for tokens in another rank's part.
    """
    local = ids - head.first_row
    mine = (local >= 0) & (local < head.rows)
    return torch.where(mine, local, 0), mine


def _reduce(values: Tensor, operation: Any, group: Any) -> None:
    """All-reduces `values` in place over the group."""
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
