"""Evaluates a reviewer (verifier) on a fixed, balanced set of solutions to held-out problems, which is stored in
checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.review import Reviewer, Reviews, StepLabels, aligned, gold_confusion, outcome_confusion
from megatron_rl.recipes.solutions import Solution, annotate_steps
from megatron_rl.recipes.transcripts import Transcript, annotate_turns, turn_texts
from megatron_rl.texts.text import decode
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import greedy, plain
from megatron_rl.types import NO_VERSION, Author, Prompt, Rollout, Stop, spans_of

Row = dict[str, Any]  # one solution as JSON values for a checkpoint, see solutions_to_json
# function that samples one solution of each prompt and returns the solutions and metrics
Draw = Callable[[RolloutContext, Sequence[Prompt], Sampling], tuple[Sequence[Solution], object]]
KEPT = "balanced_solutions"  # key under which RolloutContext.kept stores the solutions of the BalancedSet


@dataclass(frozen=True)
class BalancedSet:
    """A fixed set with equal numbers of correct and wrong solutions, on which a reviewer is evaluated. The first
    evaluation of a run creates the set and stores it in RolloutContext.kept. If the run continues with other held-out
    problems or with other settings of the set, its next evaluation creates a new set.
    """

    solver: str  # role that generates the solutions
    per_class: int
    rounds: int  # maximum number of samples per problem until enough correct and wrong solutions are found
    draw: Draw  # samples one solution of each problem

    def metrics(
        self, context: RolloutContext, reviewer: Reviewer, prompts: Sequence[Prompt], first: Sequence[Solution], labels:
        StepLabels | None,
    ) -> dict[str, float]:  # fmt: skip
        """Evaluates the reviewer on the set and returns the metrics. The first call of a run chooses the set from the
        given solutions `first` and, if these are not enough, from further samples for the same problems.
        """
        made_for = {"per_class": self.per_class, "rounds": self.rounds, "problems": _digest(prompts)}
        if KEPT not in context.kept or context.kept[KEPT]["made_for"] != made_for:
            rounds = self._rounds(context, prompts, first)
            chosen = balanced(rounds, lambda s: reviewer.prompt(context, s) is not None, self.per_class)
            context.kept[KEPT] = {"made_for": made_for, "solutions": solutions_to_json(chosen)}
        rows, tokenizer = context.kept[KEPT]["solutions"], context.tokenizers[self.solver]
        solutions = solutions_from_json(rows, prompts, self.solver, tokenizer)
        return measure_reviewer(context, reviewer, solutions, labels)[0]

    def _rounds(
        self, context: RolloutContext, prompts: Sequence[Prompt], first: Sequence[Solution]
    ) -> Iterator[Sequence[Solution]]:
        yield first
        for number in range(1, self.rounds):
            again = plain(context.samplings[self.solver], seed=context.seed_for("balanced", context.seed, number))
            yield self.draw(context, prompts, again)[0]


def balanced(rounds: Iterable[Sequence[Solution]], fits: Callable[[Solution], bool], per_class: int) -> list[Solution]:
    """Selects `per_class` correct and `per_class` wrong solutions, or fewer if there are not enough. Returns first the
    correct solutions, then the wrong solutions.

    `rounds`: the solutions of each round of samples. A round is requested only if the rounds before it did not have
        enough solutions. `fits`: returns False for a solution that is too long for the reviewer's prompt. Such a
        solution is not selected.
    """
    kept: dict[bool, list[Solution]] = {True: [], False: []}
    for solutions in rounds:
        for s in solutions:
            if len(kept[s.correct]) < per_class and fits(s):
                kept[s.correct].append(s)
        if all(len(side) >= per_class for side in kept.values()):
            break
    return kept[True] + kept[False]


def measure_reviewer(
    context: RolloutContext, reviewer: Reviewer, solutions: Sequence[Solution], step_labels: StepLabels | None
) -> tuple[dict[str, float], list[tuple[float, str]]]:
    """Verifies each solution once with verdicts sampled at temperature 1 and once with greedy verdicts. Returns metrics
    named `role/metric`, for greedy verdicts with the suffix `_greedy`. Also returns, for each solution, (1.0 if the
    sampled final verdict is "correct", otherwise 0.0; text of the sampled verification). The text is empty if the
    solution was too long to be verified.

    outcome_f1: harmonic mean of the accuracies on correct and on wrong solutions. step_f1: the same for reasoning
    steps, if gold labels exist. Both are left out if there are no correct or no wrong items. aligned: share of
    verifications with one verdict per step. predicted_positive: share of solutions judged correct. num_correct and
    num_wrong: numbers of correct and of wrong solutions.
    """
    correct, role = sum(s.correct for s in solutions), reviewer.role
    metrics: dict[str, float | None] = {"num_correct": float(correct), "num_wrong": float(len(solutions) - correct)}
    base, opinions = context.samplings[role], list[tuple[float, str]]()
    for suffix, sampling in (("", plain(base, seed=context.seed)), ("_greedy", greedy(base, seed=context.seed))):
        reviews = Reviews(reviewer, context, sampling)
        for place, solution in enumerate(solutions):
            reviews.add(place, solution)
        groups = reviews.finish()
        rows = [verification for group in groups for verification in group]
        if not suffix:
            opinions = [(float(v[0].opinion.final is True), v[0].decoded.text) if v else (0.0, "") for v in groups]
        outcome = outcome_confusion(rows)
        metrics[f"outcome_f1{suffix}"] = outcome.f1
        metrics[f"step_f1{suffix}"] = gold_confusion(rows, step_labels).f1 if step_labels else None
        metrics[f"aligned{suffix}"] = aligned(rows)
        metrics[f"predicted_positive{suffix}"] = outcome.predicted_positive
    return {f"{role}/{name}": value for name, value in metrics.items() if value is not None}, opinions


def solutions_to_json(solutions: Sequence[Solution]) -> list[Row]:
    """Converts solutions to JSON values for a checkpoint. Each row has the problem's id, the tokens from the first
    generated token on, their spans as (number of tokens, author), the stop reason, and whether the solution is correct.
    For a conversation (Transcript), a row also has the payload and the text, which includes the messages of the
    environment.
    """
    rows = []
    for s in solutions:
        start = s.rollout.start
        kept = {"text": s.text, "payload": dict(s.rollout.payload)} if isinstance(s, Transcript) else {}
        rows.append(
            {
                "id": s.rollout.group.partition(":")[2],  # id of the problem; group names are INDEX:ID
                "tokens": s.rollout.tokens[start:].tolist(),
                "spans": [(b - a, author) for a, b, author, _ in s.rollout.spans.tolist() if a >= start],
                "stop": s.rollout.stop.value,
                "correct": s.correct,
                **kept,
            }
        )
    return rows


def solutions_from_json(
    rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], role: str, tokenizer: Any
) -> list[Solution]:
    """Restores the solutions from the rows of a checkpoint. The problems are looked up in `prompts` by id."""
    problems = {p.id: p for p in prompts}
    solutions = []
    for i, row in enumerate(rows):
        prompt = problems[row["id"]]
        tokens = np.concatenate([np.asarray(prompt.tokens, np.int32), np.asarray(row["tokens"], np.int32)])
        spans = [(len(prompt.tokens), Author.ENVIRONMENT), *row["spans"]]
        rollout = Rollout(
            role=role,
            group=f"{i}:{row['id']}",
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            spans=spans_of(*((count, author, NO_VERSION) for count, author in spans)),
            stop=Stop(row["stop"]),
            payload=row.get("payload", prompt.payload),
        )
        if "text" in row:
            rollout = annotate_turns(rollout)
            turns = turn_texts(rollout, tokenizer)
            solutions.append(Transcript(rollout=rollout, text=row["text"], correct=row["correct"], turns=turns))
        else:
            decoded = decode(tokenizer, rollout.response)
            rollout = annotate_steps(rollout, decoded)
            solutions.append(Solution(rollout=rollout, text=decoded.text, correct=row["correct"]))
    return solutions


def _digest(prompts: Sequence[Prompt]) -> str:
    """Returns a digest of the ids and the tokens of held-out problems."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id} {list(prompt.tokens)}\n".encode())
    return digest.hexdigest()
