"""Runs on every rank: our policy against Hugging Face transformers on the same batch, for the cases named on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_rl.config import Layout, Loss, Model, Optimizer, Role
from megatron_rl.megatron import model as models
from megatron_rl.megatron import optim, parallel, step
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.types import Batch, Stop, Trajectory, pack
from megatron_rl.weights import copies, hf, rectangles

LR, DECAY = 1e-2, 0.1
LENGTHS = (5, 17, 9, 23, 12, 7, 30, 3)


class WeightedLogprobs:
    """sum over tokens of -(advantage * log p) - 0.1 * entropy."""

    def __call__(self, logprobs, entropy, batch):
        total = -(torch.where(batch.mask, logprobs * batch.advantages + 0.1 * entropy, 0.0)).sum()
        return total, {"entropy": torch.where(batch.mask, entropy, 0.0).sum()}

    def denominator(self, batch):
        return float(batch.mask.sum())


def make_batch(vocab: int) -> Batch:
    g = torch.Generator().manual_seed(3)
    out = []
    for i, n in enumerate(LENGTHS):
        tokens = torch.randint(0, vocab, (n,), generator=g).tolist()
        prompt = 1 + i % 3
        out.append(
            Trajectory(
                group=str(i), tokens=tokens, trainable=[j >= prompt for j in range(n)], logprobs=[0.0] * n, version=0, stop=Stop.EOS,
                advantages=torch.randn(n, generator=g).tolist(),
            )
        )  # fmt: skip
    return pack(out)


def reference(path: str, batch: Batch):
    """Hugging Face, one sequence at a time: logprobs [N], loss, gradients, weights after one AdamW step."""
    arch = hf.read_architecture(path)
    eager = {"experts_implementation": "eager"} if arch.experts else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **eager).train()
    cu, total, logprobs, ent = batch.cu_seqlens.tolist(), 0.0, torch.zeros(len(batch.tokens)), 0.0
    for a, b in zip(cu, cu[1:], strict=False):
        logp = model(input_ids=batch.tokens[None, a:b]).logits[0].float().log_softmax(-1)
        mine = logp.gather(1, batch.labels[a:b, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        mask = batch.mask[a:b]
        total = total - (mine * batch.advantages[a:b] + 0.1 * entropy)[mask].sum()
        ent += float(entropy[mask].sum())
        logprobs[a:b] = torch.where(mask, mine.detach(), 0.0)
    loss = total / batch.mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    clip = min(1.0, 1.0 / (float(norm) + 1e-6))
    grads = {n: p.grad.clone() / clip for n, p in named.items()}
    torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-4).step()
    grads, after = copies.by_expert(grads, arch), copies.by_expert({n: p.detach() for n, p in named.items()}, arch)
    return logprobs, float(loss), ent / float(batch.mask.sum()), grads, after, float(norm)


def whole_gradients(policy: MegatronPolicy) -> None:
    """ZeRO-1 leaves each data-parallel rank one shard of the summed gradient: put the shards together for the comparison."""
    for chunk in policy.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            dp = buffer.data_parallel_group
            shards = list(buffer.grad_data.chunk(dp.size()))
            parts = [torch.empty_like(s) for s in shards]
            dist.all_gather(parts, shards[dp.rank()].clone(), group=dp)
            buffer.grad_data.copy_(torch.cat(parts))


def run_case(path: str, case: dict) -> dict[str, float]:
    layout = Layout(**case["layout"])
    role = Role(
        model=Model(path=path, recompute=case.get("recompute", "none")),
        layout=layout,
        optimizer=Optimizer(lr=LR, weight_decay=DECAY, eps=1e-4, clip_grad=1.0),
        loss=Loss(kl_coef=0.001),
        packed=case["packed"],
        micro_batch_tokens=case.get("budget", 60),
    )
    groups = parallel.create(layout)
    policy = MegatronPolicy(role, groups)
    arch = policy.arch
    batch, loss = make_batch(arch.vocab), WeightedLogprobs()
    ref_logprobs, ref_loss, ref_entropy, grads, after, ref_norm = reference(path, batch)
    errors = {"logprobs": (policy.logprobs(batch) - ref_logprobs).abs().max().item()}
    errors["loss_forward"] = abs(policy.loss(batch, loss) - ref_loss)

    with groups.active():
        optim.zero_grad(policy.chunks, policy.optimizer)
        parts = policy._micro_batches(batch)
        step.run(policy.chunks, parts, loss=loss, scale=groups.dp_size / loss.denominator(batch), forward_only=False)
        whole_gradients(policy)
    worst = 0.0
    for name, p in models.named_parameters(policy.chunks):
        _, rects = rectangles.megatron(arch, name, groups.shard)
        want = torch.zeros_like(p)
        copies.fill(want, rects, lambda rect: copies.from_tensor(grads[rect.tensor], rect))
        error = (p.main_grad.view_as(p) - want).abs().max().item()
        worst = max(worst, error)
        if error > 1e-5:
            print(
                f"rank {dist.get_rank()} {name}: gradient error {error:.1e}, norms {float(p.main_grad.norm())} {float(want.norm())}",
                flush=True,
            )
    errors["gradients"] = worst

    before = {n: t.clone() for n, t in policy.weights()}
    metrics = policy.update(batch, loss)
    errors["loss"] = abs(metrics["loss"] - ref_loss)
    errors["entropy"] = abs(metrics["entropy"] - ref_entropy)
    errors["grad_norm"] = abs(metrics["grad_norm"] - ref_norm)
    now = dict(policy.weights())
    errors["names"] = float(len(set(after) ^ set(now) - ({"lm_head.weight"} if arch.tied else set())))
    errors["weights"] = max((now[n] - after[n]).abs().max().item() for n in now)
    errors["moved"] = max((now[n] - before[n]).abs().max().item() for n in now)
    errors["largest_gradient"] = max(g.abs().max().item() for g in grads.values())
    reference_logprobs = policy.logprobs(batch, reference=True)
    errors["reference"] = (reference_logprobs - ref_logprobs).abs().max().item()
    again = dict(policy.weights())
    small = [*policy.weights(bucket_mib=0.01)]
    errors["buckets"] = float([n for n, _ in small] != [*now] or any(not torch.equal(now[n], t) for n, t in small))
    half = dict(policy.weights(bucket_mib=0.05, dtype=torch.bfloat16))
    errors["cast"] = float(any(not torch.equal(now[n].bfloat16(), t) for n, t in half.items()))
    errors["swap"] = float(any(not torch.equal(again[n], now[n]) for n in now))
    errors["micro_batches"] = metrics["micro_batches"]
    return errors


def main() -> None:
    out, path, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {case["name"]: run_case(f"{path}/{case.get('model', 'qwen2')}", case) for case in cases}
    out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
