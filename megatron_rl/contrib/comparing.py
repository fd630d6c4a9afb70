"""A judge compares pairs of responses, in one order or in both, against its bias for the place of a response."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_rl.contrib.judge_role import JUDGE, judge_prompt
from megatron_rl.contrib.pairwise_reward import Comparison, read_comparison
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.judging import Judgement, Judging, Question
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Prompt

BOTH = (False, True)  # orders: as it is, and turned round


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two responses to one problem, in one order."""

    id: str
    payload: Mapping[str, Any]
    own: str  # the response whose margin is asked for
    other: str
    turned: bool  # `other` is shown first

    def margin(self, scores: tuple[float, float]) -> float:
        """Returns by how much the scores, in the order shown, put `own` above `other`."""
        return scores[1] - scores[0] if self.turned else scores[0] - scores[1]


Answer = Judgement[Pair, Comparison]


class Comparisons:
    """Pairs that become known one after the other, and what the judge makes of them. A draw depends on the sampling's
    seed and the pair's place alone."""

    def __init__(
        self, context: RolloutContext, template: str, sampling: Sampling, orders: Callable[[int], Sequence[bool]]
    ) -> None:
        """`orders`: from the place of a pair to the orders in which it is asked about, `sampling.n` times each."""
        question = Question[Pair, Comparison](
            prompt=lambda pair: _prompt(context, template, pair), read=lambda _, text: read_comparison(text)
        )
        self._judging = Judging(context.engines[JUDGE], context.tokenizers[JUDGE], sampling, question)
        self._watch, self._orders = context.watch, orders
        self._found: dict[int, list[Answer]] = {}

    def add(self, place: int, prompt: Prompt, own: str, other: str) -> None:
        """Asks about a pair, in an order only where the prompt is not too long."""
        for turned in self._orders(place):
            self._judging.ask(2 * place + turned, Pair(prompt.id, prompt.payload, own, other, turned))

    def finish(self) -> list[Answer]:
        """Waits for all. -> the answers, by place and order."""
        start = time.perf_counter()
        for key, answers in self._judging.answers():
            self._found[key] = answers
            self._watch.beat()
        self._watch.add("review", time.perf_counter() - start)
        return [answer for key in sorted(self._found) for answer in self._found[key]]

    def margin(self, place: int) -> float | None:
        """Returns the mean margin of a pair over its orders. None where one of them has no answer that can be read:
        the others alone would have the judge's bias for a place."""
        margins: list[float] = []
        for turned in self._orders(place):
            answers = self._found.get(2 * place + turned, [])
            scores = [(answer.item, answer.opinion.scores) for answer in answers]
            read = [pair.margin(found) for pair, found in scores if found is not None]
            if not read:
                return None
            margins.append(fmean(read))
        return fmean(margins)


def comparison_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Returns metrics of a judge's answers: unreadable (how many), form (share of those in the form that is asked for),
    and first_wins: the share of comparisons won by the response shown first, a tie counting half. A judge without a
    bias for a place has 0.5 there, as places are drawn by chance or both are asked about."""
    read = [answer.opinion.scores for answer in answers if answer.opinion.scores is not None]
    metrics = {"unreadable": float(len(answers) - len(read))}
    if answers:
        metrics["form"] = fmean(answer.opinion.form for answer in answers)
    if read:
        metrics["first_wins"] = fmean(0.5 + 0.5 * ((first > second) - (first < second)) for first, second in read)
    return metrics


def _prompt(context: RolloutContext, template: str, pair: Pair) -> Prompt | None:
    first, second = (pair.other, pair.own) if pair.turned else (pair.own, pair.other)
    return judge_prompt(context, template, pair.id, pair.payload, first=first, second=second)
