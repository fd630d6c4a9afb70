"""Runs on two ranks: two roles with different layouts taking turns, checkpoints across layouts, and sleep."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts_worker import WeightedLogprobs, learn, logprobs_of, make_rollouts, work_of, world
from megatron.core.dist_checkpointing.strategies import filesystem_async
from process_groups import apart
from torch.profiler import ProfilerActivity, profile

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import CANDIDATES, STATISTICS
from megatron_rl.config.schema import ConfigError, Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import offload, parallel, vocab_statistics
from megatron_rl.megatron.optimizer import parts
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.weights.dist_checkpoint import DistCheckpoint

PLAIN = Layout()
SCHEDULED = Optimizer(lr=1e-3, warmup_steps=3, decay="cosine", decay_steps=20, min_lr=1e-4)


def make(path: str, layout: Layout, optimizer: Optimizer = SCHEDULED, **settings) -> MegatronPolicy:
    role = RoleConfig(
        model=Model(path=path), layout=layout, optimizer=optimizer, loss=LossConfig(kl_coef=0.0), micro_batch_tokens=40
    )
    return MegatronPolicy(role, parallel.create(layout), **settings)


def weights(policy) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in policy.export.weights()}


def distance(a, b) -> float:
    return max((a[n] - b[n]).abs().max().item() for n in a)


def two_roles(path: str) -> dict[str, float]:
    """Alternating iterations give what each role gives alone."""
    alone = {}
    for name, layout in (("a", Layout(tp=2)), ("b", Layout(pp=2))):
        policy = make(path, layout)
        for _ in range(3):
            learn(policy)
        alone[name] = weights(policy)
    a, b = make(path, Layout(tp=2)), make(path, Layout(pp=2))
    for _ in range(3):
        learn(a)
        learn(b)
    return {
        "vpp": interleaved(path),
        "a": distance(weights(a), alone["a"]),
        "b": distance(weights(b), alone["b"]),
        "layouts": distance(alone["a"], alone["b"]),
    }


def interleaved(path: str) -> float:
    """The interleaved schedule with one sequence, and with a number of micro-batches that the stages need not
    divide."""
    vpp, plain = make(path, Layout(pp=2, vpp=2, overlap_p2p=True)), make(path, Layout())
    rollouts = make_rollouts(97)
    parts = [rollouts[:n] for n in range(1, len(rollouts) + 1)]
    return max((logprobs_of(vpp, part) - logprobs_of(plain, part)).abs().max().item() for part in parts)


DENSE = (
    ("same", Layout(), Layout()),
    ("dp_to_tp", Layout(), Layout(tp=2)),
    ("tp_to_dp", Layout(tp=2), Layout()),
    ("pp_to_cp", Layout(pp=2), Layout(cp=2)),
)
TIED = (
    ("same", Layout(pp=2), Layout(pp=2)),
    ("pp_to_tp", Layout(pp=2), Layout(tp=2)),
)
EXPERTS = (
    ("same", Layout(ep=2), Layout(ep=2)),
    ("dp_to_ep", Layout(), Layout(ep=2)),
    ("ep_to_tp", Layout(ep=2), Layout(tp=2, sequence_parallel=True)),
    ("etp_to_pp", Layout(etp=2), Layout(pp=2)),
)


def checkpoints(path: str, directory: Path, layouts=DENSE) -> dict[str, Any]:
    """Save under one layout, load under another, go on: the next updates agree; the same layout agrees to the last
    bit."""
    errors: dict[str, Any] = {}
    for name, first, second in layouts:
        policy = make(path, first)
        for _ in range(2):
            learn(policy)
        target = directory / name
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
        dist.barrier()
        policy.state.save(target, background=True)  # what it writes is what stood here: the next update is not in it
        stands = weights(policy)
        learn(policy)
        policy.state.saved(wait=True)
        errors[f"{name}/background"] = distance(stands, dict(DistCheckpoint(target).tensors(policy.arch)))
        policy.state.load(target)
        reloaded = make(path, second)
        reloaded.state.load(target)
        stored = dict(DistCheckpoint(target).tensors(policy.arch))
        errors[f"{name}/read"] = float(stored.keys() != weights(policy).keys()) + distance(weights(policy), stored)
        errors[f"{name}/loaded"] = distance(weights(policy), weights(reloaded))
        metrics = [(learn(policy), learn(reloaded)) for _ in range(2)][-1]
        errors[f"{name}/lr"] = abs(metrics[0]["lr"] - metrics[1]["lr"])
        errors[f"{name}/after"] = distance(weights(policy), weights(reloaded))
    return errors | {"settings": changed_settings(path, layouts[0][1], directory / "same")}


def changed_settings(path: str, layout: Layout, checkpoint: Path) -> list[Any]:
    """Returns what the optimizers of three policies read in a step: one that was built with other settings than
    SCHEDULED, one with these other settings that goes on from a checkpoint, and one that adopts them in a stage. Their
    learning rate is constant, so that it does not depend on the step. Only the first two have another schedule and
    decay of norms, which a stage does not change."""
    optimizer_changed = Optimizer(lr=3e-4, min_lr=2e-4, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-4, clip_grad=0.25)
    built, resumed = (make(path, layout, optimizer=optimizer_changed) for _ in range(2))
    resumed.state.load(checkpoint)
    staged = make(path, layout, optimizer=Optimizer(betas=(0.1, 0.2)))
    staged.adopt(replace(staged.role, optimizer=optimizer_changed))
    states = []
    for policy in (built, resumed, staged):
        learn(policy)
        numbers = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps")
        groups = [{n: g[n] for n in numbers if n in g} for g in policy.optimizer.param_groups]
        clips = [optimizer.config.clip_grad for optimizer in parts(policy.optimizer)]
        states.append([sorted(groups, key=lambda group: group["weight_decay"]), clips])
    return states


def writers_of(policy: MegatronPolicy) -> list[Any]:
    """The processes that write what this rank saves, if it saves something."""
    processes = [call.async_caller.process for call in policy.state._saves.async_calls]
    return [process for process in processes if process is not None]


def overtaken(large: str, small: str, directory: Path) -> dict[str, Any]:
    """Two policies are saved at once, and the second one is written first. Both ranks write."""
    policies = {name: make(path, PLAIN) for name, path in (("first", large), ("second", small))}
    for name, policy in policies.items():
        if dist.get_rank() == 0:
            (directory / name).mkdir(parents=True)
        dist.barrier()
        policy.state.save(directory / name, background=True)
        if name == "first":  # it has not written 40 MB a moment after it was started
            for writer in writers_of(policy):
                os.kill(writer.pid, signal.SIGSTOP)
    for writer in writers_of(policies["second"]):
        writer.join()
    errors: dict[str, Any] = {"reports": filesystem_async._results_queue.qsize()}
    for writer in writers_of(policies["first"]):
        os.kill(writer.pid, signal.SIGCONT)
    for name, policy in policies.items():
        policy.state.saved(wait=True)
        errors[name] = distance(weights(policy), dict(DistCheckpoint(directory / name).tensors(policy.arch)))
        policy.state.load(directory / name)
    return errors


def refusals(directory: Path) -> dict[str, str]:
    """Returns what the policy says to models and layouts that it cannot train right."""
    messages = {}
    for name, model, layout in (
        ("dense", "model", Layout(ep=2)),
        ("no_sequence_parallel", "experts", Layout(tp=2)),
        ("uneven", "three_experts", Layout(ep=2)),
        ("one_expert", "one_expert", Layout()),
    ):
        try:
            make(str(directory / model), layout)
        except ConfigError as error:
            messages[name] = str(error)
    loss = PolicyLoss(LossConfig(objective="distilled_top_k", kl_coef=0.0))
    policy, rollouts = make(str(directory / "model"), Layout()), []
    for r in make_rollouts(97):
        ids, logprobs = np.full((len(r.tokens), 2), 97), np.full((len(r.tokens), 2), -1.0)
        rollouts.append(replace(r, values={CANDIDATES: ids, "teacher_candidate_logprobs": logprobs}))
    work, _ = work_of(policy, rollouts, loss)
    try:
        policy.update(work, 0, loss)
    except ValueError as error:
        messages["vocabulary"] = str(error)
    return messages


def few_tokens(path: str) -> float:
    """Expert-parallel ranks with one sequence between them, so that ranks and experts get nothing."""
    layouts = (Layout(ep=2), Layout(etp=2), Layout(tp=2, sequence_parallel=True, ep=2, etp=1))
    plain, rollouts = make(path, Layout()), make_rollouts(97)
    parts = [[min(rollouts, key=lambda r: len(r.tokens))], rollouts[:1]]
    expected = [(logprobs_of(plain, part), learn(plain, part)["grad_norm"]) for part in parts]
    errors = [0.0]
    for layout in layouts:
        policy = make(path, layout)
        for part, (logprobs, norm) in zip(parts, expected, strict=True):
            errors.append((logprobs_of(policy, part) - logprobs).abs().max().item())
            errors.append(abs(learn(policy, part)["grad_norm"] - norm))
    return max(errors)


def checkpoint_memory(path: str, directory: Path) -> dict[str, float]:
    """Bytes of memory per parameter that writing a checkpoint takes on this rank at its highest."""
    policy = make(path, PLAIN)
    learn(policy)
    size = sum(parameter.numel() for parameter in policy.chunks[0].parameters())
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy.state.save(directory)
    held = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        highest = max(highest, held)
    return {"bytes": highest / size}


def sleep(path: str, layout: Layout = PLAIN) -> dict[str, Any]:
    awake, sleeper = make(path, layout), make(path, layout)
    held = offload.gradient_bytes(sleeper.chunks)
    away, present = [], 0.0
    for leave in (False, True, True):  # in the last two rounds its weights leave the device, too
        learn(awake)
        learn(sleeper)
        sleeper.memory.sleep(weights=leave)
        asleep = offload.gradient_bytes(sleeper.chunks)
        away.append(sleeper.memory.held_bytes()["weights"] == 0)
        with sleeper.memory.present():
            present = max(present, distance(weights(awake), weights(sleeper)))
        away.append(sleeper.memory.held_bytes()["weights"] == 0)
        sleeper.memory.wake()
    frozen = make(path, layout, trainable=False)
    rollouts = make_rollouts(97)
    gap = (logprobs_of(frozen, rollouts) - logprobs_of(make(path, Layout(pp=2)), rollouts)).abs().max().item()
    kept = {"distance": distance(weights(awake), weights(sleeper)), "present": present}
    return {"held": held, "asleep": asleep, "away": away, "frozen": gap} | kept


def holdings(path: str) -> dict[str, Any]:
    """Numbers of the rollouts that this rank holds after a hand-out, and its statistics' names, by layout."""
    sizes, loss, rollouts = {}, WeightedLogprobs(), make_rollouts(97)
    for name, layout in (("dp", Layout()), ("tp", Layout(tp=2)), ("pp", Layout(pp=2)), ("cp", Layout(cp=2))):
        policy = make(path, layout)
        work, _ = work_of(policy, rollouts, loss)
        tokens = [t for i in work.flat.numbers.tolist() for t in rollouts[i].tokens.tolist()]
        statistics = policy.statistics(work)
        sizes[name] = {
            "numbers": sorted(work.flat.numbers.tolist()),
            "tokens": work.flat.tokens[:-1].tolist() == tokens,
            "logprobs": [len(values) == work.num_tokens for values in statistics.values()],
        }
    return sizes


def head() -> dict[str, float]:
    """The vocabulary-parallel log-probabilities in many chunks against torch's log_softmax over the whole
    vocabulary."""
    vocab_statistics.CHUNK_ELEMENTS["cpu"] = vocab_statistics.GOOD_ROWS = 1
    errors = {}
    for vocab, rows, kept in (
        (97, 49, 0),
        (40, 49, 1 << 24),
        (98, 49, 1 << 24),
    ):  # one padding row; the second rank all padding; none
        vocab_statistics.KEPT_ELEMENTS["cpu"] = kept
        torch.manual_seed(0)
        weight, hidden = torch.randn(2 * rows, 16), torch.randn(150, 16)
        labels, scales = torch.randint(vocab, (150,)), torch.randn(6, 150)
        candidates = torch.randint(vocab, (150, 3))
        candidates[:50, 1], scales[2] = labels[:50], 0.0  # a label may be a candidate; the mean has no gradient
        for name, names, rows_asked in (
            ("logprob", ("logprobs",), 1),
            ("both", ("logprobs", "entropy"), 2),
            ("mean", STATISTICS[:3], 3),
            ("candidates", STATISTICS, 6),
        ):
            a, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            log_p = (a @ w[:vocab].T / 0.7).log_softmax(-1)
            columns = [log_p[torch.arange(150), labels], -(log_p.exp() * log_p).sum(-1), log_p.detach().mean(-1)]
            expected = torch.stack([*columns, *log_p.gather(1, candidates).T][:rows_asked])
            (expected * scales[:rows_asked]).sum().backward()
            first = dist.get_rank() * rows
            b, v = hidden.clone().requires_grad_(), weight[first : first + rows].clone().requires_grad_()
            ours = vocab_statistics.vocab_parallel_statistics(
                b, v, labels, first_row=first, vocab=vocab, temperature=0.7, group=dist.group.WORLD, names=names,
                candidates=candidates,
            )  # fmt: skip
            (ours * scales[:rows_asked]).sum().backward()
            grad = b.grad.clone()
            dist.all_reduce(grad)
            pairs = {
                "value": (ours, expected),
                "hidden": (grad, a.grad),
                "weight": (v.grad, w.grad[first : first + rows]),
            }
            errors |= {f"{vocab}/{name}/{what}": (x - y).abs().max().item() for what, (x, y) in pairs.items()}
    return errors


def main() -> None:
    output_path, path = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world()  # made once, before the groups that end
    parent, experts = Path(path).parent, str(Path(path).parent / "experts")
    large, tied = str(parent / "large"), str(parent / "tied")
    answer = {
        "roles": apart(two_roles, path),
        "checkpoints": apart(checkpoints, path, output_path.parent / "ckpt"),
        "sleep": apart(sleep, path),
        "head": apart(head),
        "holdings": apart(holdings, path),
        "overtaken": apart(overtaken, large, path, output_path.parent / "overtaken"),
        "checkpoint_memory": apart(checkpoint_memory, large, parent / "large_checkpoint"),
        "tied": apart(checkpoints, tied, output_path.parent / "tied_ckpt", TIED),
        "experts": {
            "checkpoints": apart(checkpoints, experts, output_path.parent / "expert_ckpt", EXPERTS),
            "few": apart(few_tokens, experts),
            "sleep": apart(sleep, experts, Layout(ep=2)),
            "refusals": apart(refusals, parent),
        },
    }
    output_path.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
