"""Labels by majority vote: a model's most frequent answer to a problem takes the place of the known answer, as in TTRL
(arXiv 2504.16084) and SeRL (2505.20347).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megatron_rl.rewards.answer_key import normal_form
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.texts.tags import answer_text, joined_boxes
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Outcome, Prompt

# Fields of a problem, besides `answer`, in which data sets store the known answer. In a vote, reward functions get
# problems without these fields, because the elected answer replaces the known answer.
KNOWN = ("answers", "reward_model", "ground_truth")


@dataclass(frozen=True)
class Label:
    """The answer that won the vote of one group. `text`: the first response with this answer. `share`: share of the
    group's responses, with and without an answer, that have this answer.
    """

    answer: str
    text: str
    share: float


def elect(texts: Sequence[str]) -> Label | None:
    r"""Returns the most frequent answer, in \boxed{} or an <answer> block, of a group's responses; the earliest one if
    several are equally frequent: training needs one label, where an evaluation (`statistics.majority`) averages over
    the tied answers. Returns None if no response has an answer. Answers are compared by `normal_form`.
    """
    answers = [answer_text(text) if (boxes := joined_boxes(text)) is None else boxes for text in texts]
    keys = [normal_form(answer) if answer else None for answer in answers]
    if not (votes := Counter(key for key in keys if key)):
        return None
    winner, count = votes.most_common(1)[0]
    first = keys.index(winner)
    return Label(answer=str(answers[first]), text=texts[first], share=count / len(texts))


@dataclass
class VotedLabels:
    """The answers that responses elect by majority vote in one call of `solve`. `labels`: {index of the prompt: label}.
    A label is None if no response to the prompt had an answer. `group_size`: number of responses to each prompt.
    """

    group_size: int
    labels: dict[int, Label | None] = field(default_factory=dict)

    def grade(
        self, context: RolloutContext, places: Sequence[int], texts: Sequence[str],
        payloads: Sequence[Mapping[str, Any]],
    ) -> tuple[list[Mapping[str, Any]], list[Graded]]:  # fmt: skip
        """Grades responses against the elected answers. Returns (payloads with the elected answers, gradings).

        The first call with responses to a prompt must have all responses of the prompt's group, which elect the
        prompt's label. Later calls use this label. If there is no label, the responses get the lowest reward without
        being graded. `places`: index of each response among all samples; it determines the response's prompt.
        """
        groups: dict[int, list[str]] = {}
        for place, text in zip(places, texts, strict=True):
            groups.setdefault(place // self.group_size, []).append(text)
        self.labels |= {index: elect(group) for index, group in groups.items() if index not in self.labels}
        labels = [self.labels[place // self.group_size] for place in places]
        unknown = [{key: value for key, value in p.items() if key not in KNOWN} for p in payloads]
        voted: list[Mapping[str, Any]] = [
            {**p, "answer": label.answer if label else None} for p, label in zip(unknown, labels, strict=True)
        ]
        labelled = [i for i, label in enumerate(labels) if label is not None]
        unanswered = Graded(Outcome.SCORE, score=context.lowest_reward, threshold=context.threshold)
        graded = [unanswered] * len(texts)
        gradings = context.grade([texts[i] for i in labelled], [voted[i] for i in labelled])
        for i, grading in zip(labelled, gradings, strict=True):
            graded[i] = grading
        return voted, graded

    def metrics(self, context: RolloutContext, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Returns votes/share (mean share of the responses that have the label as their answer) and, if prompts have
        known answers, votes/labels_right: share of these prompts whose label the reward function grades as correct.
        Prompts whose label could not be graded are left out of this share. There is no share if the scale of the
        rewards is unknown.
        """
        metrics = {"votes/share": fmean(label.share if label else 0.0 for label in self.labels.values())}
        answered = [index for index, prompt in enumerate(prompts) if prompt.payload.get("answer") is not None]
        pairs = [
            (label.text, prompts[index].payload) for index in answered if (label := self.labels[index]) is not None
        ]
        if answered:
            graded = context.grade([text for text, _ in pairs], [payload for _, payload in pairs])
            ungraded = sum(grading.outcome is not Outcome.SCORE or grading.cut_off for grading in graded)
            right = [grading.correct for grading in graded]
            if ungraded < len(answered) and None not in right:
                metrics["votes/labels_right"] = sum(map(bool, right)) / (len(answered) - ungraded)
        return metrics
