"""Evaluates a role on a problem set: samples and grades the role's answers, and computes metrics of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.answer_values import answer_values
from megatron_rl.recipes.solutions import Solution, solve
from megatron_rl.rewards.answer_key import answer_key
from megatron_rl.run.metrics import REPLACED
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import evaluated, greedy
from megatron_rl.types import CUT_OFF, Outcome, Prompt, Rollout

Answer = dict[str, Any]  # a Sample (see evaluation.samples) of a graded answer, without the keys "set", "measure"
# an answer with the reward `outcome`, its text, and whether it is correct (None if unknown)
GradedAnswer = tuple[Rollout, str, bool | None]


def accuracies(
    context: RolloutContext, role: str, prompts: Sequence[Prompt]
) -> tuple[dict[str, float], list[Solution]]:
    """Evaluates a role with the samples that `context.evaluation` requests, and with greedy decoding if
    `context.evaluation.also_greedy` is True. Returns {metric: value}, and the sampled solutions. Also stores the
    sampled answers in `context.answers`.

    The metrics are those of `answer_values`, such as accuracy, reward, pass@k and maj@n. Greedy decoding adds
    accuracy_greedy and reward_greedy. The metric `ungraded` is the number of answers without a score; they count as
    wrong, with a reward of 0. The metric `replaced` is the number of samples that were replaced because their grading
    failed. Counts of 0 are left out.
    """
    draws, sampling, seed = context.evaluation, context.samplings[role], context.seed
    answers, solutions, replaced = _answers(context, role, prompts, evaluated(sampling, draws, seed=seed))
    metrics = answer_metrics(role, answers, draws.k) | ({f"{role}/replaced": replaced} if replaced else {})
    if draws.also_greedy:
        likeliest = answer_metrics(role, _answers(context, role, prompts, greedy(sampling, seed=seed))[0])
        names = [f"{role}/{name}" for name in ("accuracy", "reward", "ungraded")]
        metrics |= {f"{name}_greedy": likeliest[name] for name in names if name in likeliest}
    context.answers[role] = answers
    return metrics | {f"{role}/num_problems": float(len(prompts))}, solutions


def accuracies_of_fitting(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], prompts_of_role: Sequence[Prompt | None]
) -> dict[str, float]:
    """Evaluates a role, like `accuracies`, on the problems whose prompts are short enough for the role. Returns the
    metrics, among them `too_long`, the number of problems whose prompts are too long.

    `prompts_of_role`: the role's prompt of each problem, or None if the prompt is too long.
    """
    fitting = [replace(p, tokens=o.tokens) for p, o in zip(prompts, prompts_of_role, strict=True) if o is not None]
    metrics = accuracies(context, role, fitting)[0] if fitting else {}
    too_long = len(prompts) - len(fitting)
    return metrics | ({f"{role}/too_long": float(too_long)} if too_long else {})


def answer_metrics(role: str, answers: Sequence[Sequence[Answer]], ks: Sequence[int] = ()) -> dict[str, float]:
    """Returns {role/metric: mean over problems} of graded answers. role/ungraded is the number of answers without a
    score, and is left out if it is 0. `answers`: [P][n] answers. `ks`: the values of k for pass@k."""
    ungraded = sum(row["outcome"] not in (Outcome.SCORE.value, CUT_OFF) for group in answers for row in group)
    metrics = {f"{role}/{name}": sum(values) / len(values) for name, values in answer_values(answers, ks).items()}
    return metrics | ({f"{role}/ungraded": float(ungraded)} if ungraded else {})


def answers_of(prompts: Sequence[Prompt], graded: Mapping[tuple[int, int], GradedAnswer], n: int) -> list[list[Answer]]:
    """Returns [P][n] answers to [P] problems in the format of the samples of `megatron-rl eval`. `graded`: {(index of
    the problem, index of the answer): (rollout, text, whether the answer is correct)}, without answers that have no
    score."""
    return [[_answer(prompt, i, j, graded.get((i, j))) for j in range(n)] for i, prompt in enumerate(prompts)]


def _answer(prompt: Prompt, place: int, sample: int, graded: GradedAnswer | None) -> Answer:
    shown = {name: str(prompt.payload[name]) for name in ("question", "answer") if name in prompt.payload}
    row = {"id": place, "row": prompt.id, "sample": sample, **shown}
    if graded is None:
        failed = {"response": "", "score": 0.0, "correct": False, "outcome": Outcome.ERROR.value, "key": None}
        return row | failed | {"finished": False, "tokens": 0}
    rollout, text, correct = graded
    return row | {
        "response": text, "score": rollout.rewards["outcome"], "correct": correct,
        "outcome": rollout.payload.get("grading", Outcome.SCORE.value), "key": answer_key(text),
        "finished": rollout.stop.finished, "tokens": rollout.length,
    }  # fmt: skip


def _answers(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[list[list[Answer]], list[Solution], float]:
    """Samples and grades n = `sampling.n` answers to each of P problems. Returns ([P][n] answers as dictionaries, the
    solutions that were graded, number of samples that were replaced because their grading failed).
    """
    solved: dict[int, Solution] = {}
    solutions, metrics = solve(context, role, prompts, sampling, solved.__setitem__, voted=False)
    replaced = sum(count for name, count in metrics.items() if name.startswith(REPLACED))
    graded = {
        divmod(place, sampling.n): (s.rollout, s.text, s.rollout.payload["correct"]) for place, s in solved.items()
    }
    return answers_of(prompts, graded, sampling.n), solutions, replaced
