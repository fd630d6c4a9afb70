"""Verification of one model's solutions by another model: prompts, rewards of the verdicts, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megatron_rl.algorithms.advantages import PAPER_CREDIT, StepCredit, step_rewards
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.confusion import Confusion, confusion, step_confusion
from megatron_rl.evaluation.judging import Judgement, Judging, Question
from megatron_rl.recipes.solutions import Solution, annotate_steps
from megatron_rl.rewards import verdicts
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.texts.control_tokens import fill_quoting
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import has_signal
from megatron_rl.types import STEP, Annotations, Prompt, Rollout

# function (step texts, payload) -> known correctness (gold label) of each step
StepLabels = Callable[[Sequence[str], Mapping[str, Any]], list[bool]]
Verification = Judgement[Solution, verdicts.Review]
Reviewed = Literal["all", "undecided", "failed"]  # which groups of solutions are verified, see Reviews
Judged = Sequence[Sequence[Verification]]  # for each solution, its verifications


@dataclass(frozen=True)
class Reviewer:
    """The settings with which the role `role` is prompted to verify solutions. `template` is a text with {question},
    {solution} and {num_steps}.
    """

    role: str
    template: str
    gamma: float = verdicts.GAMMA  # weight of the format score in the verifier's reward
    correctness: float = 1.0  # weight of the agreement with the graded outcome in the verifier's reward

    def prompt(self, context: RolloutContext, solution: Solution) -> Prompt | None:
        """Returns the verification prompt of a solution, or None if the prompt is too long. The prompt is never
        truncated, because the instructions are at its end.
        """
        rollout, steps = solution.rollout, len(solution.rollout.annotations_of(STEP))
        question = str(rollout.payload["question"])
        tokenizer = context.tokenizers[self.role]
        values = {"question": question, "solution": solution.text, "num_steps": str(steps)}
        tokens = tokenize(tokenizer, fill_quoting(tokenizer, self.template, **values))
        if len(tokens) > context.max_prompt_tokens[self.role]:
            return None
        payload = {key: rollout.payload[key] for key in ("question", "answer") if key in rollout.payload}
        return Prompt(id=rollout.group, tokens=tokens, payload=payload)

    def judging(self, context: RolloutContext, sampling: Sampling) -> Judging[Solution, verdicts.Review]:
        """Returns a new stream of requests to the verifier's engine."""
        question = Question(prompt=lambda solution: self.prompt(context, solution), read=self.read)
        return Judging(context.engines[self.role], context.tokenizers[self.role], sampling, question)

    def read(self, solution: Solution, text: str) -> verdicts.Review:
        return verdicts.review(
            text,
            num_steps=len(solution.rollout.annotations_of(STEP)),
            correct=solution.correct,
            generator_format=solution.form,
            gamma=self.gamma,
            correctness=self.correctness,
        )

    def rollout(self, context: RolloutContext, verification: Verification) -> Rollout:
        """Converts a verification to a rollout that the verifier can be trained on. The rollout has the rewards
        "verifier", "agrees" and "format".
        """
        review = verification.opinion
        drawn = verification.rollout(self.role, partner_weight=context.partner_weights.get(self.role, 0.0))
        payload = {**drawn.payload, "verdicts": list(review.verdicts), "correct": review.agrees}
        rewards = {"verifier": review.reward, "agrees": float(review.agrees), "format": review.format}
        return replace(annotate_steps(drawn, verification.decoded), payload=payload, rewards=rewards)


class Reviews:
    """A stream of verification requests for solutions that are added one after the other.

    `reviewed`: which groups of solutions are verified.
        all        every group, each solution as soon as it is available
        undecided  groups whose outcomes are all equal, so that comparing them gives no signal
        failed     undecided groups without a correct solution
        None       no group
    Whether a group is verified is decided as soon as all of its `size` solutions are available. For groups with fewer
    solutions, `finish` decides.
    """

    def __init__(
        self, reviewer: Reviewer, context: RolloutContext, sampling: Sampling, *, reviewed: Reviewed | None = "all",
        size: int = 1,
    ) -> None:  # fmt: skip
        """Prepares the requests for `sampling.n` verifications of each solution."""
        self._judging = reviewer.judging(context, sampling)
        self._watch, self._reviewed, self._size = context.watch, reviewed, size
        self._places: list[int] = []
        self._waiting: dict[str, dict[int, Solution]] = {}
        self.skipped = 0  # number of solutions that are not verified

    def add(self, place: int, solution: Solution) -> None:
        """Adds a solution. Requests verifications of the solution if the solution's group is verified and the
        verification prompt is not too long. `place`: index of the solution."""
        self._places.append(place)
        if self._reviewed == "all":
            self._judging.ask(place, solution)
            return
        solutions = self._waiting.setdefault(solution.rollout.group, {})
        solutions[place] = solution
        if len(solutions) == self._size:
            self._decide(self._waiting.pop(solution.rollout.group))

    def finish(self) -> list[list[Verification]]:
        """Waits for all verifications. Returns the n verifications of each added solution, ordered by index. A solution
        that is not verified or whose prompt was too long has an empty list.
        """
        for solutions in self._waiting.values():
            self._decide(solutions)
        verifications = self._judging.collect(self._watch)
        return [verifications.get(place, []) for place in sorted(self._places)]

    def _decide(self, solutions: Mapping[int, Solution]) -> None:
        alike = not has_signal((s.rollout for s in solutions.values()), "outcome")
        requested = self._reviewed is not None and alike
        requested = requested and not (self._reviewed == "failed" and any(s.correct for s in solutions.values()))
        self.skipped += 0 if requested else len(solutions)
        for place, solution in solutions.items() if requested else ():
            self._judging.ask(place, solution)


def with_verdicts(
    rollout: Rollout, verifications: Sequence[Verification], credit: StepCredit = PAPER_CREDIT
) -> Rollout:
    """Adds the verdicts and the text of a solution's single verification to the payload of the solution's rollout. If
    there is one verdict per step, also sets the step rewards. Without a verification, returns the rollout unchanged.
    """
    if not verifications:
        return rollout
    [verification], annotations = verifications, rollout.annotations_of(STEP)
    payload = {**rollout.payload, "verdicts": list(verification.opinion.verdicts), "review": verification.decoded.text}
    scored = step_rewards(verification.opinion.verdicts, len(annotations), credit=credit)
    return replace(
        rollout, payload=payload, annotations={**rollout.annotations, STEP: Annotations(annotations.ranges, scored)}
    )


def outcome_confusion(verifications: Sequence[Verification]) -> Confusion:
    """Compares final verdicts with graded outcomes. A final verdict that cannot be parsed counts as "wrong"."""
    return confusion((v.opinion.final, v.item.correct) for v in verifications)


def gold_confusion(verifications: Sequence[Verification], step_labels: StepLabels) -> Confusion:
    """Compares step verdicts with gold labels, for verifications with as many verdicts as labels."""
    labels = [step_labels(v.item.steps, v.item.rollout.payload) for v in verifications]
    return step_confusion([v.opinion.verdicts for v in verifications], labels)


def aligned(verifications: Sequence[Verification]) -> float:
    """Returns the share of verifications with exactly one verdict per step of the solution; 0.0 if there are none."""
    counts = [(len(v.opinion.verdicts), len(v.item.rollout.annotations_of(STEP))) for v in verifications]
    return fmean(float(num_verdicts == steps and steps > 0) for num_verdicts, steps in counts) if counts else 0.0


def review_metrics(judged: Judged, step_labels: StepLabels | None, skipped: int = 0) -> dict[str, float]:
    """Returns metrics of the verifications of solutions.

    reviews_skipped: number of solutions in groups that are not verified (`skipped`). reviews_dropped: number of
    solutions in groups that are verified, but whose prompts were too long. verdicts_match: see `aligned`. confusion/*,
    predicted_positive: see `outcome_confusion`. step_agreement: share of the step verdicts that equal the gold labels;
    left out if there are no gold labels.
    """
    rows = [verification for group in judged for verification in group]
    without = sum(not group for group in judged)
    metrics = {"reviews_skipped": float(skipped), "reviews_dropped": float(without - skipped)}
    metrics |= {"verdicts_match": aligned(rows)}
    metrics |= outcome_confusion(rows).metrics()
    share = gold_confusion(rows, step_labels).accuracy if step_labels else None
    return metrics if share is None else metrics | {"step_agreement": share}
