"""Compares this project's losses and estimators with the numbers of other people's code in tests/oracles.

`LOSSES` and `ESTIMATED` say for each row of tests/oracles/trl_losses.json which settings here give the same numbers,
`PREFERENCES` for each row of trl_preferences.json.
`make oracles` prints the comparison as one table; the same table, without differences, is in docs/reference/methods.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.estimators import EPSILON, find_estimator
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.data_parallel_split import tally
from megatron_rl.batches.packed_batch import Batch, Statistics, pack
from megatron_rl.config.schema import CorrectionConfig, LossConfig
from megatron_rl.types import Author, Rollout, spans_of

FOLDER = Path(__file__).parents[1] / "oracles"
BAR = 1e-6  # largest relative difference
TRL_EPSILON = 1e-4  # TRL adds it to every standard deviation


@dataclass(frozen=True)
class Ours:
    """The settings of `roles.NAME.loss` that give a row's numbers, and what is different about them.

    `settings` None: nothing here gives them. Only then may a row go without a comparison.
    """

    settings: Mapping[str, Any] | None
    differs: str = ""
    factor: float = 1.0  # TRL's loss and gradient are so many times ours
    gradient: Literal["token", "rollout"] = "token"  # rollout: sums over a rollout's tokens are equal


def not_offered(why: str) -> Ours:
    return Ours(None, why)


MEAN = {"aggregation": "sequence_mean"}
CONSTANT = {"aggregation": "constant", "max_tokens": 16}
HIGHER = {"clip_high": 0.28}
KL = {"kl_coef": 0.05, "kl": "k3"}


def gspo(low: float, high: float) -> dict[str, Any]:
    return {"objective": "gspo", "objective_args": {"clip_low": low, "clip_high": high}}


def cispo(cap: float) -> dict[str, Any]:
    return {"objective": "cispo", "objective_args": {"cap": cap}}


def correct(kind: str, level: str = "token", *, low: float | None = None, high: float = 1.25) -> dict[str, Any]:
    return {"correction": {"kind": kind, "level": level, "low": low, "high": high}}


WIDE = gspo(0.125, 0.25)
TIS = correct("truncate")
ALWAYS_COUNTED = "TRL divides by all 8 rollouts, ours by the 6 rollouts with a token in the loss"
LOSSES: Mapping[str, Ours] = {
    "grpo": Ours(MEAN),
    "grpo_clip_higher": Ours(MEAN | HIGHER),
    "grpo_2_micro_batches": Ours(MEAN, "TRL takes a mean over micro-batches, which have equal size here"),
    "grpo_masked_truncated": Ours(MEAN, ALWAYS_COUNTED, factor=6 / 8),
    "grpo_delta": Ours(MEAN | {"objective_args": {"dual_clip": 1.5}}, "TRL's delta is the dual clip"),
    "bnpo": Ours({}, "one micro-batch; with several, TRL takes the mean of the micro-batches' means"),
    "bnpo_micro_batch_per_prompt": Ours({"aggregation": "prompt_mean"}, "each micro-batch of TRL holds one prompt"),
    "dapo": Ours(HIGHER),
    "dapo_first_step": Ours({}, "the old log-probs equal the current ones"),
    "dapo_4_micro_batches": Ours(HIGHER),
    "dapo_2_steps": Ours(
        HIGHER, "with n steps per batch, TRL divides by the batch's tokens / n, ours by the step's tokens", factor=2
    ),
    "dapo_masked_truncated": Ours({}, "the truncated rollouts have no trained token"),
    "dr_grpo": Ours(CONSTANT, "loss.max_tokens is TRL's max_completion_length"),
    "dr_grpo_2_micro_batches": Ours(CONSTANT),
    "dr_grpo_masked_truncated": Ours(CONSTANT, "rollouts without a trained token count in both denominators"),
    "cispo": Ours(cispo(5.0), "cap and TRL's epsilon_high bound the ratio; NeMo-RL and verl bound it by 1 + epsilon"),
    "cispo_tight": Ours(cispo(1.125)),
    "gspo": Ours(gspo(3e-4, 4e-4) | MEAN, "the numbers of GSPO's paper"),
    "gspo_wide": Ours(WIDE | MEAN),
    "gspo_dapo": Ours(WIDE, "a mean over tokens: long rollouts have more weight than in the paper"),
    "luspo": Ours(WIDE | {"aggregation": "constant", "max_tokens": 1}, "GSPO summed over tokens"),
    "sapo": Ours({"objective": "sapo"} | MEAN),
    "vespo": Ours({"objective": "vespo"}),
    "vespo_token_truncate": Ours(
        {"objective": "vespo"} | correct("truncate", high=2.0), "neither TRL nor ours applies a further weight"
    ),
    "grpo_kl": Ours(MEAN | KL, "TRL's bias correction is off"),
    "dapo_kl": Ours(KL),
    "dr_grpo_kl": Ours(CONSTANT | KL),
    "cispo_kl": Ours(cispo(5.0) | KL),
    "gspo_kl": Ours(WIDE | MEAN | KL),
    "dapo_kl_first_step": Ours(KL),
    "dapo_kl_bias_corrected": Ours(KL | {"kl_bias_correction": True}),
    "dapo_entropy": Ours({"entropy_coef": 0.125}),
    "grpo_entropy": not_offered("TRL's bonus is a mean over tokens; ours follows loss.aggregation"),
    "dapo_high_entropy_tokens": not_offered(
        "the threshold is a quantile over the batch, which a micro-batch's loss cannot compute"
    ),
    "dapo_off_policy_mask": Ours({"off_policy_mask": 0.0625}),
    "dapo_token_truncate": Ours(TIS),
    "grpo_token_truncate": Ours(TIS | MEAN),
    "cispo_token_truncate": Ours(TIS | cispo(5.0)),
    "dapo_kl_token_truncate": Ours(TIS | KL, "neither TRL nor ours weights the KL term"),
    "gspo_token_truncate": Ours(
        TIS | WIDE | MEAN,
        "ours weights each token's gradient, TRL all tokens of a rollout by the mean weight",
        gradient="rollout",
    ),
    "dapo_token_truncate_both": Ours(correct("truncate", low=0.75)),
    "dapo_token_mask": Ours(correct("mask", low=0.75)),
    "dapo_token_mask_upper": Ours(correct("mask")),
    "dapo_sequence_truncate": Ours(correct("truncate", "sequence")),
    "dapo_sequence_truncate_both": Ours(correct("truncate", "sequence", low=0.75)),
    "dapo_sequence_mask": Ours(correct("mask", "sequence", low=0.75)),
    "dapo_sequence_mask_default": Ours(correct("mask", "sequence", high=3.0), "TRL's default for vLLM"),
    "grpo_sequence_mask": Ours(
        MEAN | correct("mask", "sequence", low=0.75), "masked rollouts still count in both denominators"
    ),
}
ESTIMATED: Mapping[str, tuple[str, str]] = {
    "scale_rewards_group": ("grpo", "TRL adds 1e-4 to the standard deviation, ours 1e-6"),
    "scale_rewards_batch": ("batch", "TRL adds 1e-4 to the standard deviation, ours 1e-6"),
    "scale_rewards_none": ("dr_grpo", ""),
    "rloo": ("rloo", "RLOOTrainer with beta=0; its KL term is part of the reward"),
}
PREFERENCES: Mapping[str, Ours] = {
    "dpo": Ours({"objective": "dpo"}),
    "dpo_beta": Ours({"objective": "dpo", "objective_args": {"beta": 0.5}}),
    "dpo_norm": Ours({"objective": "dpo_norm"}, "the metrics are those of dpo, as in TRL"),
    "ipo": Ours({"objective": "ipo"}, "log-ratios are means over tokens; the metrics are those of dpo, as in TRL"),
    "dpo_robust": not_offered("ours smooths the labels as CPOTrainer does (conservative DPO)"),
    "cpo_smoothed": Ours(
        {"objective": "dpo", "objective_args": {"label_smoothing": 0.1}}, "with a reference whose log-probs are 0"
    ),
    "simpo": Ours({"objective": "simpo"}, "TRL's default of beta is 0.1"),
    "simpo_smoothed": Ours(
        {"objective": "simpo", "objective_args": {"beta": 2.5, "simpo_gamma": 1.375, "label_smoothing": 0.125}}
    ),
    "kto": Ours(
        {"objective": "kto"},
        "the KL term is a mean over the optimizer step, in TRL over a micro-batch of all processes; TRL mismatches the "
        "responses once, in the order of the rows",
    ),
    "kto_weights": Ours(
        {
            "objective": "kto",
            "objective_args": {"beta": 0.25, "desirable_weight": 1.5, "undesirable_weight": 0.75},
        }
    ),
    "kto_kl_below_0": Ours({"objective": "kto", "objective_args": {"beta": 0.25}}, "the KL term is at least 0"),
}
PREFERENCE_PAPERS: Mapping[str, str] = {
    "dpo": "2305.18290", "dpo_norm": "2411.15124", "ipo": "2310.12036", "simpo": "2405.14734", "kto": "2402.01306",
}  # fmt: skip
KINDS: Mapping[str, str] = {
    "grpo": "2402.03300", "bnpo": "TRL", "dr_grpo": "2503.20783", "dapo": "2503.14476", "cispo": "2506.13585",
    "gspo": "2507.18071", "luspo": "2602.05261", "sapo": "2511.20347", "vespo": "2602.10693",
}  # fmt: skip
PAPERS: Mapping[str, str] = {
    "delta": "2505.07291", "use_bias_correction_kl": "2512.02556", "off_policy_mask_threshold": "2512.02556",
    "top_entropy_quantile": "2506.01939",
}  # fmt: skip
ADVANTAGE_PAPERS: Mapping[str, str] = {
    "grpo": "2402.03300", "batch": "2508.08221", "dr_grpo": "2503.20783", "rloo": "2402.14740",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Largest differences relative to the largest number of TRL's."""

    loss: float
    gradient: float


@cache
def trl(path: Path = FOLDER / "trl_losses.json") -> dict[str, Any]:
    """Reads TRL's numbers: versions, inputs, rows and advantages."""
    return json.loads(path.read_text())


def ifeval() -> dict[str, Any]:
    """Reads the verdicts of IFEval's public checkers: versions, texts and rows."""
    return json.loads((FOLDER / "ifeval.json").read_text())


def make_rollouts(row: Mapping[str, Any]) -> list[Rollout]:
    """Makes the rollouts of a row with TRL's advantages. A tool's tokens stand in the middle of some, and truncated
    ones may have no trained token."""
    inputs, rollouts = trl()["inputs"], []
    masked = inputs["truncated"] if row["settings"].get("mask_truncated_completions") else ()
    for i, (prompt, completion) in enumerate(zip(inputs["prompts"], inputs["completions"], strict=True)):
        written = [0] * len(completion) if i in masked else inputs["written"][i]
        parts = [(Author.POLICY, 0) if sampled else (Author.ENVIRONMENT, -1) for sampled in written]
        spans = [(len(list(group)), *key) for key, group in groupby(parts)]
        rollouts.append(
            Rollout(
                role="generator",
                group=str(i // inputs["group"]),
                tokens=np.array(prompt + completion),
                logprobs=np.array([0.0] * len(prompt) + inputs["sampling"][i]),
                spans=spans_of((len(prompt), Author.ENVIRONMENT, -1), *spans),
                advantages=row["advantages"][i],
            )
        )
    return rollouts


def at_labels(values: list[list[float]]) -> Tensor:
    """Puts numbers of completion tokens where a packed batch has their labels: one position before the token.
    -> [N] float64"""
    prompts = trl()["inputs"]["prompts"]
    rows = [[0.0] * (len(prompt) - 1) + row + [0.0] for prompt, row in zip(prompts, values, strict=True)]
    return torch.tensor(sum(rows, []), dtype=torch.float64)


def make_batch(row: Mapping[str, Any], loss: PolicyLoss) -> tuple[Batch, float]:
    """Packs a row's rollouts as one optimizer step. -> (batch, denominator)"""
    rollouts, inputs = make_rollouts(row), trl()["inputs"]
    batch, counts = pack(rollouts), tally(rollouts)
    weights, denominator = loss.aggregate(counts.weighted, counts.groups)
    return replace(
        batch,
        weights=batch.weights * batch.spread(torch.from_numpy(weights)),
        old_logprobs=None if row["first"] else at_labels(inputs["old"]),
        reference_logprobs=at_labels(inputs["reference"]),
    ), denominator


def computed(row: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[float, Tensor, Tensor, Batch]:
    """Computes a row here. -> (loss, [N] gradient by log-prob, [N] gradient by entropy, batch)"""
    settings = {"kl_coef": 0.0} | dict(settings)
    if "correction" in settings:
        settings["correction"] = CorrectionConfig(**settings["correction"])
    loss, inputs = PolicyLoss(LossConfig(**settings)), trl()["inputs"]
    batch, denominator = make_batch(row, loss)
    live, entropy = (at_labels(inputs[name]).requires_grad_() for name in ("live", "entropy"))
    total = loss(Statistics(live, entropy), batch)[0] / denominator
    by_logprob, by_entropy = torch.autograd.grad(total, (live, entropy), allow_unused=True)
    nothing = torch.zeros_like(live)
    return total.item(), by_logprob, nothing if by_entropy is None else by_entropy, batch


def compare_loss(name: str) -> Difference:
    """Compares a row that is offered here."""
    row, ours = trl()["rows"][name], LOSSES[name]
    assert ours.settings is not None, f"{name} is not offered: {ours.differs}"
    loss, by_logprob, by_entropy, batch = computed(row, ours.settings)
    lengths = [[0.0] * len(logprobs) for logprobs in row["by_logprob"]]
    pairs = [(by_logprob, at_labels(row["by_logprob"])), (by_entropy, at_labels(row.get("by_entropy", lengths)))]
    if ours.gradient == "rollout":
        pairs = [(batch.sequence_sums(a), batch.sequence_sums(b)) for a, b in pairs]
    gradients, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    return Difference(
        loss=abs(ours.factor * loss - row["loss"]) / abs(row["loss"]),
        gradient=((ours.factor * gradients - theirs).abs().max() / theirs.abs().max()).item(),
    )


def compare_estimator(name: str) -> tuple[float, float]:
    """Compares advantages. Rollouts that nobody graded are left out here; TRL gives them 0.

    -> (relative difference with TRL's number beside the standard deviation, and as it is)
    """
    row, (estimator, _) = trl()["advantages"][name], ESTIMATED[name]
    graded = [i for i, reward in enumerate(row["rewards"]) if reward is not None]
    rewards = np.array([row["rewards"][i] for i in graded])
    groups = np.array(graded) // trl()["inputs"]["group"]
    theirs = np.array(row["advantages"])
    assert not np.delete(theirs, graded).any()
    advantages = find_estimator(estimator)(rewards, groups, np.ones(len(graded), np.int64))
    pools = {"grpo": groups, "batch": np.zeros_like(groups)}.get(estimator)
    as_theirs = advantages
    if pools is not None:
        std = np.array([rewards[pools == pool].std(ddof=1) for pool in pools])
        as_theirs = advantages * (std + EPSILON) / (std + TRL_EPSILON)
    largest = np.abs(theirs).max()
    return tuple(float(np.abs(values - theirs[graded]).max() / largest) for values in (as_theirs, advantages))


def compare_preference(name: str) -> tuple[Difference, dict[str, float]]:
    """Compares a row of preferences. -> (differences, difference of each metric relative to TRL's)"""
    recorded, ours = trl(FOLDER / "trl_preferences.json"), PREFERENCES[name]
    row, inputs = recorded["rows"][name], recorded["inputs"]
    assert ours.settings is not None, f"{name} is not offered: {ours.differs}"
    loss = PolicyLoss(LossConfig(**{"kl_coef": 0.0} | dict(ours.settings)))
    unpaired = row["trainer"] == "KTOTrainer"
    prompts = [[0] * inputs["prompts"][i // 2] for i in range(len(inputs["live"]))]

    def placed(values: list[list[float]]) -> Tensor:
        rows = [[0.0] * (len(prompt) - 1) + row + [0.0] for prompt, row in zip(prompts, values, strict=True)]
        return torch.tensor(sum(rows, []), dtype=torch.float64)

    rollouts = [
        Rollout(
            role="model",
            group=str(i if unpaired else i // 2),
            tokens=np.zeros(len(prompt) + len(completion)),
            logprobs=np.zeros(len(prompt) + len(completion)),
            spans=spans_of((len(prompt), Author.ENVIRONMENT, -1), (len(completion), Author.POLICY, 0)),
            advantages=(1.0 if inputs["labels"][i] else -1.0) if unpaired else (1.0, -1.0)[i % 2],
        )
        for i, (prompt, completion) in enumerate(zip(prompts, inputs["live"], strict=True))
    ]
    batch, counts = pack(rollouts), tally(rollouts)
    weights, denominator = loss.aggregate(counts.weighted, counts.groups)
    sides = [sum(sum(kls) for kls in inputs[f"kl_{side}"]) / len(rollouts) for side in ("live", "reference")]
    kl = max(0.0, (sides[0] - sides[1]) * (-1 if name == "kto_kl_below_0" else 1))
    reference = placed(inputs["reference"]) * (row["trainer"] != "CPOTrainer")
    batch = replace(
        batch,
        weights=batch.weights * batch.spread(torch.from_numpy(weights)),
        reference_logprobs=reference,
        values={"kl": torch.full_like(reference, kl)},
    )
    live = placed(inputs["live"]).requires_grad_()
    total, sums = loss(Statistics(live, torch.zeros_like(live)), batch)
    by_logprob = torch.autograd.grad(total / denominator, live)[0]
    theirs = placed(row["by_logprob"])
    means = {key: (value / sums.get(f"count/{key}", torch.tensor(1))).item() for key, value in sums.items()}
    apart = {
        key: abs(means[key] - value) / max(1.0, abs(value)) for key, value in row["metrics"].items() if key in means
    }
    difference = Difference(
        loss=abs((total / denominator).item() - row["loss"]) / abs(row["loss"]),
        gradient=((by_logprob - theirs).abs().max() / theirs.abs().max()).item(),
    )
    return difference, apart


def source(settings: Mapping[str, Any]) -> str:
    """The paper that a row's settings come from, by its number at arXiv; TRL where the method is TRL's own."""
    paper = next((paper for name, paper in PAPERS.items() if settings.get(name) not in (None, False)), None)
    kind = "gspo" if settings.get("importance_sampling_level") == "sequence" else settings["loss_type"]
    return paper or KINDS["luspo" if settings["loss_type"] == "luspo" else kind]


def words(settings: Mapping[str, Any]) -> str:
    """Settings as they are written in a context."""
    flat = {key: value for key, value in settings.items() if not isinstance(value, Mapping) and value is not None}
    for value in settings.values():
        flat |= value if isinstance(value, Mapping) else {}
    return " ".join(f"{key.removeprefix('vllm_importance_sampling_')}={value}" for key, value in flat.items())


def table(*, measured: bool) -> str:
    """The comparison as Markdown, with the largest relative differences when they are `measured`."""
    rows = [["row", "TRL", "source", "here", "what differs", "loss", "gradient"], ["---"] * 7]
    for name, ours in LOSSES.items():
        settings = trl()["rows"][name]["settings"]
        row = [name, words(settings), source(settings)]
        if ours.settings is None:
            rows.append([*row, "not offered", ours.differs, "", ""])
            continue
        difference = compare_loss(name) if measured else Difference(0.0, 0.0)
        ours_words = words(ours.settings) or "the defaults"
        rows.append([*row, ours_words, ours.differs, f"{difference.loss:.0e}", f"{difference.gradient:.0e}"])
    for name, ours in PREFERENCES.items():
        theirs = trl(FOLDER / "trl_preferences.json")["rows"][name]
        row = [name, f"{theirs['trainer']} {words(theirs['settings'])}".strip()]
        if ours.settings is None:
            rows.append([*row, "2403.00409", "not offered", ours.differs, "", ""])
            continue
        difference = compare_preference(name)[0] if measured else Difference(0.0, 0.0)
        row += [PREFERENCE_PAPERS[ours.settings["objective"]], words(ours.settings), ours.differs]
        rows.append([*row, f"{difference.loss:.0e}", f"{difference.gradient:.0e}"])
    for name, (estimator, differs) in ESTIMATED.items():
        apart = compare_estimator(name)[0] if measured else 0.0
        settings = words(trl()["advantages"][name]["settings"])
        rows.append(
            [name, settings, ADVANTAGE_PAPERS[estimator], f"estimator={estimator}", differs, f"{apart:.0e}", ""]
        )
    return "\n".join("| " + " | ".join(row if measured else row[:5]) + " |" for row in rows)
