"""Compares this project's losses of reward models with TRL's numbers in tests/oracles/trl_rewards.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from oracles import FOLDER, Difference, words

from megatron_rl.algorithms.value_loss import RewardLoss
from megatron_rl.batches.data_parallel_split import tally
from megatron_rl.batches.packed_batch import Statistics, pack
from megatron_rl.config.schema import LossConfig
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.types import Rollout

# names of our metrics and of TRL's
METRICS = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}


@cache
def recorded() -> dict[str, Any]:
    return json.loads((FOLDER / "trl_rewards.json").read_text())


def settings_of(name: str) -> dict[str, Any]:
    """The settings of `loss` that give a row's numbers."""
    theirs = recorded()["rows"][name]["settings"]
    return {"objective": "prm" if name == "prm" else "bradley_terry"} | ({"objective_args": theirs} if theirs else {})


def made(name: str) -> tuple[list[Rollout], list[float], list[float]]:
    """Returns the rollouts of a row, their scores, and TRL's gradient by the scores, in the order of the rollouts."""
    inputs, row = recorded()["inputs"], recorded()["rows"][name]
    if name == "prm":
        rollouts = [
            scored_rollout(
                "model", str(i), range(2 + 3 * len(labels)), ends=range(3, 2 + 3 * len(labels), 3),
                values={"step_label": labels},
            )
            for i, labels in enumerate(inputs["step_labels"])
        ]  # fmt: skip
        return rollouts, inputs["step_scores"], row["by_score"]
    count = len(inputs["margins"])
    order = [side * count + i for i in range(count) for side in (0, 1)]  # TRL has all chosen texts first
    margins = inputs["margins"] if row["margin"] else [0.0] * count
    rollouts = [
        scored_rollout("model", str(i % count), range(1 + i), values={"margin": [margins[i % count]]}) for i in order
    ]
    return rollouts, *([values[i] for i in order] for values in (inputs["scores"], row["by_score"]))


def compare(name: str) -> tuple[Difference, Mapping[str, float]]:
    """Compares a row. -> (differences, difference of each metric)"""
    row, loss = recorded()["rows"][name], RewardLoss(LossConfig(**settings_of(name)))
    rollouts, scores, theirs = made(name)
    batch, counts = pack([replace(rollout, advantages=0.0) for rollout in rollouts]), tally(rollouts)
    weights, denominator = loss.aggregate(counts.weighted, counts.groups)
    batch = replace(batch, weights=batch.weights * batch.spread(torch.from_numpy(weights)))
    live = torch.full((len(batch.tokens),), torch.nan, dtype=torch.float64)  # nothing is read elsewhere
    live[batch.mask] = torch.tensor(scores, dtype=torch.float64)
    live.requires_grad_()
    total, sums = loss(Statistics(value=live), batch)
    gradient = torch.autograd.grad(total / denominator, live)[0]
    expected = torch.tensor(theirs, dtype=torch.float64)
    assert not gradient[~batch.mask].any()
    means = {key: (value / sums.get(f"count/{key}", len(scores))).item() for key, value in sums.items()}
    apart = {
        ours: abs(means[ours] - row["metrics"][metric]) for ours, metric in METRICS.items() if metric in row["metrics"]
    }
    difference = Difference(
        loss=abs((total / denominator).item() - row["loss"]) / abs(row["loss"]),
        gradient=((gradient[batch.mask] - expected).abs().max() / expected.abs().max()).item(),
    )
    return difference, apart


def table(*, measured: bool) -> str:
    """The comparison as Markdown, with the largest relative differences when they are `measured`."""
    rows = [["row", "TRL", "source", "here", "what differs", "loss", "gradient"], ["---"] * 7]
    for name, row in recorded()["rows"].items():
        difference = compare(name)[0] if measured else Difference(0.0, 0.0)
        theirs = f"{row['trainer']} {words(row['settings'])}".strip() + ", with margins" * row.get("margin", False)
        differs = "TRL has two outputs; their difference is ours" if name == "prm" else ""
        paper = {"prm": "2211.14275"}.get(name, "2203.02155")
        columns = [name, theirs, paper, words(settings_of(name)), differs]
        rows.append([*columns, f"{difference.loss:.0e}", f"{difference.gradient:.0e}"])
    return "\n".join("| " + " | ".join(row if measured else row[:5]) + " |" for row in rows)
