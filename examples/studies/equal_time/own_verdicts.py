"""Tango whose steps get their rewards from elsewhere than a verification that is written for a generator's
iteration."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from examples.miniatures.last_letter.teachers import CORRECT, MAX_STEPS, NOTHING
from megatron_rl.algorithms.advantages import step_rewards
from megatron_rl.config.schema import ConfigError
from megatron_rl.recipes.review import Judged, Reviewed
from megatron_rl.recipes.solutions import VERIFIER, Solution
from megatron_rl.recipes.tango import Tango
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.texts.tags import step_spans
from megatron_rl.texts.text import decode
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.types import STEP, Annotations, Rollout


@dataclass(kw_only=True)
class OwnVerdicts(Tango):
    """A run that trains `generator` as Tango does, by verdicts that `_verdicts` gives on all solutions of problems that
    nobody solved. Verifications are written for the verifier's own iterations alone, so that the arguments for those of
    a generator's iteration (reviewed, greedy_verdicts) do nothing."""

    @abstractmethod
    def _verdicts(self, context: RolloutContext, solutions: Sequence[Solution]) -> list[Sequence[bool]]:
        """Returns the verdicts on the steps of each solution."""
        ...

    def _reviewed(self, iteration: Iteration) -> Reviewed | None:
        return None if iteration.role == self.solver else "all"

    def verified(self, context: RolloutContext, solutions: Sequence[Solution], judged: Judged) -> list[Rollout]:
        failed: set[str] = set()
        if not self._outcomes_suffice():
            solved = {s.rollout.group for s in solutions if s.correct}
            failed = {s.rollout.group for s in solutions} - solved
        asked = [i for i, s in enumerate(solutions) if s.rollout.group in failed]
        with context.watch("review"):
            found = dict(zip(asked, self._verdicts(context, [solutions[i] for i in asked]), strict=True))
        context.add_metrics(self.solver, self._agreement(solutions, found))
        context.handed_over["reviewed"] = [i in found for i in range(len(solutions))]
        return [self._marked(s.rollout, found[i]) if i in found else s.rollout for i, s in enumerate(solutions)]

    def _marked(self, rollout: Rollout, verdicts: Sequence[bool]) -> Rollout:
        annotations = rollout.annotations_of(STEP)
        scores = step_rewards(verdicts, len(annotations), credit=self.step_credit)
        return replace(rollout, annotations={**rollout.annotations, STEP: Annotations(annotations.ranges, scores)})

    def _agreement(self, solutions: Sequence[Solution], found: dict[int, Sequence[bool]]) -> dict[str, float]:
        """Returns the share of verdicts that are those of the labels, where there are labels."""
        if self._labels is None:
            return {}
        labels = {i: self._labels(solutions[i].steps, solutions[i].rollout.payload) for i, own in found.items() if own}
        same = [a == b for i, own in labels.items() for a, b in zip(own, found[i], strict=True)]
        return {"step_agreement": float(np.mean(same))} if same else {}


@dataclass(kw_only=True)
class FreeVerdicts(OwnVerdicts):
    """Tango whose verdicts are true and cost nothing: the most that a better or a cheaper verifier could win.

    No verification is asked for, so that a frozen `verifier` is loaded and does nothing. It is no method: where labels
    exist, no verifier is needed. It bounds what can be gained by verdicts, on a task whose labels are known.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_labels is None:
            raise ConfigError("recipe.args.step_labels = null: these labels are the verdicts; name their function")

    def _verdicts(self, context: RolloutContext, solutions: Sequence[Solution]) -> list[Sequence[bool]]:
        assert self._labels is not None  # made of step_labels
        return [self._labels(solution.steps, solution.rollout.payload) for solution in solutions]


@dataclass(kw_only=True)
class ScoredTango(OwnVerdicts):
    """Tango whose verdicts come from one scoring pass of the verifier over each solution.

    What is scored is the verification that finds every step correct, as a teacher of the last-letter task would write
    it (miniatures/last_letter/teachers.py). A step is correct where the verifier gives its part of that text a
    probability above a half.
    """

    def _verdicts(self, context: RolloutContext, solutions: Sequence[Solution]) -> list[Sequence[bool]]:
        """None on a solution whose prompt is too long."""
        tokenizer = context.tokenizers[VERIFIER]
        texts: dict[int, Sequence[int]] = {}
        places: dict[int, np.ndarray] = {}
        for i, solution in enumerate(solutions):
            if (asked := self._reviewer.prompt(context, solution)) is not None:
                own = tokenize(tokenizer, approval_of(solution.steps))
                decoded = decode(tokenizer, own)
                places[i] = len(asked.tokens) + decoded.tokens_of(step_spans(decoded.raw))
                texts[i] = [*asked.tokens, *own]
        found: list[Sequence[bool]] = [[] for _ in solutions]
        for i, scores in zip(texts, context.engines[VERIFIER].score([*texts.values()]), strict=True):
            parts = [scores[first:end].sum(dtype=np.float64) for first, end in places[i].tolist()]
            found[i] = [bool(np.exp(part) > 0.5) for part in parts]
        return found


def approval_of(steps: Sequence[str]) -> str:
    """Returns the beginning of a verification of these steps' texts, in which each is found correct."""
    blocks = []
    for number, step in enumerate(steps, start=1):
        claimed = step.split()[-1] if step.split() else NOTHING
        blocks.append(f"<step> #{min(number, MAX_STEPS)} {claimed} {claimed} {CORRECT} </step>")
    return " ".join(["<step_verification>", *blocks])
