"""Pairwise comparison of responses by a judge model. A pair can be shown in both orders, to compensate the judge's
position bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_rl.contrib.judged import JUDGE, judge_prompt
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.judging import Judgement, Judging, Question
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Prompt

BEST = 10.0  # maximum score that a judge may give; the minimum is 0

_TAGS = ("<principles>", "</principles>", "<critique>", "</critique>", "<scores>", "</scores>")
# The pattern can match a text in only one way, because `read_comparison` requires that each tag occurs exactly once.
_FORM = re.compile(r"<principles>(.*)</principles>\s*<critique>(.*)</critique>\s*<scores>.*</scores>", re.DOTALL)
_SCORES = re.compile(r"\s*(\d{1,2}(?:\.\d{1,6})?)\s*,\s*(\d{1,2}(?:\.\d{1,6})?)\s*")


@dataclass(frozen=True)
class Comparison:
    """A judge's comparison of two responses, parsed from the text of the judge's answer."""

    # scores of the response shown first and of the response shown second, in [0, 10]; None if unreadable
    scores: tuple[float, float] | None
    form: float  # 1.0 if the text consists of principles, a critique and readable scores in this order; otherwise 0.0


def read_comparison(text: str) -> Comparison:
    """Parses a judge's answer, which may be any text. The scores are the two numbers in the last <scores> block."""
    _, opened, rest = text.rpartition("<scores>")
    inside, closed, _ = rest.partition("</scores>")
    match = _SCORES.fullmatch(inside) if opened and closed else None
    scores = None if match is None else (float(match[1]), float(match[2]))
    if scores is None or max(scores) > BEST:
        return Comparison(None, 0.0)
    form = _FORM.fullmatch(text.strip()) if all(text.count(tag) == 1 for tag in _TAGS) else None
    return Comparison(scores, float(form is not None and bool(form[1].strip()) and bool(form[2].strip())))


BOTH = (False, True)  # the two orders of a pair, as values of Pair.turned: original, reversed


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two responses to one problem, in a given order."""

    id: str
    payload: Mapping[str, Any]
    response: str  # the margin of the pair is the score of this response minus the score of `rival`
    rival: str
    turned: bool  # True if `rival` is shown first

    def margin(self, scores: tuple[float, float]) -> float:
        """Returns the score of `response` minus the score of `rival`. `scores`: the judge's scores, in the order in
        which the responses were shown.
        """
        return scores[1] - scores[0] if self.turned else scores[0] - scores[1]


Answer = Judgement[Pair, Comparison]


class Comparisons:
    """A growing set of pairs of responses, with a judge's answers about each pair. The sampling of an answer depends
    only on the sampling seed and on the index and the order of the pair.
    """

    def __init__(
        self, context: RolloutContext, template: str, sampling: Sampling, orders: Callable[[int], Sequence[bool]]
    ) -> None:
        """Creates an empty set of pairs. `orders`: function that returns, for the index of a pair, the orders in which
        the pair is shown to the judge (values of Pair.turned). The judge is asked `sampling.n` times per order.
        """
        question = Question[Pair, Comparison](
            prompt=lambda pair: _prompt(context, template, pair),
            read=lambda _, text: read_comparison(text),
            answer_only=True,
        )
        self._judging = Judging(context.engines[JUDGE], context.tokenizers[JUDGE], sampling, question)
        self._watch, self._orders = context.watch, orders
        self._found: dict[int, list[Answer]] = {}

    def add(self, place: int, prompt: Prompt, response: str, rival: str) -> None:
        """Asks the judge about a pair, in each of the pair's orders. `place`: index of the pair. An order is skipped if
        its prompt is too long."""
        for turned in self._orders(place):
            self._judging.ask(2 * place + turned, Pair(prompt.id, prompt.payload, response, rival, turned))

    def finish(self) -> list[Answer]:
        """Waits for all answers of the judge. Returns the answers, sorted by the index and the order of the pair."""
        self._found = self._judging.collect(self._watch)
        return [answer for key in sorted(self._found) for answer in self._found[key]]

    def margin(self, place: int) -> float | None:
        """Returns the mean margin of a pair over the orders in which it was shown. Returns None if the judge gave no
        readable answer for one of the orders, because the other order alone would contain the judge's position bias.
        """
        margins: list[float] = []
        for turned in self._orders(place):
            answers = self._found.get(2 * place + turned, [])
            scores = [(answer.item, answer.opinion.scores) for answer in answers]
            read = [pair.margin(pair_scores) for pair, pair_scores in scores if pair_scores is not None]
            if not read:
                return None
            margins.append(fmean(read))
        return fmean(margins)


def comparison_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Returns metrics of a judge's answers.

    unreadable: number of unreadable answers. form: share of answers in the requested form. first_wins: share of
    comparisons won by the response shown first, with a tie counted as half. first_wins is 0.5 for a judge without
    position bias, because the order is random or both orders are used.
    """
    read = [answer.opinion.scores for answer in answers if answer.opinion.scores is not None]
    metrics = {"unreadable": float(len(answers) - len(read))}
    if answers:
        metrics["form"] = fmean(answer.opinion.form for answer in answers)
    if read:
        metrics["first_wins"] = fmean(0.5 + 0.5 * ((first > second) - (first < second)) for first, second in read)
    return metrics


def _prompt(context: RolloutContext, template: str, pair: Pair) -> Prompt | None:
    first, second = (pair.rival, pair.response) if pair.turned else (pair.response, pair.rival)
    return judge_prompt(context, template, pair.id, pair.payload, first=first, second=second)
