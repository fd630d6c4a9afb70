"""Runs on every rank: our policy against Hugging Face transformers on the same batch, for the cases named on the
command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import numpy as np
import process_groups
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_process import OneProcess
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.algorithms.centering import ENGINE_CANDIDATES
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.algorithms.value_loss import PolicyAndValueLoss, ValueLoss
from megatron_rl.batches.data_parallel_split import tally
from megatron_rl.batches.packed_batch import CANDIDATES, VALUE, Batch, Statistics, pack, statistics_needed
from megatron_rl.batches.replica_batch import Work
from megatron_rl.config.schema import CorrectionConfig, Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import model as models
from megatron_rl.megatron import optimizer, parallel, pipeline_pass, role_model, router_replay
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.models.blocks import VALUE_HEAD
from megatron_rl.training.update import Trainee, policy_logprobs, scatter, update
from megatron_rl.types import FREE, Author, Rollout, spans_of
from megatron_rl.weights import hf_model, parameter_mapping, tensor_copies

LR, DECAY = 1e-2, 0.1
LENGTHS = (5, 17, 9, 23, 12, 7, 30, 3)
VALUE_COEF, VALUE_CLIP = 0.7, 0.3


class WeightedLogprobs:
    """sum over tokens of -(advantage * log p) - 0.1 * entropy."""

    needs = frozenset({"advantages", "entropy"})

    def __call__(self, live, batch):
        total = -(torch.where(batch.mask, live.logprobs * batch.advantages + 0.1 * live.entropy, 0.0)).sum()
        return total, {"entropy": torch.where(batch.mask, live.entropy, 0.0).sum()}

    def aggregate(self, counts, groups):
        return aggregate("token_mean", counts, groups)


def make_rollouts(vocab: int) -> list[Rollout]:
    g = torch.Generator().manual_seed(3)
    rollouts = []
    for i, n in enumerate(LENGTHS):
        tokens, prompt = torch.randint(0, vocab, (n,), generator=g).numpy(), 1 + i % 3
        spans = spans_of((prompt, Author.ENVIRONMENT, -1), (n - prompt, Author.POLICY, 0))
        advantages = torch.randn(n, generator=g).numpy()
        rollouts.append(
            Rollout(
                role="generator", group=str(i), tokens=tokens, logprobs=np.zeros(n), spans=spans, advantages=advantages
            )
        )
    return rollouts


def make_batch(vocab: int) -> Batch:
    return pack(make_rollouts(vocab))


@cache
def _world(group: object) -> World:
    return World() if dist.get_world_size() > 1 else OneProcess()


def world() -> World:
    """Returns the world of this process's ranks, made once."""
    return _world(dist.group.WORLD)


def own(rollouts: Sequence[Rollout]) -> Sequence[Rollout] | None:
    """The rollouts on the driver, None elsewhere."""
    return rollouts if world().rank == 0 else None


def learn(
    policy: MegatronPolicy, rollouts: Sequence[Rollout] | None = None, loss=None, *, each: int | None = None
) -> dict[str, float]:
    """One update, of `each` samples in an optimizer step. Collective."""
    rollouts = make_rollouts(policy.arch.vocab) if rollouts is None else rollouts
    trainee = Trainee(policy=policy, loss=loss or WeightedLogprobs(), samples_per_optimizer_step=each)
    return update(world(), trainee, own(rollouts))


def logprobs_of(policy: MegatronPolicy, rollouts: Sequence[Rollout], *, reference: bool = False) -> torch.Tensor:
    """Gives the log-prob of every position of the packed rollouts, on every rank. -> [N]"""
    logprobs = world().broadcast(policy_logprobs(world(), policy, own(rollouts), reference=reference))
    return torch.cat([torch.from_numpy(np.append(row[1:], np.float32(0))) for row in logprobs])


def work_of(
    policy: MegatronPolicy, rollouts: Sequence[Rollout], loss, extra: dict[str, torch.Tensor] | None = None
) -> tuple[Work, torch.Tensor]:
    """This rank's work, with `extra` [N] of the packed rollouts, and where its positions stand among all.
    Collective."""
    work = scatter(world(), policy, own(rollouts), loss=loss)
    places = torch.arange(sum(len(r.tokens) for r in rollouts)).split([len(r.tokens) for r in rollouts])
    index = torch.cat([torch.zeros(0, dtype=torch.int64), *(places[i] for i in work.flat.numbers.tolist())])
    return replace(work, **{name: values[index] for name, values in (extra or {}).items()}), index


def balance(routers: Sequence[torch.Tensor], chosen: int) -> torch.Tensor:
    """Load-balancing loss of the layers of experts for one sequence, from the router logits [T, E] of each layer:
    the sum over the layers of E sum_e f_e P_e (Switch Transformer, eq. 4). transformers adds the f_e of the token's k
    choices up and does not average them."""
    return sum(load_balancing_loss_func((logits,), logits.shape[-1], chosen) / chosen for logits in routers)


def choose(rollouts: Sequence[Rollout], arch: hf_model.Architecture) -> list[Rollout]:
    """The rollouts with experts as an engine might have chosen them, at random; nothing is known of one sequence and of
    every last token."""
    g, chosen = torch.Generator().manual_seed(9), []
    for i, r in enumerate(rollouts):
        ranks = torch.rand(len(r.tokens) - 1, arch.num_layers, arch.experts, generator=g)
        experts = ranks.argsort(-1)[..., : arch.features.experts_per_token].to(torch.int16).numpy()
        experts[:, : arch.dense_layers] = FREE
        chosen.append(replace(r, experts=None if i == 2 else experts))
    return chosen


def force(model, arch: hf_model.Architecture, shown: list[torch.Tensor]) -> None:
    """Has transformers' routers choose what `shown` [T, layers, k] holds, in its own order of layers."""
    routing = arch.features.routing

    def hook(layer, _module, _inputs, outputs):
        logits, _, routed = outputs
        experts = shown[0][:, layer].long()
        chosen = torch.where(experts == FREE, routed, experts)
        scores = logits.float().softmax(-1) if routing.scores == "softmax" else logits.float().sigmoid()
        scores = scores.gather(1, chosen)
        weights = routing.scale * (scores / scores.sum(-1, keepdim=True) if routing.renormalised else scores)
        return logits, weights.to(logits.dtype), chosen

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
            router.register_forward_hook(partial(hook, number))


def reference(
    path: str,
    rollouts: Sequence[Rollout],
    loss_function=None,
    extra=None,
    *,
    stored=torch.float32,
    dtype=torch.float32,
    aux: float = 0.0,
    decay_norms: bool = False,
    head: str | None = None,
):
    """Hugging Face, one sequence at a time, in `dtype` on weights rounded to `stored`: logprobs [N], loss, entropy,
    gradients, weights after one AdamW step, gradient norm, logits [N, V]. `aux`: weight of the experts' load-balancing
    loss, which is not in the loss that is returned. `decay_norms`: weight decay acts on vectors, too. Of a model with a
    `head`, the values stand in place of the log-probs and logits, and their mean in place of the entropy. With a loss
    that reads both log-probs and values, the model has a value head beside its output layer; the values [N] come
    last."""
    arch, loss_function = hf_model.read_architecture(path, head), loss_function or WeightedLogprobs()
    batch, tallied = pack(rollouts), tally(rollouts)
    weights, denominator = loss_function.aggregate(tallied.weighted, tallied.groups)
    batch = replace(batch, weights=batch.weights * batch.spread(torch.from_numpy(weights)), **(extra or {}))
    eager = {"experts_implementation": "eager"} if arch.experts else {}
    kind = AutoModelForCausalLM if head is None else AutoModelForSequenceClassification
    model = kind.from_pretrained(path, dtype=stored, attn_implementation="eager", **eager).to(dtype).train()
    beside: list[torch.Tensor] = []  # values of the head beside the output layer
    if both := isinstance(loss_function, PolicyAndValueLoss):
        model.value_head = torch.nn.Linear(arch.hidden, 1, bias=False, dtype=dtype)
        fill_value_head(model.value_head.weight)
    cu, logprobs, entropies, routers, logits, shown = batch.cu_seqlens.tolist(), [], [], [], [], []
    candidates, gathered = batch.values.get(CANDIDATES), []
    if batch.experts is not None:
        force(model, arch, shown)
    for a, b in zip(cu, cu[1:], strict=False):
        shown[:] = [batch.experts[a:b]] if batch.experts is not None else []
        if head is not None:
            values = model.score(model.model(input_ids=batch.tokens[None, a:b]).last_hidden_state)[0].float()
            logits.append(values.detach())
            logprobs.append(values[:, 0])
            continue
        answer = model(input_ids=batch.tokens[None, a:b], **({"output_router_logits": True} if aux else {}))
        if both:
            hidden = model.model(input_ids=batch.tokens[None, a:b]).last_hidden_state[0]
            beside.append(F.linear(hidden.float(), model.value_head.weight.float())[:, 0])
        routers.append(answer.router_logits if aux else ())
        logits.append(answer.logits[0].detach().float())
        logp = answer.logits[0].float().log_softmax(-1)
        logprobs.append(logp.gather(1, batch.labels[a:b, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
        gathered += [] if candidates is None else [logp.gather(1, candidates[a:b].long())]
    live = torch.cat(logprobs)
    entropy = live.detach() if head is not None else torch.cat(entropies)
    value = torch.cat(beside) if beside else live
    statistics = Statistics(live, entropy, candidate_logprobs=torch.cat(gathered) if gathered else None, value=value)
    loss = loss_function(statistics, batch)[0] / denominator
    # each sequence counts with its number of tokens
    chosen, pairs = arch.features.experts_per_token, zip(batch.lengths.tolist(), routers, strict=True)
    balances = [n * balance(logits, chosen) for n, logits in pairs] if aux else []
    (loss + aux * sum(balances) / len(batch.tokens)).backward()
    logprobs, ent = torch.where(batch.mask, live.detach(), 0.0), float(entropy[batch.mask].sum())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    named = dict(model.named_parameters())
    # transformers stacks the biases of experts, which are vectors
    vectors = {n for n, p in named.items() if p.dim() == 1 or n.endswith("_bias")}
    groups = [
        {"params": [p for n, p in named.items() if n not in vectors], "weight_decay": DECAY},
        {"params": [named[n] for n in vectors], "weight_decay": DECAY if decay_norms else 0.0},
    ]
    clip = min(1.0, 1.0 / (float(norm) + 1e-6))
    grads = {n: (torch.zeros_like(p) if p.grad is None else p.grad.float()) / clip for n, p in named.items()}
    torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-4).step()
    grads = tensor_copies.by_expert(grads, arch)
    kept = {
        n: b for n, b in model.named_buffers() if n in model.state_dict()
    }  # parameters of ours that are not trained
    moved = tensor_copies.by_expert({n: p.detach().float() for n, p in [*named.items(), *kept.items()]}, arch)
    entropy, value = ent / float(batch.mask.sum()), torch.where(batch.mask, value.detach(), 0.0)
    return logprobs, float(loss), entropy, grads, moved, float(norm), torch.cat(logits), value


def fill_value_head(weight: torch.Tensor, _seed: int = 0) -> None:
    """Sets a weight [1, h] of a value head that gives the transformer gradients as large as those of the policy loss
    are."""
    with torch.no_grad():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(21)))


def whole_gradients(policy: MegatronPolicy) -> None:
    """ZeRO-1 leaves each data-parallel rank one shard of the summed gradient: put the shards together for the
    comparison."""
    for chunk in policy.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            dp = buffer.data_parallel_group
            shards = list(buffer.grad_data.chunk(dp.size()))
            parts = [torch.empty_like(s) for s in shards]
            dist.all_gather(parts, shards[dp.rank()].clone(), group=dp)
            buffer.grad_data.copy_(torch.cat(parts))


def make_loss(name: str, rollouts: Sequence[Rollout]):
    """The case's loss, the rollouts, and further log-probs [N] of them: GMPO off-policy, whose terms and weights
    are sums over whole sequences, a teacher's likeliest tokens, the engine's (centering), or plain sums."""
    if name == "weighted":
        return WeightedLogprobs(), rollouts, {}
    if name == "value":
        g, with_values = torch.Generator().manual_seed(11), []
        for r in rollouts:
            drawn = 0.6 * torch.randn(2, len(r.tokens), generator=g)
            with_values.append(replace(r, values={"old_value": drawn[0].numpy(), "returns": drawn[1].numpy()}))
        return ValueLoss(LossConfig(value_clip=0.3)), with_values, {}
    if name == "shared":
        _, rollouts, _ = make_loss("value", rollouts)
        policy_loss, rollouts, extra = make_loss("policy", rollouts)
        return (
            PolicyAndValueLoss(replace(policy_loss.config, value_coef=VALUE_COEF, value_clip=VALUE_CLIP)),
            rollouts,
            extra,
        )
    if name == "distilled":
        g, with_values = torch.Generator().manual_seed(7), []
        for r in rollouts:
            top = (2 * torch.randn(len(r.tokens), 97, generator=g)).log_softmax(-1).topk(6)
            values = {CANDIDATES: top.indices.int().numpy(), "teacher_candidate_logprobs": top.values.numpy()}
            with_values.append(replace(r, values=values))
        settings = LossConfig(objective="distilled_top_k", objective_args={"kl": "mixed"}, kl_coef=0.0)
        return PolicyLoss(settings), with_values, {}
    if name == "centered":
        g, with_values = torch.Generator().manual_seed(8), []
        for r in rollouts:
            top = (2 * torch.randn(len(r.tokens), 97, generator=g)).log_softmax(-1).topk(6)
            values = {CANDIDATES: top.indices.int().numpy(), ENGINE_CANDIDATES: top.values.numpy()}
            with_values.append(replace(r, advantages=8 * np.asarray(r.advantages), values=values))
        correction = CorrectionConfig(kind="truncate", high=2.0)
        return PolicyLoss(LossConfig(kl_coef=0.0, centering=6, correction=correction)), with_values, {}
    g, size = torch.Generator().manual_seed(5), sum(len(r.tokens) for r in rollouts)
    old, reference_logprobs = (-4.5 + 0.3 * torch.randn(size, generator=g) for _ in range(2))
    engine = (old - 0.1).split([len(r.tokens) for r in rollouts])
    rollouts = [
        replace(r, logprobs=np.append(np.float32(0), e.numpy()[:-1])) for r, e in zip(rollouts, engine, strict=True)
    ]
    correction = CorrectionConfig(kind="truncate", level="sequence", high=2.0)
    settings = LossConfig(
        objective="gmpo", kl_coef=0.05, entropy_coef=0.02, aggregation="sequence_mean", correction=correction
    )
    return PolicyLoss(settings), rollouts, {"old_logprobs": old, "reference_logprobs": reference_logprobs}


def make_policy(path: str, case: dict) -> MegatronPolicy:
    layout = Layout(**case["layout"])
    role = RoleConfig(
        model=Model(path=path, dtype=case.get("dtype", "float32"), **case.get("model_settings", {})),
        layout=layout,
        optimizer=Optimizer(lr=LR, weight_decay=DECAY, eps=1e-4, clip_grad=1.0, **case.get("optimizer", {})),
        head=case.get("head"),
        loss=LossConfig(kl_coef=0.001, value_coef=VALUE_COEF if case.get("loss") == "shared" else 0.0),
        micro_batch_tokens=case.get("budget", 60),
        router_replay=case.get("replay", False),
    )
    with patch.object(role_model, "_fill_new_head", fill_value_head):
        return MegatronPolicy(role, parallel.create(layout))


def gradient_error(policy: MegatronPolicy, work: Work, loss, grads: dict[str, torch.Tensor]) -> float:
    """Largest difference of this rank's summed gradients from those of transformers."""
    groups, worst = policy.groups, 0.0
    with groups.active():
        optimizer.zero_grad(policy.chunks, policy.optimizer)
        scale = groups.dp_size / work.steps[0].denominator
        policy._run(
            work, 0, pipeline_pass.Pass(names=statistics_needed(loss.needs), loss=loss, scale=scale, backward=True)
        )
        whole_gradients(policy)
    for name, p in models.named_parameters(policy.chunks):
        if not p.requires_grad:
            continue
        want = torch.zeros_like(p, dtype=torch.float32)
        if name == VALUE_HEAD:
            want.copy_(grads[name])
        else:
            _, rects = parameter_mapping.megatron(policy.arch, name, groups.shard)
            tensor_copies.fill(want, rects, lambda rect: tensor_copies.from_tensor(grads[rect.tensor], rect))
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
        router_replay.show(models.unwrap(model), micro.experts, training=False)
        answer = model(micro.tokens, micro.positions, None, packed_seq_params=micro.layout)
        return answer, lambda logits, non_loss_data: (micro, logits)

    iterators = [iter(parts) for _ in chunks]
    return pipeline_pass.get_forward_backward_func()(  # core is imported by what mends it
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(parts),
        seq_length=max(m.tokens.shape[1] * m.layout.context.size for m in parts),
        micro_batch_size=parts[0].tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )


def logits_error(policy: MegatronPolicy, work: Work, index: torch.Tensor, logits_of_rows: torch.Tensor) -> float:
    """Largest difference of this rank's logits, at its tokens that have a label and of its vocabulary, from [N, V] of
    transformers. `index`: where the positions of `work` stand among the N."""
    worst = 0.0
    with policy.groups.active(), torch.no_grad():
        for micro, logits in pipeline_logits(policy.chunks, [*policy._micro_batches(work, 0)]):
            rows = logits.flatten(0, 1)[micro.label_rows].cpu()
            first = policy.groups.tp.rank() * logits.shape[-1] if policy.role.head is None else 0
            want = logits_of_rows[index[micro.start + micro.answers.cpu()], first : first + logits.shape[-1]]
            worst = max([worst, *(rows[:, : want.shape[1]] - want).abs().amax(-1).tolist()])
    return worst


def values_of(policy: MegatronPolicy, work: Work, index: torch.Tensor) -> torch.Tensor:
    """Gives the value at every position of the packed rollouts, on every rank. -> [N]"""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (index, policy.statistics(work, (VALUE,)).get(VALUE)))
    values = torch.zeros(sum(LENGTHS))
    for places, part in parts:
        if part is not None:
            values[places] = part
    return values


def run_case(path: str, case: dict) -> dict[str, float]:
    policy = make_policy(path, case)
    arch, head = policy.arch, case.get("head")
    kind = "weighted" if head is None else "value"
    loss, rollouts, extra = make_loss(case.get("loss", kind), make_rollouts(arch.vocab))
    if case.get("replay"):
        rollouts = choose(rollouts, arch)
    work, index = work_of(policy, rollouts, loss, extra)
    aux = case.get("model_settings", {}).get("router_aux_loss", 0.0)
    decay_norms = case.get("optimizer", {}).get("decay_norms", False)
    ref_logprobs, ref_loss, ref_entropy, grads, expected, ref_norm, ref_logits, ref_values = reference(
        path, rollouts, loss, extra, aux=aux, decay_norms=decay_norms, head=head
    )
    ours = logprobs_of(policy, rollouts) if head is None else values_of(policy, work, index)
    errors = {"logprobs": (ours - ref_logprobs).abs().max().item()}
    if case.get("loss") == "shared":
        errors["values"] = (values_of(policy, work, index) - ref_values).abs().max().item()
    errors["logits"] = logits_error(policy, work, index, ref_logits)
    errors["loss_forward"] = abs(policy.evaluate(work, loss)["loss"] - ref_loss)
    errors["gradients"] = gradient_error(policy, work, loss, grads)

    start = {n: t.clone() for n, t in policy.export.weights()}
    metrics = policy.update(work, 0, loss)
    errors["loss"] = abs(metrics["loss"] - ref_loss)
    errors["entropy"] = abs(metrics["entropy" if head is None else "value"] - ref_entropy)
    errors["grad_norm"] = abs(metrics["grad_norm"] - ref_norm) / max(1.0, ref_norm)
    now, trained = dict(policy.export.weights()), expected.pop(VALUE_HEAD, None)
    for weight in policy.head().values() if trained is not None else ():
        errors["value_head"] = (weight.detach() - trained).abs().max().item()
    errors["names"] = float(len(set(expected) ^ set(now) - ({"lm_head.weight"} if arch.tied else set())))
    errors["weights"] = max((now[n] - expected[n]).abs().max().item() for n in now)
    errors["moved"] = max((now[n] - start[n]).abs().max().item() for n in now)
    errors["largest_gradient"] = max(g.abs().max().item() for g in grads.values())
    errors["micro_batches"] = metrics["micro_batches"]
    first = ref_logprobs if head is not None else logprobs_of(policy, rollouts, reference=True)
    errors["reference"] = (first - ref_logprobs).abs().max().item()
    return errors | stream_errors(policy, now)


def stream_errors(policy: MegatronPolicy, now: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compares what the stream of weights gives after the reference's were in use, and to rank 0 alone."""
    again, driver = dict(policy.export.weights()), dict(policy.export.weights(everywhere=False))
    tensors = now if dist.get_rank() == 0 else {}
    return {
        "driver": float(
            driver.keys() != tensors.keys() or any(not torch.equal(driver[n], t) for n, t in tensors.items())
        ),
        "swap": float(any(not torch.equal(again[n], now[n]) for n in now)),
    }


def run_bf16(path: str, case: dict) -> dict[str, float]:
    """A bfloat16 model against float32 arithmetic on the same rounded weights, as multiples of what transformers in
    bfloat16 is off."""
    policy = make_policy(path, case)
    head = case.get("head")
    kind = "weighted" if head is None else "value"
    loss, rollouts, _ = make_loss(kind, make_rollouts(policy.arch.vocab))
    work, index = work_of(policy, rollouts, loss)
    exact = reference(path, rollouts, loss, stored=torch.bfloat16, head=head)
    theirs = reference(path, rollouts, loss, stored=torch.bfloat16, dtype=torch.bfloat16, head=head)
    ours = logprobs_of(policy, rollouts) if head is None else values_of(policy, work, index)
    of_gradients = max((theirs[3][n] - exact[3][n]).abs().max().item() for n in exact[3])
    gradients = gradient_error(policy, work, loss, exact[3])
    metrics = policy.update(work, 0, loss)
    now = {name: tensor.float() for name, tensor in policy.export.weights()}
    moves = torch.cat([(now[n] - exact[4][n]).abs().flatten() for n in now])
    return {
        "logprobs": ((ours - exact[0]).square().mean() / (theirs[0] - exact[0]).square().mean()).sqrt().item(),
        "gradients": gradients / of_gradients,
        "loss": abs(metrics["loss"] - exact[1]),
        "weights": moves.mean().item(),
    }


def main() -> None:
    output_path, path, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    world()  # made once, before the groups that end
    for _, alike in groupby(cases, key=lambda case: case.get("layout")):
        with process_groups.ended():
            for case in alike:
                run = run_case if case.get("dtype", "float32") == "float32" else run_bf16
                model = case.get("model", "qwen2") + ("_scored" if case.get("head") else "")
                results[case["name"]] = run(f"{path}/{model}", case)
    output_path.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
