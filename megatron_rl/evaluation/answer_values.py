"""Computes the metrics of graded answers: accuracy, reward, pass@k and votes. Imports neither torch nor an engine."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_rl.evaluation.samples import Sample
from megatron_rl.evaluation.statistics import best_of_n, majority, pass_at_k, weighted_vote


def answer_values(groups: Sequence[Sequence[Sample]], ks: Sequence[int]) -> dict[str, list[float]]:
    """Returns {metric: [P] values} of graded answers. `groups`: [P][n], n samples of each of P problems.

    The metrics are accuracy (mean@n, the share of correct answers), reward (the mean score), pass@k, maj@n, lengths
    and, if a verifier weighted the answers, best_of_n and vote_of_n (majority vote with these weights). maj@n and
    vote_of_n compare extracted answers, or whole responses if a correct response to the problem has no extracted
    answer. pass@k, maj@n, best_of_n and vote_of_n use whether an answer is correct, not its score. If it is unknown
    which answers are correct (see types.is_correct), these metrics and accuracy are left out.
    """
    correct_known = all(row["correct"] is not None for group in groups for row in group)
    of_correct = _of_correct(groups, ks) if correct_known else {}
    values = {"accuracy": of_correct["accuracy"]} if correct_known else {}
    values["reward"] = [fmean(row["score"] for row in group) for group in groups]
    values |= of_correct
    values["finished"] = [fmean(float(row["finished"]) for row in group) for group in groups]
    values["tokens"] = [fmean(row["tokens"] for row in group) for group in groups]
    if groups and "turns" in groups[0][0]:
        values["turns"] = [fmean(len(row["turns"]) for row in group) for group in groups]
        values["first_share"] = [
            fmean(sum(row["turns"][::2]) / max(1, row["tokens"]) for row in group) for group in groups
        ]
    return values


def _of_correct(groups: Sequence[Sequence[Sample]], ks: Sequence[int]) -> dict[str, list[float]]:
    """Returns {metric: [P] values} of the metrics that depend on which answers are correct (see `answer_values`)."""
    n = min((len(group) for group in groups), default=0)
    correct = [[float(row["correct"]) for row in group] for group in groups]
    values = {"accuracy": [fmean(hits) for hits in correct]}
    pass_ks = [k for k in ks if k <= n and (n > 1 or k > 1)]
    values |= {f"pass@{k}": [pass_at_k(len(hits), round(sum(hits)), k) for hits in correct] for k in pass_ks}
    if n > 1:
        voted = ["response" if any(r["correct"] and r["key"] is None for r in group) else "key" for group in groups]
        keys = [[row[name] for row in group] for name, group in zip(voted, groups, strict=True)]
        values[f"maj@{n}"] = [majority(k, hits) for k, hits in zip(keys, correct, strict=True)]
        if "confidence" in groups[0][0]:
            weights = [[row["confidence"] for row in group] for group in groups]
            values[f"best_of_{n}"] = [best_of_n(hits, w) for hits, w in zip(correct, weights, strict=True)]
            values[f"vote_of_{n}"] = [
                weighted_vote(k, hits, w) for k, hits, w in zip(keys, correct, weights, strict=True)
            ]
    return values
