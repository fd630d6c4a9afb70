"""Runs on every rank: our policy against Hugging Face transformers on the same batch, for the cases named on the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.config.schema import Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import model as models
from megatron_rl.megatron import optim, parallel, replay, step
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.types import FREE, Batch, Stop, Trajectory, pack
from megatron_rl.weights import copies, hf, rectangles
from megatron_rl.weights.sizes import FAMILIES

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


def balance(routers: list[torch.Tensor], chosen: int) -> torch.Tensor:
    """Load-balancing loss of a layer of experts (Switch Transformer, eq. 4, for several choices): [T, E] logits -> E sum_e f_e P_e, f_e the
    share of the choices that fell on e, P_e its mean probability."""
    probabilities = torch.cat(routers).softmax(-1)
    shares = (
        torch.nn.functional.one_hot(probabilities.topk(chosen).indices, probabilities.shape[-1]).sum(1).float().mean(0)
        / chosen
    )
    return probabilities.shape[-1] * (shares * probabilities.mean(0)).sum()


def choose(batch: Batch, arch: hf.Architecture) -> Batch:
    """The batch with experts as an engine might have chosen them, at random; nothing is known of one sequence and of every last token."""
    g, cu = torch.Generator().manual_seed(9), batch.cu_seqlens.tolist()
    ranks = torch.rand(len(batch.tokens), arch.num_layers, arch.experts, generator=g)
    experts = ranks.argsort(-1)[..., : arch.config.num_experts_per_tok].to(torch.int16)
    experts[cu[2] : cu[3]] = FREE
    experts[batch.cu_seqlens[1:] - 1] = FREE
    return replace(batch, experts=experts)


def force(model, arch: hf.Architecture, shown: list[torch.Tensor]) -> None:
    """Has transformers' routers choose what `shown` [T, layers, k] holds, in its own order of layers."""
    renormalised = FAMILIES[arch.family].renormalised or arch.config.norm_topk_prob

    def hook(layer, _module, _inputs, out):
        logits, _, own = out
        wanted = shown[0][:, layer].long()
        chosen = torch.where(wanted == FREE, own, wanted)
        scores = logits.float().softmax(-1).gather(1, chosen)
        return logits, (scores / scores.sum(-1, keepdim=True) if renormalised else scores).to(logits.dtype), chosen

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(hook, number))


def reference(
    path: str, batch: Batch, loss_function=None, *, stored=torch.float32, dtype=torch.float32, aux: float = 0.0
):
    """Hugging Face, one sequence at a time, in `dtype` on weights rounded to `stored`: logprobs [N], loss, entropy, gradients, weights
    after one AdamW step, gradient norm, logits [N, V]. `aux`: weight of the experts' load-balancing loss, which is not in the loss that
    is returned."""
    arch, loss_function = hf.read_architecture(path), loss_function or WeightedLogprobs()
    eager = {"experts_implementation": "eager"} if arch.experts else {}
    model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=stored, attn_implementation="eager", **eager).to(dtype).train()
    )
    cu, logprobs, entropies, routers, logits, shown = batch.cu_seqlens.tolist(), [], [], [], [], []
    if batch.experts is not None:
        force(model, arch, shown)
    for a, b in zip(cu, cu[1:], strict=False):
        shown[:] = [batch.experts[a:b]] if batch.experts is not None else []
        out = model(input_ids=batch.tokens[None, a:b], **({"output_router_logits": True} if aux else {}))
        routers.append(out.router_logits if aux else ())
        logits.append(out.logits[0].detach().float())
        logp = out.logits[0].float().log_softmax(-1)
        logprobs.append(logp.gather(1, batch.labels[a:b, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    live, entropy = torch.cat(logprobs), torch.cat(entropies)
    loss = loss_function(live, entropy, batch)[0] / loss_function.denominator(batch)
    extra = sum(balance([*layer], arch.config.num_experts_per_tok) for layer in zip(*routers, strict=True))
    (loss + aux * extra).backward()
    logprobs, ent = torch.where(batch.mask, live.detach(), 0.0), float(entropy[batch.mask].sum())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    clip = min(1.0, 1.0 / (float(norm) + 1e-6))
    grads = {n: (torch.zeros_like(p) if p.grad is None else p.grad.float()) / clip for n, p in named.items()}
    torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-4).step()
    grads, after = (
        copies.by_expert(grads, arch),
        copies.by_expert({n: p.detach().float() for n, p in named.items()}, arch),
    )
    return logprobs, float(loss), ent / float(batch.mask.sum()), grads, after, float(norm), torch.cat(logits)


def whole_gradients(policy: MegatronPolicy) -> None:
    """ZeRO-1 leaves each data-parallel rank one shard of the summed gradient: put the shards together for the comparison."""
    for chunk in policy.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            dp = buffer.data_parallel_group
            shards = list(buffer.grad_data.chunk(dp.size()))
            parts = [torch.empty_like(s) for s in shards]
            dist.all_gather(parts, shards[dp.rank()].clone(), group=dp)
            buffer.grad_data.copy_(torch.cat(parts))


def make_loss(name: str, batch: Batch):
    """The case's loss, and the batch with what it needs: a clipped one off-policy whose sums are over whole sequences, or plain sums."""
    if name == "weighted":
        return WeightedLogprobs(), batch
    g = torch.Generator().manual_seed(5)
    old, reference_logprobs = (-4.5 + 0.3 * torch.randn(len(batch.tokens), generator=g) for _ in range(2))
    settings = LossConfig(kl_coef=0.05, entropy_coef=0.02, aggregation="sequence_mean", tis_cap=2.0)
    return PolicyLoss(settings), replace(
        batch, old_logprobs=old, engine_logprobs=old - 0.1, reference_logprobs=reference_logprobs
    )


def make_policy(path: str, case: dict) -> MegatronPolicy:
    layout = Layout(**case["layout"])
    role = RoleConfig(
        model=Model(path=path, dtype=case.get("dtype", "float32"), **case.get("model_settings", {})),
        layout=layout,
        optimizer=Optimizer(lr=LR, weight_decay=DECAY, eps=1e-4, clip_grad=1.0, **case.get("optimizer", {})),
        loss=LossConfig(kl_coef=0.001),
        packed=case["packed"],
        micro_batch_tokens=case.get("budget", 60),
        router_replay=case.get("replay", False),
    )
    return MegatronPolicy(role, parallel.create(layout))


def gradient_error(policy: MegatronPolicy, batch: Batch, loss, grads: dict[str, torch.Tensor]) -> float:
    """Largest difference of this rank's summed gradients from those of transformers."""
    groups, worst = policy.groups, 0.0
    with groups.active():
        optim.zero_grad(policy.chunks, policy.optimizer)
        parts = policy._micro_batches(batch, policy._shares(batch))
        step.run(policy.chunks, parts, loss=loss, scale=groups.dp_size / loss.denominator(batch), forward_only=False)
        whole_gradients(policy)
    for name, p in models.named_parameters(policy.chunks):
        _, rects = rectangles.megatron(policy.arch, name, groups.shard)
        want = torch.zeros_like(p, dtype=torch.float32)
        copies.fill(want, rects, lambda rect: copies.from_tensor(grads[rect.tensor], rect))
        error = (p.main_grad.view_as(p) - want).abs().max().item()
        worst = max(worst, error)
        if error > 1e-5:
            norms = f"norms {float(p.main_grad.norm())} {float(want.norm())}"
            print(f"rank {dist.get_rank()} {name}: gradient error {error:.1e}, {norms}", flush=True)
    return worst


def pipeline_logits(chunks, parts):
    """(micro-batch, logits [S, L, V/tp]) of the last stage; nothing elsewhere."""

    def forward(iterator, model):
        micro = next(iterator)
        replay.show(models.unwrap(model), micro.experts, training=False)
        answer = model(micro.tokens, micro.positions, None, packed_seq_params=micro.layout)
        return answer, lambda logits, non_loss_data: (micro, logits)

    iterators = [iter(parts) for _ in chunks]
    return step.get_forward_backward_func()(  # core is imported by what mends it
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(parts),
        seq_length=max(m.tokens.shape[1] * m.layout.context.size for m in parts),
        micro_batch_size=parts[0].tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )


def logits_error(policy: MegatronPolicy, batch: Batch, wanted: torch.Tensor) -> float:
    """Largest difference of this rank's logits, at its tokens that have a label and of its vocabulary, from [N, V] of transformers."""
    starts, worst = batch.cu_seqlens.tolist(), 0.0
    with policy.groups.active(), torch.no_grad():
        parts = policy._micro_batches(batch, policy._shares(batch))
        for micro, logits in pipeline_logits(policy.chunks, parts):
            place = (
                torch.cat([torch.arange(starts[s], starts[s + 1]) for s in micro.sequences])
                if micro.sequences
                else torch.zeros(0).long()
            )
            found, first = logits[micro.labels != models.IGNORED], policy.groups.tp_rank * logits.shape[-1]
            want = wanted[place[micro.answers], first : first + logits.shape[-1]]
            worst = max([worst, *(found[:, : want.shape[1]] - want).abs().amax(-1).tolist()])
    return worst


def run_case(path: str, case: dict) -> dict[str, float]:
    policy = make_policy(path, case)
    arch = policy.arch
    loss, batch = make_loss(case.get("loss", "weighted"), make_batch(arch.vocab))
    if case.get("replay"):
        batch = choose(batch, arch)
    aux = case.get("model_settings", {}).get("router_aux_loss", 0.0)
    ref_logprobs, ref_loss, ref_entropy, grads, after, ref_norm, ref_logits = reference(path, batch, loss, aux=aux)
    errors = {"logprobs": (policy.logprobs(batch) - ref_logprobs).abs().max().item()}
    errors["logits"] = logits_error(policy, batch, ref_logits)
    errors["loss_forward"] = abs(policy.loss(batch, loss) - ref_loss)
    errors["gradients"] = gradient_error(policy, batch, loss, grads)

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
    errors["micro_batches"] = metrics["micro_batches"]
    reference_logprobs = policy.logprobs(batch, reference=True)
    errors["reference"] = (reference_logprobs - ref_logprobs).abs().max().item()
    return errors | stream_errors(policy, now)


def stream_errors(policy: MegatronPolicy, now: dict[str, torch.Tensor]) -> dict[str, float]:
    """What the stream of weights gives after the reference's were in use, in small buckets, and cast."""
    again = dict(policy.weights())
    small = [*policy.weights(bucket_mib=0.01)]
    half = dict(policy.weights(bucket_mib=0.05, dtype=torch.bfloat16))
    return {
        "buckets": float([n for n, _ in small] != [*now] or any(not torch.equal(now[n], t) for n, t in small)),
        "cast": float(any(not torch.equal(now[n].bfloat16(), t) for n, t in half.items())),
        "swap": float(any(not torch.equal(again[n], now[n]) for n in now)),
    }


def run_bf16(path: str, case: dict) -> dict[str, float]:
    """A bfloat16 model against float32 arithmetic on the same rounded weights, as multiples of what transformers in bfloat16 is off."""
    policy = make_policy(path, case)
    loss, batch = make_loss("weighted", make_batch(policy.arch.vocab))
    exact = reference(path, batch, stored=torch.bfloat16)
    theirs = reference(path, batch, stored=torch.bfloat16, dtype=torch.bfloat16)
    ours = policy.logprobs(batch)
    of_gradients = max((theirs[3][n] - exact[3][n]).abs().max().item() for n in exact[3])
    gradients = gradient_error(policy, batch, loss, exact[3])
    metrics = policy.update(batch, loss)
    now = dict(policy.weights(dtype=torch.float32))
    moves = torch.cat([(now[n] - exact[4][n]).abs().flatten() for n in now])
    return {
        "logprobs": ((ours - exact[0]).square().mean() / (theirs[0] - exact[0]).square().mean()).sqrt().item(),
        "gradients": gradients / of_gradients,
        "loss": abs(metrics["loss"] - exact[1]),
        "weights": moves.mean().item(),
    }


def main() -> None:
    out, path, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for case in cases:
        run = run_case if case.get("dtype", "float32") == "float32" else run_bf16
        results[case["name"]] = run(f"{path}/{case.get('model', 'qwen2')}", case)
    out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
