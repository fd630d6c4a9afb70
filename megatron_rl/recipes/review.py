"""One model judges another's solutions: the prompts for it, its verdicts, and what is measured on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_rl.engines.base import Sampling
from megatron_rl.evaluation.confusion import Confusion, agreement, confusion, step_confusion
from megatron_rl.recipes.base import Solution, with_steps
from megatron_rl.rewards import verdicts
from megatron_rl.rewards.tags import generator_format, step_texts
from megatron_rl.text import decode_all, fill
from megatron_rl.training.rollouts import Draws, tokenize
from megatron_rl.training.turns import Players
from megatron_rl.types import Prompt, Trajectory

StepLabels = Callable[[Sequence[str], Mapping[str, Any]], list[bool]]  # step texts and payload -> gold labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """One verification of one solution."""

    solution: Solution
    trajectory: Trajectory  # of the verification
    text: str
    review: verdicts.Review


@dataclass(frozen=True, kw_only=True)
class Reviewer:
    """How `role` is asked for verifications: its template has {question}, {solution} and {num_steps}."""

    role: str
    template: str
    gamma: float = verdicts.GAMMA  # weight of the format score in its reward

    def prompt(self, players: Players, solution: Solution) -> Prompt | None:
        """The verification prompt of a solution; None when it is too long (it is never cut: the instructions stand at its end)."""
        t = solution.trajectory
        text = fill(
            self.template, question=str(t.payload["question"]), solution=solution.text, num_steps=str(len(t.steps))
        )
        tokens = tokenize(players.tokenizers[self.role], text)
        if len(tokens) > players.max_prompt_tokens[self.role]:
            return None
        payload = {key: t.payload[key] for key in ("question", "answer") if key in t.payload}
        return Prompt(id=t.group, tokens=tokens, payload=payload)

    def review(self, players: Players, solutions: Sequence[Solution], sampling: Sampling) -> list[list[Reviewed]]:
        """[B] solutions -> [B][n] verifications; none for a solution whose prompt is too long."""
        reviews = self.begin(players, sampling)
        for i, solution in enumerate(solutions):
            reviews.add(i, solution)
        found = reviews.finish()
        return [found[i] for i in range(len(solutions))]

    def begin(self, players: Players, sampling: Sampling) -> Reviews:
        return Reviews(self, players, sampling)

    def read(self, players: Players, solution: Solution, drawn: Trajectory, *, steps: bool = True) -> Reviewed:
        """`steps`: mark them in the trajectory: for one that is trained on, and shown."""
        tokenizer = players.tokenizers[self.role]
        trajectory, text = with_steps(drawn, tokenizer) if steps else (drawn, *decode_all(tokenizer, [drawn.response]))
        review = verdicts.review(
            text,
            num_steps=len(solution.trajectory.steps),
            correct=bool(solution.correct),
            generator_format=generator_format(solution.text),
            gamma=self.gamma,
        )
        payload = {**trajectory.payload, "verdicts": list(review.verdicts), "correct": review.agrees}
        rewarded = replace(trajectory, payload=payload).with_rewards(
            verifier=review.reward, agrees=float(review.agrees), format=review.format
        )
        return Reviewed(solution=solution, trajectory=rewarded, text=text, review=review)


class Reviews:
    """Verifications of solutions that become known one after the other."""

    def __init__(self, reviewer: Reviewer, players: Players, sampling: Sampling) -> None:
        self._reviewer, self._players = reviewer, players
        self._draws = Draws(players.engines[reviewer.role], sampling)
        self._solutions: dict[int, Solution] = {}
        self._trained_on = sampling.logprobs

    def add(self, place: int, solution: Solution) -> None:
        """Asks for its verifications, unless its prompt is too long."""
        self._solutions[place] = solution
        prompt = self._reviewer.prompt(self._players, solution)
        if prompt is not None:
            self._draws.ask(place, prompt)

    def finish(self) -> dict[int, list[Reviewed]]:
        """Place -> its n verifications, or none."""
        start, read_s = time.perf_counter(), 0.0
        found: dict[int, list[Reviewed]] = {place: [] for place in self._solutions}
        for place, drawn in self._draws.collect():  # read while others are written
            begun = time.perf_counter()
            found[place] = [
                self._reviewer.read(self._players, self._solutions[place], t, steps=self._trained_on) for t in drawn
            ]
            read_s += time.perf_counter() - begun
            self._players.watch.beat()
        self._players.watch.add("reward", read_s)
        self._players.watch.add("review", time.perf_counter() - start - read_s)
        return found


def outcome_confusion(reviews: Sequence[Reviewed]) -> Confusion:
    """Final verdicts against graded outcomes; an unreadable verdict counts as said wrong, an ungraded solution not at all."""
    return confusion((r.review.final, r.solution.correct) for r in reviews if r.solution.correct is not None)


def gold_confusion(reviews: Sequence[Reviewed], step_labels: StepLabels) -> Confusion:
    """Step verdicts against gold labels, where their counts agree."""
    labels = [step_labels(step_texts(r.solution.text), r.solution.trajectory.payload) for r in reviews]
    return step_confusion([r.review.verdicts for r in reviews], labels)


def aligned(reviews: Sequence[Reviewed]) -> float:
    """Share of verifications with one verdict per step of the solution; 0.0 for none."""
    counts = [(len(r.review.verdicts), len(r.solution.trajectory.steps)) for r in reviews]
    return fmean(float(said == steps and steps > 0) for said, steps in counts) if counts else 0.0


def review_metrics(reviews: Sequence[Reviewed], step_labels: StepLabels | None) -> dict[str, float]:
    """verdicts_match, confusion/*, predicted_positive, and step_agreement where gold labels exist."""
    out = {"verdicts_match": aligned(reviews)} | outcome_confusion(reviews).metrics()
    share = agreement(gold_confusion(reviews, step_labels)) if step_labels else None
    return out if share is None else out | {"step_agreement": share}
