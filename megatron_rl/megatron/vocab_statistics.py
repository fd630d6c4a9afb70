"""Computes log-probabilities, and what else is asked for, from hidden states, over a vocabulary split across tensor
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

# Logits that a rank holds at once: 8 MiB on a CPU (or those of some rows, see below), 512 MiB on a GPU, as float32.
# Triton kernels want no more than those that the product gives, which are twice as many in bfloat16.
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
# Rows below which a CPU's products are slower, by up to 1.7 (docs/benchmarks.md). A chunk has as many also where its
# logits are more than CHUNK_ELEMENTS, up to 28 MiB: malloc keeps no more for the next chunk.
GOOD_ROWS, REUSED_ELEMENTS = 128, 7 << 20
# Gradients for logits in bfloat16 that are joined for one product on a CPU: 128 MiB.
JOINED_ELEMENTS = 1 << 26
# The most log-probs of one micro-batch that are kept for the backward pass. A larger number is computed again.
KEPT_ELEMENTS = {"cpu": 1 << 27, "cuda": 0}


@dataclass(frozen=True)
class _Head:
    """This rank's part of the output layer: vocabulary ids first_row .. first_row + rows.

    Further rows of the weight are padding.
    """

    first_row: int
    rows: int
    vocab: int  # rows of all ranks together, without padding
    temperature: float
    group: Any
    names: tuple[str, ...]  # statistics that are asked for, `logprobs` first and `candidate_logprobs` last
    keep: bool  # whether the log-probs of all rows are kept for the backward pass
    triton: bool  # whether statistics and gradients are computed by Triton kernels, from logits as the product has them

    def logits(self, hidden: Tensor, real: Tensor, scratch: _Scratch) -> Tensor:
        """Returns the logits [n, rows] in a new tensor: float32, or for Triton kernels without the temperature."""
        if self.triton or hidden.dtype == torch.float32:
            logits = hidden @ real.T
        else:
            logits = torch.mm(hidden, real.T, out=scratch.rows(len(hidden), hidden.dtype)).float()
        return logits if self.triton or self.temperature == 1.0 else logits.div_(self.temperature)


class _Scratch:
    """Memory on a CPU that all chunks of a pass use in turn, a tensor for each dtype: there it takes longer to touch
    new memory for the first time than to compute what is written to it. Elsewhere each chunk gets its own, as torch's
    allocator has such memory at hand."""

    def __init__(self, chunks: Sequence[slice], columns: int, device: torch.device) -> None:
        self._size, self._device = (max(chunk.stop - chunk.start for chunk in chunks), columns), device
        self._found: dict[torch.dtype, Tensor] = {}

    def rows(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor [count, columns] whose contents are undefined."""
        if self._device.type != "cpu":
            return torch.empty(count, self._size[1], dtype=dtype, device=self._device)
        if dtype not in self._found:
            self._found[dtype] = torch.empty(self._size, dtype=dtype)
        return self._found[dtype][:count]


class _Products:
    """Sums the products of chunks' gradients and hidden states to the gradient of the output layer [V, h].

    Where a product cannot be added to a float32 sum as it is made (bfloat16 on a CPU), a pass over that sum takes
    longer than the product of a small chunk: chunks are joined for one product.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, rows: int, chunks: Sequence[slice]) -> None:
        """`hidden` [n, h] are all hidden states, `chunks` their parts, one behind the other; `rows` of `weight` [V, h]
        are no padding."""
        self._hidden, self._weight, self._rows = hidden, weight, rows
        self._start = self._stop = 0  # of the hidden states whose product has not been made
        self._joined: Tensor | None = None  # gradients that wait for it, on a CPU
        self._total: Tensor | None = None  # float32, or one product alone
        if weight.dtype == torch.float32 or weight.device.type != "cpu":
            self._total = torch.zeros_like(weight, dtype=torch.float32)
        else:
            longest = max(chunk.stop - chunk.start for chunk in chunks)
            most = min(len(hidden), max(longest, JOINED_ELEMENTS // max(1, rows)))
            self._joined = torch.empty(most, rows, dtype=weight.dtype)

    def add(self, step: Tensor, rows: slice) -> Tensor:
        """Takes the gradient for the logits of the next chunk, [n, rows]. Returns it in the dtype of the weight."""
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
        """Returns the sum of all products, in the dtype of the weight."""
        if self._joined is not None:
            self._sum()
        assert self._total is not None
        total = self._total.to(self._weight.dtype)
        padding = len(self._weight) - len(total)
        return F.pad(total, (0, 0, 0, padding)) if padding else total

    def _sum(self) -> None:
        """Adds the product of what was joined."""
        assert self._joined is not None
        product = self._joined[: self._stop - self._start].T @ self._hidden[self._start : self._stop]
        self._total = product if self._total is None else self._total.float().add_(product)
        self._start = self._stop


class _VocabParallelStatistics(torch.autograd.Function):
    """Softmax statistics of hidden @ weight.T, without gathering the vocabulary.

    Logits are computed in chunks, so that those of a large batch are never all held.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, head: _Head
    ) -> Tensor:
        # Results get their memory before the first chunk. Small results in the holes that chunks leave would keep the
        # next chunk out of these holes, and a CPU's heap would grow with every chunk.
        single = [name for name in head.names if name != "candidate_logprobs"]
        found = {name: torch.empty(len(hidden), device=hidden.device) for name in single}
        candidates = torch.empty(ids.shape[1] - 1, len(hidden), device=hidden.device)
        logsum = torch.empty(len(hidden), device=hidden.device)
        kept, real = [], weight[: head.rows]
        chunks = _chunks(hidden, weight, head)
        scratch = _Scratch(chunks, head.rows, hidden.device)
        for rows in chunks:
            logits = head.logits(hidden[rows], real, scratch)
            local, mine = _local(ids[rows], head)
            picked = _pick(logits, local, head)
            own, parts = _sums(logits, head, scratch)
            peak, parts = _over_ranks(own, parts, head)
            sums = torch.stack([*parts.values(), *torch.where(mine, picked - peak[:, None], 0.0).T])
            _reduce(sums, dist.ReduceOp.SUM, head.group)
            whole = dict(zip(parts, sums, strict=False))
            log, picked = whole["mass"].log(), sums[len(parts) :]
            found["logprobs"][rows], logsum[rows] = picked[0] - log, log + peak
            candidates[:, rows] = picked[1:] - log
            if "entropy" in found:
                found["entropy"][rows] = log - whole["entropy"] / whole["mass"]
            if "vocab_mean" in found:
                found["vocab_mean"][rows] = whole["vocab_mean"] / head.vocab - log
            if head.keep:
                kept.append(logits.sub_((log + (peak - own))[:, None]))
        ctx.save_for_backward(hidden, weight, ids, logsum, found.get("entropy"))
        ctx.head, ctx.kept = head, kept
        return torch.cat([torch.stack([*found.values()]), candidates])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, ids, logsum, entropy = ctx.saved_tensors
        head, real = ctx.head, weight[: ctx.head.rows]
        gradients = by_name(head.names, grad)  # that of vocab_mean is left out: it has none
        grad_entropy, grad_candidates = (gradients.get(name) for name in ("entropy", "candidate_logprobs"))
        grad_hidden = torch.empty_like(hidden)
        # A frozen output layer, under adapters, has no gradient: it would be as large as the layer, in float32.
        chunks = _chunks(hidden, weight, head)
        by_weight = _Products(hidden, weight, head.rows, chunks) if ctx.needs_input_grad[1] else None
        by_id = gradients["logprobs"][:, None] / head.temperature  # [n, 1 + k], of the tokens in `ids`
        if grad_candidates is not None:
            by_id = torch.cat([by_id, grad_candidates / head.temperature], dim=1)
        by_entropy = None if grad_entropy is None else grad_entropy / head.temperature
        if by_entropy is not None and not head.triton and not by_entropy.any():
            by_entropy = None  # computing zeros takes longer than looking
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
    """Computes what is asked for of each label's distribution, natural log: `logprobs` of the label (the first name),
    `entropy`, `vocab_mean`, the mean of all log-probabilities, which has no gradient, and `candidate_logprobs` (the
    last name) of the tokens in `candidates`.

    hidden [n, h], weight [V/tp, h], labels [n], candidates [n, k] -> [R, n] float32: a row for each name, and k for
    `candidate_logprobs`.

    `first_row` is the vocabulary id of weight's first row. Rows at and beyond `vocab` are padding and get probability
    0. The gradient for `hidden` is this rank's share: the caller sums it over `group` (core's
    copy_to_tensor_model_parallel_region). With `triton` logits are read by the kernels of kernels/head.py.
    """
    rows = max(0, min(weight.shape[0], vocab - first_row))
    keep = torch.is_grad_enabled() and not triton and len(hidden) * rows <= KEPT_ELEMENTS[hidden.device.type]
    head = _Head(first_row, rows, vocab, temperature, group, tuple(names), keep, triton)
    ids = labels[:, None]
    if "candidate_logprobs" in names:
        assert candidates is not None
        ids = torch.cat([ids, candidates], dim=1)
    return _VocabParallelStatistics.apply(hidden, weight, ids, head)  # type: ignore[return-value]


def _chunks(hidden: Tensor, weight: Tensor, head: _Head) -> list[slice]:
    """Cuts the rows of `hidden` so that the logits of a chunk fit CHUNK_ELEMENTS, or are those of GOOD_ROWS."""
    most = CHUNK_ELEMENTS[hidden.device.type] * (4 // weight.element_size() if head.triton else 1)
    good = min(GOOD_ROWS, REUSED_ELEMENTS // weight.shape[0])
    size = max(32, good, most // weight.shape[0])
    return [slice(a, min(a + size, hidden.shape[0])) for a in range(0, hidden.shape[0], size)] or [slice(0, 0)]


def _sums(logits: Tensor, head: _Head, scratch: _Scratch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns this rank's largest logit of each row, and sums over its logits less that one, [n] each, by name: `mass`
    of exponentials, `entropy` of their products with logits, `vocab_mean` of logits.

    Without Triton the logits have lost their largest one when it returns.
    """
    entropy, mean = "entropy" in head.names, "vocab_mean" in head.names
    if head.triton:
        from megatron_rl.megatron.kernels import head as kernels

        own, sums = kernels.statistics(logits, 1 / head.temperature, dot=entropy, total=mean)
        names = {"mass": "mass", "dot": "entropy", "total": "vocab_mean"}
        return own, {names[name]: values for name, values in sums.items()}
    own = logits.amax(dim=-1) if head.rows else torch.full_like(logits.sum(-1), -torch.inf)
    logits.sub_(own[:, None])
    exponents = torch.exp(logits, out=scratch.rows(len(logits), logits.dtype))
    sums = {"mass": exponents.sum(-1)}
    if mean:
        sums["vocab_mean"] = logits.sum(-1)
    if entropy:
        sums["entropy"] = exponents.mul_(logits).sum(-1)
    return own, sums


def _over_ranks(own: Tensor, sums: dict[str, Tensor], head: _Head) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the largest logit of all ranks, [n], and a rank's sums over its logits less that one."""
    if head.group.size() == 1:
        return own, sums
    peak = own.clone()
    _reduce(peak, dist.ReduceOp.MAX, head.group)
    moved = own - peak if head.rows else torch.zeros_like(peak)  # a rank without logits has sums of 0
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
    """Returns the gradient for the logits, in the memory of `log_p` [n, rows]: their log-probs, or for Triton kernels
    the logits.

    `by_id` [n, 1 + k] is the gradient by the log-probs of `ids`, `entropy` that of each row and the gradient by it.
    """
    local, mine = _local(ids, head)
    if head.triton:
        from megatron_rl.megatron.kernels import head as kernels

        known = torch.where(mine, local, -1)
        scale = 1 / head.temperature
        kernels.to_gradient(log_p, scale, logsum=logsum, ids=known, by_id=by_id.contiguous(), entropy=entropy)
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
    """Returns the logits of this rank's rows `local` [n, 1 + k], float32."""
    if not head.rows:
        return torch.zeros(local.shape, device=logits.device)
    found = logits.gather(1, local).float()
    return found / head.temperature if head.triton else found


def _local(ids: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
    """Returns (row numbers on this rank, whether the token lives here). The row of any other token is 0."""
    local = ids - head.first_row
    mine = (local >= 0) & (local < head.rows)
    return torch.where(mine, local, 0), mine


def _reduce(values: Tensor, operation: Any, group: Any) -> None:
    """Reduces `values` in place over the group."""
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
