"""Tango whose verifier judges two solutions of a problem in one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.judging import Judging, Question
from megatron_rl.recipes.review import Reviewer, Verification
from megatron_rl.recipes.solutions import Solution
from megatron_rl.recipes.tango import Tango
from megatron_rl.rewards.verdicts import Review
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.texts.control_tokens import fill_quoting
from megatron_rl.training.iteration import Iteration, PromptSource, RolloutContext, RolloutsByRole
from megatron_rl.types import STEP, Prompt

HEAD, EACH, TAIL = "<bos> {question} <q> ", "<sol> {solution} #{num_steps} ", "<ver>"  # together the prompt of one
END = "</final_verification>"
SIZE = 2  # solutions in a text
Pair = Sequence[Solution]  # of one problem; the last of a group may stand alone


@dataclass(kw_only=True)
class TogetherTango(Tango):
    """A run that trains as Tango does. In a generator's iteration solutions are verified in pairs; one verification
    follows the other in the answer. The verifier must have learned that (verifiers.py). A pair whose prompt is too long
    is not verified."""

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        alone = self._reviewer
        if iteration.role == self.solver:
            self._reviewer = ReviewerOfPairs(alone.role, alone.template, alone.gamma)
        try:
            return super().rollout(iteration, source, context)
        finally:
            self._reviewer = alone


class ReviewerOfPairs(Reviewer):
    """Asks about two solutions at once."""

    def judging(self, context: RolloutContext, sampling: Sampling) -> JudgingOfPairs:  # type: ignore[override]
        return JudgingOfPairs(self, context, sampling)


class JudgingOfPairs:
    """A stream of requests to the verifier's engine. Two solutions of one problem are joined as they become known."""

    def __init__(self, reviewer: ReviewerOfPairs, context: RolloutContext, sampling: Sampling) -> None:
        self._reviewer, self._context = reviewer, context
        question = Question[Pair, list[Review]](prompt=self._prompt, read=self._read)
        longer = replace(sampling, max_tokens=SIZE * sampling.max_tokens)
        self._pairs = Judging(context.engines[reviewer.role], context.tokenizers[reviewer.role], longer, question)
        self._open: dict[str, list[tuple[int, Solution]]] = {}  # by problem, what waits for a second one
        self._asked: dict[int, list[int]] = {}  # first place of a pair -> its places

    def ask(self, place: int, solution: Solution) -> None:
        """Adds a solution. `place` is its index."""
        own = self._open.setdefault(solution.rollout.group, [])
        own.append((place, solution))
        if len(own) == SIZE:
            self._request(self._open.pop(solution.rollout.group))

    def collect(self, watch: Stopwatch) -> dict[int, list[Verification]]:
        """Waits for all verifications; see `Judging.collect`. Returns {index of a solution: its verifications}. Asks
        about solutions that are still alone first."""
        for own in self._open.values():
            self._request(own)
        self._open = {}
        return {
            place: [replace(a, item=a.item[i], opinion=a.opinion[i]) for a in answers]
            for key, answers in self._pairs.collect(watch).items()
            for i, place in enumerate(self._asked[key])
        }

    def _request(self, own: Sequence[tuple[int, Solution]]) -> None:
        self._asked[own[0][0]] = [place for place, _ in own]
        self._pairs.ask(own[0][0], [solution for _, solution in own])

    def _prompt(self, pair: Pair) -> Prompt | None:
        role, rollout = self._reviewer.role, pair[0].rollout
        tokenizer = self._context.tokenizers[role]
        text = fill_quoting(tokenizer, HEAD, question=str(rollout.payload["question"]))
        for solution in pair:
            steps = str(len(solution.rollout.annotations_of(STEP)))
            text += fill_quoting(tokenizer, EACH, solution=solution.text, num_steps=steps)
        tokens = tokenize(tokenizer, text + TAIL)
        if len(tokens) > SIZE * self._context.max_prompt_tokens[role]:
            return None
        return Prompt(id=rollout.group, tokens=tokens, payload={})

    def _read(self, pair: Pair, text: str) -> list[Review]:
        *whole, rest = text.split(END)
        parts = [*(part + END for part in whole), rest, *[""] * len(pair)]
        return [self._reviewer.read(solution, part) for solution, part in zip(pair, parts, strict=False)]
