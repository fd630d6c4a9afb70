"""Writes what verl's functions for PPO with a critic give on fixed rollouts, and its majority votes, to a JSON file.

    .venv-oracles/bin/python tests/oracles/verl_functions.py OUT.json

The functions' source is taken from the installed verl and run unchanged, in float64. verl itself is not imported, which
would need Ray. All inputs are multiples of 1/1024: float32 holds them exactly.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections import defaultdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Optional

import numpy as np
import torch
from torch import Tensor

# Tokens of each rollout's response: 1 if the policy sampled the token, 0 for a tool's output between two turns.
WRITTEN = ("1111", "1", "11100111", "110111001", "1111111", "1001")
OUTCOMES = (1.0, 0.0, 0.5, 1.0, -0.25, 0.75)
TABLES = ("value", "logprobs", "reference_logprobs", "live_value")
DISCOUNTS = tuple(product((1.0, 0.96875), (1.0, 0.9375, 0.0)))
KINDS = ("k1", "k2", "k3")
KL_COEF = 0.125
BOUNDS = (0.125, 0.5)  # of the clipped value loss
DPPO_BOUNDS, DPPO_CAP = (0.03125, 0.0625), 1.5  # how far a token's probability may fall and rise; largest ratio
# Answers to a problem, a letter for each sample, without a tie for the most frequent one; and the correct answers.
VOTES = (("a", "a"), ("aabba", "b"), ("abcbb", "b"), ("abcdefaff", "f"), ("zzyx", "xy"), ("qqqqrrr", "q"))


def taken(file: str, names: tuple[str, ...], **known: Any) -> SimpleNamespace:
    """Runs the source of some functions and classes of one of verl's files. `known`: the globals that they use."""
    package = importlib.util.find_spec("verl")
    assert package is not None and package.submodule_search_locations
    return taken_from(Path(package.submodule_search_locations[0]) / file, names, **known)


def taken_from(file: Path, names: tuple[str, ...], **known: Any) -> SimpleNamespace:
    """Runs the source of some functions and classes of a file. `known`: the globals that they use."""
    tree = ast.parse(file.read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    assert {node.name for node in found} == set(names), f"{file} has not all of {names}"
    for node in found:
        node.decorator_list = []  # registries of verl's
    code = compile(ast.Module(found, []), str(file), "exec", flags=annotations.compiler_flag)
    known |= {"torch": torch, "np": np, "Optional": Optional}
    exec(code, known)
    return SimpleNamespace(**{name: known[name] for name in names})


MASKED = taken(
    "utils/torch_functional.py", ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value")
)
CORE = taken(
    "trainer/ppo/core_algos.py",
    (
        *("AdaptiveKLController", "FixedKLController", "compute_gae_advantage_return", "compute_value_loss"),
        *("agg_loss", "kl_penalty", "kl_penalty_forward"),
        *("compute_policy_loss_dppo_tv", "compute_policy_loss_dppo_kl"),
    ),
    verl_F=MASKED,
    Any=Any,
    ActorConfig=object,
    AlgoConfig=type("AlgoConfig", (), {}),
)
TRAINER = taken("trainer/ppo/ray_trainer.py", ("apply_kl_penalty",), core_algos=CORE, masked_mean=MASKED.masked_mean)


class DppoConfig(dict[str, float]):
    """The fields of verl's actor config that the loss of DPPO reads."""

    clip_ratio, clip_ratio_low, clip_ratio_high = 0.25, *DPPO_BOUNDS
    global_batch_info: ClassVar[dict[str, Any]] = {}


class Columns(dict[str, Tensor]):
    """The tensors of a verl batch."""

    batch_size = (len(WRITTEN),)


def padded(rows: list[list[float]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def cut(table: Tensor) -> list[list[float]]:
    """Returns the rows of a table without the padding."""
    return [row[: len(own)] for row, own in zip(table.tolist(), WRITTEN, strict=True)]


def make_inputs() -> dict[str, list[list[float]]]:
    """Draws the tables. Some log-ratios lie beyond the bounds of k3."""
    draw = torch.Generator().manual_seed(11)
    made: dict[str, list[list[float]]] = {name: [] for name in TABLES}
    for number, own in enumerate(WRITTEN):
        value, logprobs = torch.randn(len(own), generator=draw), -2.0 * torch.rand(len(own), generator=draw)
        reference = logprobs + 0.5 * torch.randn(len(own), generator=draw)
        reference[-1] += {2: 4.0, 4: -24.0, 5: 24.0}.get(number, 0.0)
        live = value + 0.4 * torch.randn(len(own), generator=draw)
        for name, values in zip(TABLES, (value, logprobs, reference, live), strict=True):
            made[name].append((torch.round(values * 1024) / 1024).tolist())
    return made


def outcome_scores() -> Tensor:
    """Returns the outcome of each rollout at its last token."""
    return padded([[0.0] * (len(own) - 1) + [outcome] for own, outcome in zip(WRITTEN, OUTCOMES, strict=True)])


def turn_table(values: Tensor, mask: Tensor, *, whole: bool) -> Tensor:
    """Returns a table with a column for each turn: the sum over the turn (`whole`) or the value of its first token."""
    rows = []
    for row, own in zip(values.tolist(), mask.tolist(), strict=True):
        turns: list[list[float]] = []
        for place, value in enumerate(row):
            if own[place] and not (place and own[place - 1]):
                turns.append([])
            if own[place]:
                turns[-1].append(value)
        rows.append([sum(turn) if whole else turn[0] for turn in turns])
    return padded(rows)


def run_kl(inputs: dict[str, Tensor], mask: Tensor, kind: str) -> tuple[Tensor, dict[str, Any]]:
    """Returns the token rewards with the KL penalty, and what is recorded of them."""
    controller = CORE.AdaptiveKLController(KL_COEF, target_kl=0.25, horizon=16)
    data = SimpleNamespace(
        batch=Columns(
            response_mask=mask, token_level_scores=outcome_scores(), old_log_probs=inputs["logprobs"],
            ref_log_prob=inputs["reference_logprobs"],
        )
    )  # fmt: skip
    _, metrics = TRAINER.apply_kl_penalty(data, controller, kind)
    rewards = data.batch["token_level_rewards"]
    kl = metrics["actor/reward_kl_penalty"]
    return rewards, {"rewards": cut(rewards), "kl": kl, "next_coef": controller.value}


def run_controller() -> list[dict[str, float]]:
    """Follows the adaptive coefficient over KL divergences on both sides of the target."""
    controller, rows = CORE.AdaptiveKLController(KL_COEF, target_kl=0.25, horizon=16), []
    for kl in (0.0, 0.24, 0.25, 0.27, 0.5, -1.0, 10.0):
        controller.update(kl, 6)
        rows.append({"kl": kl, "coef": controller.value})
    return rows


def run_value_loss(inputs: dict[str, Tensor], returns: Tensor, mask: Tensor, bound: float, mode: str) -> dict[str, Any]:
    live = inputs["live_value"].clone().requires_grad_()
    loss, clipped = CORE.compute_value_loss(live, returns, inputs["value"], mask, bound, mode)
    loss.backward()
    return {"clip": bound, "mode": mode, "loss": loss.item(), "clip_frac": clipped.item(), "gradient": cut(live.grad)}


def make_moved(inputs: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Draws log-probs of a policy that has moved, and an advantage of either sign for every token."""
    draw, moved, advantages = torch.Generator().manual_seed(12), [], []
    for row in inputs["logprobs"]:
        steps, gains = torch.randn(2, len(row), generator=draw)
        later = (torch.tensor(row) + 0.25 * steps).clamp(max=-1 / 1024)
        moved.append((torch.round(later * 1024) / 1024).tolist())
        advantages.append((torch.round(gains * 1024) / 1024).tolist())
    return {"moved_logprobs": moved, "token_advantages": advantages}


def run_dppo(inputs: dict[str, Tensor], mask: Tensor, kind: str) -> dict[str, Any]:
    live = inputs["moved_logprobs"].clone().requires_grad_()
    loss, metrics = getattr(CORE, f"compute_policy_loss_dppo_{kind}")(
        inputs["logprobs"], live, inputs["token_advantages"], mask, "token-mean", DppoConfig(clip_ratio_c=DPPO_CAP)
    )
    loss.backward()
    return {"loss": loss.item(), "clip_frac": metrics["actor/pg_clipfrac"], "gradient": cut(live.grad)}


def run_votes() -> dict[str, float]:
    """Returns, for each of VOTES, the score of the majority answer."""
    votes = taken("trainer/ppo/metric_utils.py", ("calc_maj_val",), defaultdict=defaultdict)
    return {
        f"{answers} {correct}": votes.calc_maj_val(
            [{"pred": answer, "val": float(answer in correct)} for answer in answers], vote_key="pred", val_key="val"
        )
        for answers, correct in VOTES
    }


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    given = make_inputs()
    given |= make_moved(given)
    inputs = {name: padded(rows) for name, rows in given.items()}
    mask = padded([[float(digit) for digit in own] for own in WRITTEN])
    with_kl = {kind: run_kl(inputs, mask, kind) for kind in KINDS}
    rewards = with_kl["k1"][0] * mask
    tokens, turns, targets = {}, {}, rewards
    values_of_turns = turn_table(inputs["value"], mask, whole=False)
    rewards_of_turns = turn_table(rewards, mask, whole=True)
    mask_of_turns = turn_table(torch.ones_like(mask), mask, whole=False)
    for gamma, lam in DISCOUNTS:
        key = f"gamma={gamma} lam={lam}"
        advantages, returns = CORE.compute_gae_advantage_return(rewards, inputs["value"], mask, gamma, lam)
        tokens[key] = {"gamma": gamma, "lam": lam, "advantages": cut(advantages * mask), "returns": cut(returns * mask)}
        _, by_turn = CORE.compute_gae_advantage_return(rewards_of_turns, values_of_turns, mask_of_turns, gamma, lam)
        rows = [row[: int(n)] for row, n in zip(by_turn.tolist(), mask_of_turns.sum(1).tolist(), strict=True)]
        turns[key] = {"gamma": gamma, "lam": lam, "returns": rows}
        targets = returns
    answer = {
        "versions": {"verl": version("verl"), "torch": torch.__version__},
        "inputs": given
        | {"written": WRITTEN, "outcomes": OUTCOMES, "kl_coef": KL_COEF, "returns": cut(targets * mask)}
        | {"dppo_bounds": DPPO_BOUNDS, "dppo_cap": DPPO_CAP},
        "kl": {kind: row for kind, (_, row) in with_kl.items()},
        "controller": {"target": 0.25, "horizon": 16, "num_rollouts": 6, "course": run_controller()},
        "tokens": tokens,
        "turns": turns,
        "value_loss": {
            f"{mode} clip={bound}": run_value_loss(inputs, targets * mask, mask, bound, mode)
            for bound, mode in product(BOUNDS, ("token-mean", "seq-mean-token-mean"))
        },
        "dppo": {kind: run_dppo(inputs, mask, kind) for kind in ("tv", "kl")},
        "votes": run_votes(),
    }
    lines = [
        f" {json.dumps(section)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
        + "\n }"
        for section, rows in answer.items()
    ]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
