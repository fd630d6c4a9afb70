"""Compares PPO with a critic and majority votes, as they are here, with the numbers of verl's own functions in
tests/oracles/verl_ppo.json.

Each function in ROWS returns the largest difference from verl, relative to verl's largest number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from oracles import FOLDER

from megatron_rl.algorithms.gae import Gae, adapted, assign_gae
from megatron_rl.algorithms.kl import VERL_CLAMP, kl_estimates
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.algorithms.value_loss import ValueLoss
from megatron_rl.batches.data_parallel_split import tally
from megatron_rl.batches.packed_batch import Statistics, pack
from megatron_rl.config.model import LossConfig
from megatron_rl.evaluation.statistics import majority
from megatron_rl.types import Author, Rollout, spans_of

PROMPT = 3  # tokens of the prompt before each of verl's responses


@cache
def verl() -> dict[str, Any]:
    """Reads verl's numbers: versions, inputs, and results by function."""
    return json.loads((FOLDER / "verl_ppo.json").read_text())


def after_prompt(values: Sequence[float]) -> np.ndarray:
    """Puts the numbers of a response behind the prompt. -> [T] float32"""
    return np.array([0.0] * PROMPT + list(values), np.float32)


def make_rollouts(**more: Sequence[Sequence[float]]) -> list[Rollout]:
    """Makes the rollouts of verl's inputs. `more`: further values per token of the responses."""
    inputs, rollouts = verl()["inputs"], []
    names = ("value", "logprobs", "reference_logprobs")
    columns = {name: inputs[name] for name in names} | more
    for number, written in enumerate(inputs["written"]):
        parts = [(Author.POLICY, 0) if digit == "1" else (Author.ENVIRONMENT, -1) for digit in written]
        spans = [(len(list(group)), *key) for key, group in groupby(parts)]
        rollouts.append(
            Rollout(
                role="generator", group=str(number), tokens=np.arange(PROMPT + len(written)),
                logprobs=after_prompt(inputs["logprobs"][number]),
                spans=spans_of((PROMPT, Author.ENVIRONMENT, -1), *spans),
                rewards={"outcome": inputs["outcomes"][number]},
                values={name: after_prompt(rows[number]) for name, rows in columns.items()},
            )
        )  # fmt: skip
    return rollouts


def apart(arrays: Sequence[np.ndarray], theirs: Sequence[Sequence[float]]) -> float:
    """Compares numbers per token, [T] each, with verl's per token of the responses."""
    expected = np.concatenate([[0.0] * PROMPT + list(row) for row in theirs])
    return float(np.abs(np.concatenate([*arrays]) - expected).max() / np.abs(expected).max())


def over_tokens() -> float:
    """Whitened advantages and returns, with the KL penalty k1 in the rewards."""
    distances = []
    for row in verl()["tokens"].values():
        settings = Gae(gamma=row["gamma"], lam=row["lam"])
        ours = assign_gae(make_rollouts(), settings, reward="outcome", kl_coef=verl()["inputs"]["kl_coef"])
        distances.append(apart([np.asarray(r.advantages) for r in ours.policy], row["advantages"]))
        distances.append(apart([r.values["returns"] for r in ours.critic], row["returns"]))
    return max(distances)


def over_turns() -> float:
    """Returns of turns, of which verl is given one column each."""
    distances = []
    for row in verl()["turns"].values():
        settings = Gae(gamma=row["gamma"], lam=row["lam"], level="turn")
        ours = assign_gae(make_rollouts(), settings, reward="outcome", kl_coef=verl()["inputs"]["kl_coef"])
        theirs = []
        for written, returns in zip(verl()["inputs"]["written"], row["returns"], strict=True):
            runs = [list(group) for _, group in groupby(written)]
            values = iter(returns)
            theirs.append([value for run in runs for value in [next(values) if run[0] == "1" else 0.0] * len(run)])
        distances.append(apart([r.values["returns"] for r in ours.critic], theirs))
    return max(distances)


def penalties() -> float:
    """Token rewards with each estimator of the KL divergence, and its mean."""
    inputs, errors = verl()["inputs"], []
    for kind, row in verl()["kl"].items():
        settings = Gae(kl_coef=inputs["kl_coef"], kl=kind, kl_target=0.25, kl_horizon=16)
        kl = assign_gae(make_rollouts(), settings, reward="outcome", kl_coef=settings.kl_coef).kl
        errors += [abs(kl - row["kl"]) / abs(row["kl"])]
        errors += [abs(adapted(settings.kl_coef, kl, len(inputs["written"]), settings) / row["next_coef"] - 1)]
        ours = []
        for number, written in enumerate(inputs["written"]):
            pair = (torch.tensor(inputs[key][number]).double() for key in ("logprobs", "reference_logprobs"))
            estimates = kl_estimates(kind, *pair, clamp=VERL_CLAMP).numpy()
            rewards = -inputs["kl_coef"] * estimates * np.array([digit == "1" for digit in written])
            rewards[-1] += inputs["outcomes"][number]
            ours.append(after_prompt(rewards))
        errors.append(apart(ours, row["rewards"]))
    return max(errors)


def controller() -> float:
    """The course of the adaptive coefficient."""
    recorded, coef, errors = verl()["controller"], verl()["inputs"]["kl_coef"], []
    settings = Gae(kl_coef=coef, kl_target=recorded["target"], kl_horizon=recorded["horizon"])
    for step in recorded["course"]:
        coef = adapted(coef, step["kl"], recorded["num_rollouts"], settings)
        errors.append(abs(coef - step["coef"]) / step["coef"])
    return max(errors)


def value_loss() -> float:
    """The clipped value loss, its gradient, and the share of tokens whose loss the clip determines."""
    inputs, errors = verl()["inputs"], []
    rollouts = make_rollouts(old_value=inputs["value"], returns=inputs["returns"], live=inputs["live_value"])
    batch = pack([replace(rollout, advantages=0.0) for rollout in rollouts])
    counts = tally(rollouts)
    for row in verl()["value_loss"].values():
        aggregation = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}[row["mode"]]
        loss = ValueLoss(LossConfig(value_clip=row["clip"], aggregation=aggregation))
        weights, denominator = loss.aggregate(counts.weighted, counts.groups)
        weighted = replace(batch, weights=batch.weights * batch.spread(torch.from_numpy(weights)))
        live = batch.values["live"].clone().requires_grad_()
        total, sums = loss(Statistics(value=live), weighted)
        (total / denominator).backward()
        assert live.grad is not None
        errors.append(abs(total.item() / denominator / row["loss"] - 1))
        errors.append(abs(float(sums["value_clip_frac"]) / float(batch.mask.sum()) - row["clip_frac"]))
        # a label is one position before its token, and verl's first token is behind the prompt
        ours = np.concatenate([np.zeros(1, np.float32), live.grad.numpy()[:-1]])
        errors.append(apart(np.split(ours, np.cumsum(batch.lengths.numpy())[:-1]), row["gradient"]))
    return max(errors)


def dppo() -> float:
    """The loss, its gradient, and the share of dropped tokens, with both kinds of bounds."""
    inputs, errors = verl()["inputs"], []
    low, high = inputs["dppo_bounds"]
    rollouts = make_rollouts(moved=inputs["moved_logprobs"], gains=inputs["token_advantages"])
    batch = pack([replace(rollout, advantages=rollout.values["gains"]) for rollout in rollouts])
    batch = replace(batch, old_logprobs=batch.values["logprobs"])
    for kind, row in verl()["dppo"].items():
        args = {"clip_low": low, "clip_high": high, "cap": inputs["dppo_cap"]}
        loss = PolicyLoss(LossConfig(objective=f"dppo_{kind}", objective_args=args, kl_coef=0.0))
        live = batch.values["moved"].clone().requires_grad_()
        total, sums = loss(Statistics(logprobs=live, entropy=torch.zeros_like(live)), batch)
        num_tokens = float(batch.mask.sum())
        (total / num_tokens).backward()
        assert live.grad is not None
        errors.append(abs(total.item() / num_tokens / row["loss"] - 1))
        errors.append(abs(float(sums["clip_frac"]) / num_tokens - row["clip_frac"]))
        ours = np.concatenate([np.zeros(1, np.float32), live.grad.numpy()[:-1]])
        errors.append(apart(np.split(ours, np.cumsum(batch.lengths.numpy())[:-1]), row["gradient"]))
    return max(errors)


def votes() -> float:
    """The score of the most frequent answer, without ties, of which verl takes the first."""
    distances = []
    for name, theirs in verl()["votes"].items():
        answers, correct = name.split()
        distances.append(abs(majority([*answers], [float(answer in correct) for answer in answers]) - theirs))
    return max(distances)


# row -> (verl's functions, the place here, what is compared)
ROWS: Mapping[str, tuple[str, str, Callable[[], float]]] = {
    "gae_tokens": ("compute_gae_advantage_return, masked_whiten", "level=token whiten=True", over_tokens),
    "gae_turns": ("compute_gae_advantage_return, one column per turn", "level=turn", over_turns),
    "kl_in_reward": ("apply_kl_penalty, kl_penalty: k1, k2, k3", "kl_coef=0.125 kl=k1, k2, k3", penalties),
    "kl_adaptive": ("AdaptiveKLController", "kl_target=0.25 kl_horizon=16", controller),
    "value_loss": ("compute_value_loss, agg_loss", "head=value loss.value_clip=0.125, 0.5", value_loss),
    "dppo": ("compute_policy_loss_dppo_tv, compute_policy_loss_dppo_kl", "objective=dppo_tv, dppo_kl", dppo),
    "votes": ("calc_maj_val", "maj@n of evaluations", votes),
}


def table(
    *, measured: bool, rows: Mapping[str, tuple[str, str, Callable[[], float]]] = ROWS, whose: str = "verl"
) -> str:
    """The comparison as Markdown, with the largest relative differences when they are `measured`."""
    lines = [["row", whose, "here", "difference"], ["---"] * 4]
    lines += [[name, theirs, ours, f"{find() if measured else 0:.0e}"] for name, (theirs, ours, find) in rows.items()]
    return "\n".join("| " + " | ".join(row if measured else row[:3]) + " |" for row in lines)
