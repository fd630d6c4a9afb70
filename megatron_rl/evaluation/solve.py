"""Samples and grades a generator's answers to the problems of a set. A verifier, if given, weights the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.engines.protocol import Completion, Engine, Sampling, Tokens
from megatron_rl.evaluation.draw import ProblemSet, draw_within
from megatron_rl.evaluation.samples import Sample
from megatron_rl.evaluation.votes import Weigher
from megatron_rl.rewards.answer_key import answer_key
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.texts.response_forms import response_text

Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]
SOLVE = "solve"


@dataclass(frozen=True, kw_only=True)
class Solver:
    """A generator that answers each problem of a set `sampling.n` times."""

    engine: Engine
    tokenizer: Any
    sampling: Sampling
    grade: Grade
    context: int | None = None
    weigher: Weigher | None = None
    keep_tokens: bool = False  # whether samples get the field `token_ids`, which the measures legibility and drift need
    measure: str = field(default=SOLVE, init=False)

    def __call__(self, problems: ProblemSet, places: Sequence[int]) -> list[list[Sample]]:
        """Returns `sampling.n` graded answers (samples) for each of the problems with the indices `places`.

        The samples of a problem do not depend on which other problems are in `places`.
        """
        prompts = {place: problems.prompts[place] for place in places}
        completions = draw_within(self.engine, prompts, self.sampling, self.context)
        drawn = [(place, j, c) for place in places for j, c in enumerate(completions[place])]
        texts = decoded(self.tokenizer, [(prompts[place], c) for place, _, c in drawn])
        graded = self.grade(texts, [problems.problems[place].values for place, *_ in drawn])
        weights: Mapping[int, float] = {}
        if self.weigher is not None:
            questions = [str(problems.problems[place].values["question"]) for place, *_ in drawn]
            indices = [place * self.sampling.n + j for place, j, _ in drawn]
            weights = self.weigher.weigh(dict(zip(indices, zip(questions, texts, strict=True), strict=True)))
        groups: dict[int, list[Sample]] = {place: [] for place in places}
        for (place, j, c), text, grade in zip(drawn, texts, graded, strict=True):
            row = sample_of(problems, place, j, self.measure) | answer_of(text, c, grade)
            if self.weigher is not None:
                row["confidence"] = weights[place * self.sampling.n + j]
            groups[place].append(row | ({"token_ids": c.tokens.tolist()} if self.keep_tokens else {}))
        return [groups[place] for place in places]


def sample_of(problems: ProblemSet, place: int, sample: int, measure: str) -> Sample:
    """Returns a sample with the fields that every sample has: set, measure, problem, sample index, question and
    answer."""
    problem = problems.problems[place]
    shown = {name: str(problem.values[name]) for name in ("question", "answer") if name in problem.values}
    return {"set": problems.name, "measure": measure, "id": place, "row": problem.row, "sample": sample} | shown


def answer_of(text: str, completion: Completion, graded: Graded) -> Sample:
    """Returns the fields of a sample that describe a graded answer: response, score, outcome, normal form of the
    answer, and length."""
    sample = {"response": text, "score": graded.score, "correct": graded.correct, "outcome": graded.label}
    sample |= {"key": answer_key(text)}
    sample |= {"finished": completion.stop.finished, "tokens": len(completion.tokens)}
    return sample | ({"detail": graded.detail} if graded.detail else {})


def decoded(tokenizer: Any, pairs: Sequence[tuple[Tokens, Completion]]) -> list[str]:
    """Returns the texts of completions, without special tokens, for pairs (prompt, completion); see `response_text`."""
    return [response_text(tokenizer, prompt, completion.tokens) for prompt, completion in pairs]
