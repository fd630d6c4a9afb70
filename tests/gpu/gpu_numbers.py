"""What the tests on a CUDA device compare: log-probs and gradients of both sides, and the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from layouts_worker import work_of
from torch import Tensor

from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.batches.packed_batch import pack
from megatron_rl.megatron import model as models
from megatron_rl.megatron import optimizer
from megatron_rl.megatron import pipeline_pass as core_step
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.types import Rollout
from megatron_rl.weights import parameter_mapping, tensor_copies


class SumOfLogprobs:
    """The sum of the log-probs of trained tokens."""

    needs: frozenset[str] = frozenset()

    def __call__(self, live: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.where(batch.mask, live.logprobs, 0.0).sum(), {}

    def aggregate(self, counts: Any, groups: Any) -> Any:
        return aggregate("token_mean", counts, groups)


def by_transformers(model: Any, rollouts: Sequence[Rollout]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a transformers model's log-probs [N] of trained tokens, and the gradients of their sum by name, on the
    CPU. The model computes on its device, in its dtype, one sequence at a time."""
    batch, parts = pack(rollouts), []
    ends = batch.cu_seqlens.tolist()
    for first, last in zip(ends, ends[1:], strict=False):
        tokens, labels = (one[first:last].to(model.device) for one in (batch.tokens, batch.labels))
        logits = model(tokens[None]).logits[0].float()
        parts.append(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    logprobs = torch.cat(parts)
    model.zero_grad()
    torch.where(batch.mask.to(model.device), logprobs, 0.0).sum().backward()
    gradients = {name: one.grad.float().cpu() for name, one in model.named_parameters()}
    return torch.where(batch.mask, logprobs.detach().cpu(), 0.0), gradients


def gradients_of(policy: MegatronPolicy, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Returns a policy's gradients of the sum of log-probs by Hugging Face names, on the CPU. One rank has them all."""
    work, _ = work_of(policy, rollouts, SumOfLogprobs())
    with policy.groups.active():
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        policy._run(work, 0, core_step.Pass(loss=SumOfLogprobs(), backward=True))
    return tensor_copies.assemble(
        (p.main_grad.view_as(p).cpu(), parameter_mapping.megatron(policy.arch, name, policy.groups.shard)[1])
        for name, p in models.named_parameters(policy.chunks)
    )


def rms(values: Iterable[Tensor]) -> float:
    """Returns the root of the mean square of all elements."""
    return float(torch.cat([one.flatten() for one in values]).square().mean().sqrt())


def optimizer_state(policy: MegatronPolicy) -> list[Tensor]:
    """Returns copies of the moments and of the float32 masters, on the CPU."""
    out = []
    for part in optimizer.parts(policy.optimizer):
        out += [v.cpu().clone() for s in part.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        masters = [master for group in part.shard_fp32_from_float16_groups for master in group]
        out += [master.detach().cpu().clone() for master in masters if master is not None]
    return out
