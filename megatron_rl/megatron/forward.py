"""From hidden states to log-probabilities and entropies of chosen tokens, over a vocabulary split across tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # logits held at once, per rank


class _VocabParallelLogprobs(torch.autograd.Function):
    """Softmax statistics of hidden @ weight.T without gathering the vocabulary or keeping logits for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: tuple[int, int, float], group: Any
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logprobs, entropies, logsums = [], [], []
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight, head)
            peak = logits.amax(dim=-1)
            _reduce(peak, dist.ReduceOp.MAX, group)
            local, mine = _local_labels(labels[rows], head, weight.shape[0])
            exponents = (logits - peak[:, None]).exp()
            target = logits.gather(1, local[:, None])[:, 0]
            weighted = torch.where(exponents > 0, exponents * logits, 0.0)
            sums = torch.stack([exponents.sum(-1), weighted.sum(-1), torch.where(mine, target, 0.0)])
            _reduce(sums, dist.ReduceOp.SUM, group)
            logsum = peak + sums[0].log()
            logprobs.append(sums[2] - logsum)
            entropies.append(logsum - sums[1] / sums[0])
            logsums.append(logsum)
        logprob, entropy, logsum = torch.cat(logprobs), torch.cat(entropies), torch.cat(logsums)
        ctx.save_for_backward(hidden, weight, labels, logsum, entropy)
        ctx.head = head
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, labels, logsum, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        use_entropy = bool(grad_entropy.any())
        for rows in _chunks(hidden, weight):
            log_p = _logits(hidden[rows], weight, ctx.head) - logsum[rows, None]
            p = log_p.exp()
            grad = -p * grad_logprob[rows, None]
            if use_entropy:
                log_p = torch.where(p > 0, log_p, 0.0)
                grad -= p * (log_p + entropy[rows, None]) * grad_entropy[rows, None]
            local, mine = _local_labels(labels[rows], ctx.head, weight.shape[0])
            grad.scatter_add_(1, local[:, None], torch.where(mine, grad_logprob[rows], 0.0)[:, None])
            grad = (grad / ctx.head[2]).to(weight.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight, None, None, None


def vocab_parallel_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, first_row: int, vocab: int, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of its distribution, natural log.

    hidden [n, h], weight [V/tp, h], labels [n] -> two [n] float32.

    `first_row` is the vocabulary id of weight's first row; rows at and beyond `vocab` are padding and get probability 0. The
    gradient for `hidden` is this rank's share: the caller sums it over `group` (core's copy_to_tensor_model_parallel_region).
    """
    return _VocabParallelLogprobs.apply(hidden, weight, labels, (first_row, vocab, temperature), group)  # type: ignore[return-value]


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // weight.shape[0])
    return [slice(a, min(a + size, hidden.shape[0])) for a in range(0, hidden.shape[0], size)] or [slice(0, 0)]


def _logits(hidden: Tensor, weight: Tensor, head: tuple[int, int, float]) -> Tensor:
    first, vocab, temperature = head
    logits = (hidden @ weight.T).float()
    if temperature != 1.0:
        logits /= temperature
    if first + weight.shape[0] > vocab:
        logits[:, max(0, vocab - first) :] = -torch.inf
    return logits


def _local_labels(labels: Tensor, head: tuple[int, int, float], rows: int) -> tuple[Tensor, Tensor]:
    """Label ids -> row numbers on this rank (0 where the label lives elsewhere), and whether it lives here."""
    local = labels - head[0]
    mine = (local >= 0) & (local < rows)
    return torch.where(mine, local, 0), mine


def _reduce(values: Tensor, operation: Any, group: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
